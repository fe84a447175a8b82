"""`trace`: the routes of every family, as its experts received them; padding; generate; nothing left behind."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import EXTRA, HYBRIDS, MOE_LAYERS, tiny, with_checkpointing
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub import Trace
from holdfast.hub.context import token_mask_of
from holdfast.hub.families import MOE_FAMILIES as FAMILIES
from holdfast.hub.layers import moe_layers

IDS = torch.tensor([[5, 9, 13, 7, 3, 22], [0, 0, 4, 8, 15, 16]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def generate(model: Any, tokens: int, **options: Any) -> Any:
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **options}
    return model.generate(input_ids=IDS, attention_mask=MASK, **asked)


def test_every_family_has_a_tiny_model() -> None:
    assert set(EXTRA | HYBRIDS) == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_routes_are_what_the_experts_received(model_type: str) -> None:
    model = tiny(model_type)
    received: list[tuple[Tensor, Tensor]] = []
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda _, args: received.append((args[1], args[2])))
    with holdfast.trace(model) as routes, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
    assert len(routes) == len(received) == MOE_LAYERS.get(model_type, 3)
    assert routes.token_mask is not None and torch.equal(routes.token_mask, MASK.bool())
    for routing, (experts, weights) in zip(routes, received, strict=True):
        assert routing.experts.shape == (12, 2) and routing.logits.shape == routing.gates.shape == (12, 8)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        dense = torch.zeros(12, 8).scatter(1, experts, weights.float())
        torch.testing.assert_close(routing.dense_weights, dense)
        assert (routing.weights.diff(dim=-1) <= 0).all()
        assert (routing.gates >= 0).all() and not routing.logits.requires_grad


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_traced_model_computes_what_it_computed_before(model_type: str) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        before = model(input_ids=IDS, attention_mask=MASK).logits
        with holdfast.trace(model):
            during = model(input_ids=IDS, attention_mask=MASK).logits
    assert torch.equal(before, during)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_logits_are_those_that_the_family_records_itself(model_type: str) -> None:
    model = tiny(model_type)
    with holdfast.trace(model) as routes, torch.no_grad():
        recorded = model(input_ids=IDS, output_router_logits=True).router_logits
    for routing, logits in zip(routes, recorded, strict=True):
        torch.testing.assert_close(routing.logits, logits.float())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_step_of_generate_is_a_forward(model_type: str) -> None:
    """Left-padded, two sequences: a prompt of six tokens, then one token a step, and padding is known in all of them."""
    model = tiny(model_type)
    seen: list[tuple[int, int, int]] = []

    def each(layer: int, routing: holdfast.Routing, token_mask: Tensor | None) -> None:
        assert token_mask is not None
        seen.append((layer, routing.experts.shape[0], int(token_mask.sum())))

    with holdfast.trace(model, each=each) as routes:
        generate(model, 4)
    layers = len(routes)
    assert seen == [(i, 12, 10) for i in range(layers)] + [(i, 2, 2) for i in range(layers)] * 3
    with pytest.raises(ValueError, match="recorded"):
        routes[0]


def joined(routes: Any, layer: int, rows: int = 2) -> Tensor:
    """The dense weights (B,N,E) of every step, one after the other."""
    return torch.cat([step[layer].dense_weights.view(rows, -1, 8) for step in routes.steps], dim=1)


def whole(model: Any, ids: Tensor, mask: Tensor) -> Any:
    """The routes of one forward over whole sequences."""
    with holdfast.trace(model) as routes, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return routes


@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}, {"use_cache": False}]
)
@pytest.mark.parametrize("model_type", [*FAMILIES, "rerouted"])
def test_all_steps_of_generate_are_the_routes_of_the_whole_sequence(model_type: str, options: dict[str, Any]) -> None:
    """Left-padded; the prompt at once or in chunks of four tokens; with every kind of cache and with none."""
    model = holdfast.reroute(tiny("mixtral"), "similarity") if model_type == "rerouted" else tiny(model_type)
    with holdfast.trace(model, keep="all") as routes:
        tokens = generate(model, 5, **options)
    mask = torch.cat([MASK, torch.ones(2, 4, dtype=torch.long)], dim=1)
    full = whole(model, tokens[:, :-1], mask)
    if options == {"use_cache": False}:  # every step is a whole forward
        assert [step.shape for step in routes.steps] == [(2, 6 + step) for step in range(5)]
        torch.testing.assert_close(routes.token_mask, mask.bool())
        torch.testing.assert_close(routes[0].dense_weights, full[0].dense_weights)
        return
    prompt = [(2, 4), (2, 2)] if "prefill_chunk_size" in options else [(2, 6)]
    assert [step.shape for step in routes.steps] == prompt + [(2, 1)] * 4
    for layer in range(len(routes)):
        expected = full[layer].dense_weights.view(2, 10, 8)
        torch.testing.assert_close(joined(routes, layer)[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-4)
    token_mask = [step.token_mask for step in routes.steps]
    assert torch.equal(torch.cat([real for real in token_mask if real is not None], dim=1), mask.bool())


def test_all_steps_of_a_beam_search_are_the_routes_of_the_beams_that_it_followed() -> None:
    model = tiny("mixtral")
    model.generation_config.eos_token_id = None
    with holdfast.trace(model, keep="all") as routes:
        out = generate(model, 5, num_beams=3, return_dict_in_generate=True, output_scores=True)
    mask = torch.cat([MASK, torch.ones(2, 4, dtype=torch.long)], dim=1)
    full = whole(model, out.sequences[:, :-1], mask)
    assert [step.shape for step in routes.steps] == [(6, 6)] + [(6, 1)] * 4
    # Token t + 1 of a sequence was chosen in row beam_indices[t + 1], which the forward over token t was that of.
    for layer in range(3):
        prompt = routes.steps[0][layer].dense_weights.view(6, 6, 8)[out.beam_indices[:, 0]]
        later = [step[layer].dense_weights[out.beam_indices[:, t + 1]] for t, step in enumerate(routes.steps[1:])]
        found = torch.cat([prompt, torch.stack(later, dim=1)], dim=1)
        expected = full[layer].dense_weights.view(2, 10, 8)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-4)


def test_only_requested_steps_are_kept() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model) as routes:
        generate(model, 4)
    assert len(routes.steps) == 1 and routes[0].experts.shape == (2, 2)
    with holdfast.trace(model, each=lambda *_: None) as routes:
        generate(model, 4)
    assert len(routes.steps) == 1 and not routes.steps[0]._routings
    with pytest.raises(ValueError, match="'every'"), holdfast.trace(model, keep="every"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="exclude each other"), holdfast.trace(model, keep="all", each=lambda *_: None):
        pass


def test_what_a_backward_computes_again_is_no_step() -> None:
    model = with_checkpointing(tiny("mixtral").train())
    with holdfast.trace(model, keep="all") as routes:
        for _ in range(2):
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    assert [len(step._routings) for step in routes.steps] == [3, 3]


def test_a_base_model_that_is_called_by_itself_makes_steps_with_its_own_padding() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model, keep="all") as routes, torch.no_grad():
        model(input_ids=IDS[:, :3])
        model.model(input_ids=IDS, attention_mask=MASK)
        model.model.forward(input_ids=IDS)
    assert [step.shape for step in routes.steps] == [(2, 3), (2, 6), None]
    assert routes.steps[0].token_mask is None
    torch.testing.assert_close(routes.steps[1].token_mask, MASK.bool())
    assert routes[0].experts.shape == (12, 2)
    with pytest.raises(ValueError, match="padding"):
        _ = routes.token_mask


def test_a_forward_that_fails_leaves_nothing_to_the_next_one() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model, keep="all") as routes, torch.no_grad():
        with pytest.raises(IndexError):
            model(input_ids=IDS + 1000)
        model.model(input_ids=IDS[:1, :4], attention_mask=MASK[1:, :4])
    assert routes.steps[-1].shape == (1, 4) and routes.token_mask is not None
    assert routes.token_mask.tolist() == MASK[1:, :4].bool().tolist()


def test_the_last_forward_is_the_one_that_is_kept() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model) as routes, torch.no_grad():
        model(input_ids=IDS)
        model(input_ids=IDS[:1, :4])
    assert routes[0].experts.shape == (4, 2) and routes[-1].experts.shape == (4, 2)
    assert routes.token_mask is None
    with pytest.raises(IndexError):
        routes[3]


def test_holdfast_layers_are_traced_too() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [
                holdfast.MoE(holdfast.create_router(name, dim=16, experts=4), holdfast.Experts(16, 8, 4))
                for name in ("smoe", "top-p")
            ]
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, tokens: Tensor) -> Tensor:
            for layer in self.layers:
                tokens = tokens + layer(tokens)[0]
            return tokens

    with holdfast.trace(Model()) as routes:
        Model()(torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match="recorded"):
        routes[0]
    model = Model()
    with holdfast.trace(model) as routes:
        model(torch.randn(2, 3, 16))
    assert routes.names == ["layers.0.router", "layers.1.router"]
    assert [routing.experts.shape for routing in routes] == [(6, 2), (6, 4)]


def test_hooks_are_removed_when_the_forward_fails() -> None:
    model = tiny("mixtral")
    with pytest.raises(RuntimeError, match="stop"), holdfast.trace(model):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks for module in model.modules())


def test_models_that_cannot_be_traced_are_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match="llama is a dense family"), holdfast.trace(tiny_dense("llama")):
        pass
    with pytest.raises(ValueError, match=r"Linear.*Hugging Face"), holdfast.trace(torch.nn.Linear(2, 2)):
        pass


def test_padding_is_resolved_from_every_kind_of_mask() -> None:
    real = MASK.bool()
    assert token_mask_of(None, 2, 6) is None
    assert torch.equal(token_mask_of(MASK, 2, 6), real)  # type: ignore[arg-type]
    longer = torch.cat([torch.zeros(2, 3), MASK], dim=1)
    assert torch.equal(token_mask_of(longer, 2, 6), real)  # type: ignore[arg-type]
    causal = torch.ones(6, 6).tril().bool() & real[:, None, None, :]
    assert torch.equal(token_mask_of(causal, 2, 6), real)  # type: ignore[arg-type]
    added = torch.zeros(2, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min)
    assert torch.equal(token_mask_of({"full_attention": added}, 2, 6), real)  # type: ignore[arg-type]
    static = torch.cat([causal, torch.zeros(2, 1, 6, 10).bool()], dim=-1)
    assert torch.equal(token_mask_of(static, 2, 6, past=0), real)  # type: ignore[arg-type]
    assert_refused("3 dimensions", token_mask_of, torch.ones(2, 6, 6), 2, 6)


def in_thread(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(call, *given, **named).result()


def between_layers(model: Any, act: Callable[[], Any]) -> None:
    """Call `act` once, before the second layer of the next forward."""

    def act_once(*_: Any) -> None:
        handle.remove()
        act()

    handle = model.model.layers[1].register_forward_pre_hook(act_once)


@torch.no_grad()
@pytest.mark.parametrize("router", [None, "similarity"])
def test_forwards_of_other_threads_and_tasks_are_not_traced(router: str | None) -> None:
    model: Any = tiny("mixtral") if router is None else holdfast.reroute(tiny("mixtral"), router)
    with holdfast.trace(model) as alone:
        model(input_ids=IDS)

    def check(routes: Trace) -> None:
        assert len(routes.steps) == 1 and routes.steps[0].shape == (2, 6)
        assert all(torch.equal(mine.logits, right.logits) for mine, right in zip(routes, alone, strict=True))

    with holdfast.trace(model, keep="all") as routes:
        in_thread(model, input_ids=IDS[:, :4])
        between_layers(model, lambda: in_thread(model, input_ids=IDS[:1]))
        model(input_ids=IDS)
    check(routes)

    async def traced() -> Trace:
        with holdfast.trace(model, keep="all") as routes:
            await asyncio.sleep(0)
            model(input_ids=IDS)
            await asyncio.sleep(0)
        return routes

    async def untraced() -> None:
        for _ in range(4):
            model(input_ids=IDS[:, :4])
            await asyncio.sleep(0)

    async def both() -> list[Any]:
        return list(await asyncio.gather(traced(), untraced(), traced()))

    for routes in asyncio.run(both())[::2]:
        check(routes)


@torch.no_grad()
def test_a_thread_is_traced_in_a_copied_context_only_and_one_at_a_time() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model) as routes:
        in_thread(model, input_ids=IDS)
        with pytest.raises(ValueError, match="in the same thread"):
            routes[0]
        in_thread(contextvars.copy_context().run, model, input_ids=IDS)
    assert routes[0].experts.shape == (12, 2)
    with holdfast.trace(model) as routes:
        copied = contextvars.copy_context()

        def run_other() -> None:
            for call in (model, model.forward):
                assert_refused("two threads", in_thread, copied.run, call, input_ids=IDS[:1])

        between_layers(model, run_other)
        model(input_ids=IDS)
    assert all(routing.experts.shape == (12, 2) for routing in routes)


def test_a_hook_that_another_thread_is_adding_or_removing_does_nothing() -> None:
    """Torch stores a hook, and then that it gets keyword arguments: a forward between the two calls it without them."""
    model = tiny("mixtral")
    with holdfast.trace(model):
        model._forward_pre_hooks_with_kwargs.clear()
        in_thread(model, input_ids=IDS)


def test_compiled_models_run_compiled_again_after_traces_that_end_in_any_order() -> None:
    from torch._dynamo import eval_frame

    model = tiny("mixtral")
    entered, left = threading.Event(), threading.Event()

    def trace_longer() -> None:
        with holdfast.trace(model):
            entered.set()
            assert left.wait(60)
        assert eval_frame._stance.stance == "default"

    with ThreadPoolExecutor(1) as other:
        with holdfast.trace(model):
            longer = other.submit(trace_longer)
            assert entered.wait(60)
        assert eval_frame._stance.stance == "force_eager"
        left.set()
        longer.result()


def test_copies_by_data_parallel_are_refused() -> None:
    model = tiny("mixtral")
    rerouted: Any = holdfast.reroute(tiny("mixtral"), "smoe")
    wrapped = torch.nn.DataParallel(model)
    for context in (holdfast.trace, holdfast.record):
        with pytest.raises(ValueError, match="DistributedDataParallel"), context(wrapped):  # type: ignore[operator]
            pass
    with pytest.raises(ValueError, match="DistributedDataParallel"), holdfast.trace(model):
        model._replicate_for_data_parallel()(input_ids=IDS)  # what DataParallel calls on several GPUs
    assert_refused("DistributedDataParallel", rerouted._replicate_for_data_parallel(), input_ids=IDS)
