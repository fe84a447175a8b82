"""`record`: the routes of generated sequences are those of one forward over them, position by position."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from foreign_routes import IDS, MASK
from router_names import IN_TEXT_MODELS
from tiers import quick_or_slow
from tiny import tiny
from wording import assert_refused

import holdfast
from holdfast.hub.families import MOE_FAMILIES

SIZES: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def assert_recorded(model: Any, **options: Any) -> None:
    """Generate two left-padded sequences, and compare with the routes of one forward over them."""
    with holdfast.record(model) as recorder:
        tokens = model.generate(input_ids=IDS, attention_mask=MASK, **{**SIZES, **options})
    mask = torch.cat([MASK, torch.ones(2, tokens.shape[1] - 6, dtype=torch.long)], dim=1)
    with holdfast.trace(model) as traced, torch.no_grad():
        model(input_ids=tokens, attention_mask=mask)
    found, whole = recorder.routes(tokens), holdfast.Routes.from_trace(traced, model)
    assert torch.equal(found.recorded[:, :-1], mask[:, :-1].bool()) and not found.recorded[:, -1].any()
    assert int(found.differs(whole).sum()) == 0
    assert not any(hook for module in model.modules() for hook in module._forward_pre_hooks if "Recorder" in str(hook))


@pytest.mark.every_combination
@pytest.mark.parametrize("model_type", quick_or_slow(MOE_FAMILIES, ("olmoe", "deepseek_v3", "granitemoehybrid")))
def test_routes_of_generated_text_are_those_of_one_forward(model_type: str) -> None:
    assert_recorded(tiny(model_type))


@pytest.mark.every_combination
@pytest.mark.parametrize("router", quick_or_slow(IN_TEXT_MODELS, ("smooth", "similarity", "ac", "top-p")))
def test_every_cacheable_router_is_recorded(router: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = holdfast.reroute(tiny("mixtral"), router)
    found = model.model.layers[1].mlp.gate.holdfast
    if not (found.traits.cacheable and found.traits.causal):
        pytest.skip("this router cannot decode with a cache")
    assert_recorded(model)


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 4}, {"cache_implementation": "static"}, {"use_cache": False}, {"do_sample": True}]
)
def test_every_way_to_generate_is_recorded(options: dict[str, Any]) -> None:
    assert_recorded(tiny("mixtral"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["the family's own", pytest.param("smooth", marks=pytest.mark.slow)])
def test_a_model_that_was_compiled_before_is_recorded(router: str) -> None:
    """Compiled code does not run hooks that are added later to modules inside the model."""
    torch.compiler.reset()
    model = tiny("mixtral", num_hidden_layers=2)
    model = model if router == "the family's own" else holdfast.reroute(model, router)
    expected = model(input_ids=IDS).logits
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=IDS).logits, expected)
        with holdfast.record(model) as recorder:
            compiled(input_ids=IDS)
        with holdfast.trace(model) as traced:
            compiled(input_ids=IDS)
        recorded = recorder._rollouts[0].length
        compiled(input_ids=IDS)  # the compiled code again, without hooks
    routes = recorder.routes(IDS)
    assert routes.recorded.all() and len(recorder._rollouts) == 1 and recorder._rollouts[0].length == recorded
    assert int(routes.differs(holdfast.Routes.from_trace(traced, model)).sum()) == 0
    torch.compiler.reset()


def test_sequences_that_end_early_have_no_record_in_their_padding() -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        free = model.generate(input_ids=IDS, attention_mask=MASK, **SIZES)
    stop = int(free[0, 7])  # the second new token of the first sequence ends it
    with holdfast.record(model) as recorder:
        tokens = model.generate(
            input_ids=IDS, attention_mask=MASK, max_new_tokens=5, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
    assert (tokens[0] == 0).any(), "no sequence ended early"
    ends = (tokens[0, 6:] == stop).nonzero()[0].item() + 7
    found = recorder.routes(tokens)
    assert found.recorded[0].tolist() == [place < min(ends, tokens.shape[1] - 1) for place in range(tokens.shape[1])]
    mask = (torch.arange(tokens.shape[1]) < ends).long().unsqueeze(0)
    with holdfast.trace(model) as traced, torch.no_grad():
        model(input_ids=tokens[:1], attention_mask=mask)
    assert int(found[:1].differs(holdfast.Routes.from_trace(traced, model)).sum()) == 0
    masked = recorder.routes(tokens, attention_mask=torch.cat([MASK, torch.zeros(2, tokens.shape[1] - 6)], dim=1))
    assert masked.recorded.sum() == MASK.sum()


def test_several_rollouts_are_told_apart_by_their_tokens() -> None:
    model = tiny("mixtral")
    with holdfast.record(model) as recorder:
        batches = [
            model.generate(
                input_ids=(IDS + shift) % 64, attention_mask=MASK, num_return_sequences=2, **{**SIZES, "do_sample": True}
            )
            for shift in (0, 7)
        ]
    for tokens in batches:
        mask = torch.cat([MASK.repeat_interleave(2, 0), torch.ones(4, 5, dtype=torch.long)], dim=1)
        with holdfast.trace(model) as traced, torch.no_grad():
            model(input_ids=tokens, attention_mask=mask)
        assert int(recorder.routes(tokens).differs(holdfast.Routes.from_trace(traced, model)).sum()) == 0
    recorder.clear()
    assert_refused("was recorded", recorder.routes, batches[0])


def test_a_beam_search_and_other_tokens_are_refused() -> None:
    model = tiny("mixtral")
    model.generation_config.eos_token_id = None
    with holdfast.record(model) as recorder:
        beams = model.generate(input_ids=IDS, attention_mask=MASK, num_beams=3, num_return_sequences=3, max_new_tokens=6)
        greedy = model.generate(input_ids=IDS, attention_mask=MASK, **SIZES)
    for tokens in (beams, greedy + 1, greedy[:1]):
        assert_refused("was recorded", recorder.routes, tokens)
    assert_refused("token ids", recorder.routes, "text")


def test_recorded_routes_are_replayed_in_training_with_the_same_experts() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    with holdfast.record(model) as recorder:
        tokens = model.generate(input_ids=IDS, attention_mask=MASK, **SIZES)
    routes = recorder.routes(tokens)
    with torch.no_grad():  # a training step later
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    mask = torch.cat([MASK, torch.ones(2, 5, dtype=torch.long)], dim=1)
    with holdfast.trace(model) as traced:
        model.train()(input_ids=tokens, attention_mask=mask, labels=tokens, routed_experts=routes).loss.backward()
    assert int(routes.differs(holdfast.Routes.from_trace(traced, model)).sum()) == 0


def test_other_threads_are_not_recorded() -> None:
    model = tiny("mixtral")

    def disturb(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as other:
                other.submit(model, input_ids=IDS[:1]).result()

    model.model.layers[1].register_forward_pre_hook(disturb)
    assert_recorded(model)
