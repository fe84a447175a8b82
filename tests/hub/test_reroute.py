"""Routers put into MoE models of every family, and taken out again."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_models import places
from router_names import IN_TEXT_MODELS
from tiers import quick_or_slow
from tiny import EXTRA, HYBRIDS, MOE_LAYERS, tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.hub.replacements import ReroutedGate
from holdfast.hub.tracing import router_calls
from holdfast.kernels.grouped import naive
from holdfast.routing import Context

FAMILIES = sorted(EXTRA)
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1]), torch.tensor([0])), torch.tensor(0))
NEUTRAL = ["smoe", "symphony", "ac", "ac+symphony"]  # start from the checkpoint's own outputs
NOTHING_TO_LEARN = ["smoe-dropout", "random", "hash"]  # their scores are frozen
ROBUST = ["smooth", "similarity", "attention", "ac+symphony+attention+smooth"]
OTHERS = [*sorted({*IN_TEXT_MODELS} - {*NEUTRAL, *NOTHING_TO_LEARN}), "ac+symphony+attention+smooth"]
# Every router in two families that could not differ more, the robust ones in all.
PAIRS = [
    (family, router)
    for family in FAMILIES
    for router in [*NEUTRAL, *OTHERS, *NOTHING_TO_LEARN]
    if router in (*NEUTRAL, *ROBUST) or family in ("mixtral", "deepseek_v3")
]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return out[MASK.bool()]


def generated(model: Any) -> Tensor:
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=8, min_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("backend", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_the_native_router_is_bit_identical(family: str, backend: str) -> None:
    model = tiny(family)
    model.set_experts_implementation(backend)
    before, tokens = logits(model), generated(model)
    holdfast.reroute(model, "native")
    assert all(isinstance(moe_layer.gate, ReroutedGate) for moe_layer in moe_layers(model))
    assert torch.equal(logits(model), before)
    assert torch.equal(generated(model), tokens)


def test_a_tie_between_groups_of_experts_goes_to_the_lower_one() -> None:
    model = tiny("deepseek_v3", n_routed_experts=64, n_group=16, topk_group=4, num_experts_per_tok=4)
    holdfast.reroute(model, "smoe")
    for moe_layer in moe_layers(model):
        torch.nn.init.zeros_(moe_layer.gate.weight)
    with holdfast.trace(model) as routes:
        logits(model)
    assert all(torch.equal(routing.experts, torch.arange(4).expand_as(routing.experts)) for routing in routes)


@pytest.mark.parametrize("backend", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, FAMILIES[:3]))
def test_another_router_changes_the_output_and_restore_brings_it_back(family: str, backend: str) -> None:
    model = tiny(family)
    model.set_experts_implementation(backend)
    before, names = logits(model), sorted(model.state_dict())
    holdfast.reroute(model, "remoe")
    assert (logits(model) - before).abs().max() > 0.1
    holdfast.restore(model)
    assert torch.equal(logits(model), before)
    assert sorted(model.state_dict()) == names
    assert type(model) is type(tiny(family))
    assert not hasattr(model.config, "holdfast")


@pytest.mark.parametrize("router", NEUTRAL)
@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_routers_start_from_the_checkpoints_own_outputs(family: str, router: str) -> None:
    model = tiny(family)
    with holdfast.trace(model) as native:
        before = logits(model)
    holdfast.reroute(model, router)
    with holdfast.trace(model) as routes:
        after = logits(model)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert len(routes) == len(native) == MOE_LAYERS.get(family, 3)
    for ours, theirs in zip(routes, native, strict=True):
        assert torch.equal(ours.chosen, theirs.chosen)
        torch.testing.assert_close(ours.weights, theirs.weights, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "router"), quick_or_slow(PAIRS, PAIRS[::20]))
def test_routers_train_save_load_and_are_taken_out_again(family: str, router: str, tmp_path: Path) -> None:
    model = tiny(family)
    gates = {moe_layer.name: moe_layer.gate.weight.detach().clone() for moe_layer in moe_layers(model)}
    before = logits(model)
    holdfast.reroute(model, router, losses=holdfast.Losses(balance=0.1))
    model.train()
    model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for moe_layer in moe_layers(model):
        learning = [moe_layer.gate.weight] if moe_layer.gate.weight.requires_grad else []
        learning += [parameter for parameter in moe_layer.gate.holdfast.parameters() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in learning]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        learns = any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
        assert learns == (router not in NOTHING_TO_LEARN)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    model.eval()
    after = logits(model)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved")).eval()
    assert torch.equal(logits(loaded), after)
    holdfast.restore(model)
    with torch.no_grad():  # what training changed, changed back: nothing else did
        fresh = dict(tiny(family).named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(fresh[name])
    assert all(torch.equal(moe_layer.gate.weight, gates[moe_layer.name]) for moe_layer in moe_layers(model))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_smooth_works_without_training(family: str) -> None:
    """From the first forward the strip is open: some tokens use more than k experts, the k best are still the family's."""
    model = tiny(family)
    with holdfast.trace(model) as native:
        before = logits(model)
    holdfast.reroute(model, "smooth")
    with holdfast.trace(model) as routes:
        after = logits(model)
    assert not torch.equal(before, after)
    extra = routes[0].used.sum(1) - 2
    assert 0 < extra.float().mean() < 3
    assert ((routes[0].chosen & native[0].chosen) == native[0].chosen).all()
    alone = extra == 0
    assert alone.any()
    torch.testing.assert_close(routes[0].dense_weights[alone], native[0].dense_weights[alone], atol=1e-5, rtol=1e-5)


def test_a_closed_strip_is_the_familys_own_rule() -> None:
    for family in FAMILIES:
        model = tiny(family)
        before = logits(model)
        torch.testing.assert_close(logits(holdfast.reroute(model, "smooth", eps=0.0)), before, atol=1e-4, rtol=1e-4)


def naive_experts(module: Any, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    up, down = module.gate_up_proj, module.down_proj
    up, down = (up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (up, down)
    up_bias, down_bias = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return naive.experts(tokens, experts, weights, up, down, up_bias, down_bias, module._apply_gate, gated=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_experts_function_with_unused_slots_equals_a_loop(family: str) -> None:
    """Outputs and every gradient; the native functions raise at the sentinel, or give garbage gradients."""
    module = moe_layers(holdfast.reroute(tiny(family), "smooth"))[0].experts
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(13, 32, generator=generator, requires_grad=True)
    experts = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(13)])  # 8 is an unused slot
    weights = torch.rand(13, 5, generator=generator).masked_fill(experts == 8, 0.0).requires_grad_()
    leaves = [tokens, weights, *module.parameters()]
    results = []
    for function in (module, lambda *given: naive_experts(module, *given)):
        out = function(tokens, experts, weights)
        results.append((out, torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=1e-4)
    for ours, theirs, leaf in zip(results[0][1], results[1][1], leaves, strict=True):
        used = experts != 8 if leaf is weights else slice(None)
        torch.testing.assert_close(ours[used], theirs[used], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "gpt_oss", "phimoe", "granitemoe"])
def test_router_logits_are_still_recorded_after_a_forward_of_the_untouched_model(family: str) -> None:
    model = tiny(family)
    native = model(input_ids=IDS, output_router_logits=True).router_logits
    if native is None:
        pytest.skip("this version of transformers records no router logits for the family")
    holdfast.reroute(model, "symphony")
    with holdfast.trace(model) as routes:
        out = model(input_ids=IDS, output_router_logits=True)
    assert len(out.router_logits) == len(native) == 3
    for recorded, routing in zip(out.router_logits, routes, strict=True):
        assert torch.equal(recorded.view(-1, 8), routing.logits)


def test_the_gates_own_weights_learn_and_keep_their_names() -> None:
    model = holdfast.reroute(tiny("mixtral"), "symphony+smooth")
    names = dict(model.named_parameters())
    assert "model.layers.0.mlp.gate.weight" in names
    assert not any("score" in name for name in names)  # no copy of it anywhere


def test_a_score_of_another_kind_does_not_change_the_checkpoints_weights() -> None:
    model = holdfast.reroute(tiny("mixtral"), "xmoe")
    assert not any(moe_layer.gate.weight.requires_grad for moe_layer in moe_layers(model))
    assert all(
        parameter.requires_grad for moe_layer in moe_layers(model) for parameter in moe_layer.gate.holdfast.parameters()
    )
    holdfast.reroute(model, "smoe")
    assert all(moe_layer.gate.weight.requires_grad for moe_layer in moe_layers(model))
    holdfast.restore(holdfast.reroute(model, "xmoe"))
    assert all(moe_layer.gate.weight.requires_grad for moe_layer in moe_layers(model))


def test_another_k_and_only_some_layers() -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe", k=3, layers=[0, -1])
    with holdfast.trace(model) as routes:
        logits(model)
    assert [routing.experts.shape[1] for routing in routes] == [3, 2, 3]
    holdfast.reroute(model, "symphony", layers="last:1")
    with holdfast.trace(model) as routes:
        logits(model)
    assert [routing.experts.shape[1] for routing in routes] == [3, 2, 2]


def test_a_router_that_reads_the_previous_layer_gets_the_routing_of_a_native_one() -> None:
    """AC on the last layer only: the layer before it is untouched in what it does, and its choices are the clusters."""
    model = tiny("mixtral")
    before = logits(model)
    holdfast.reroute(model, "ac", layers=[2])
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=1e-4)
    spreads = moe_layers(model)[2].gate.holdfast.score.spreads
    model.train()
    model(input_ids=IDS.repeat(8, 1))
    model.eval()
    assert (spreads != 1).any()  # it has statistics of clusters from the selection of the native layer
    assert (logits(model) - before).abs().max() > 1e-3


def test_options_in_brackets_are_those_by_keyword_and_stored_as_such() -> None:
    written = holdfast.reroute(tiny("olmoe"), "similarity[tau=2]+smooth", budget=0.5)
    by_keyword = holdfast.reroute(tiny("olmoe"), "similarity+smooth", tau=2.0, budget=0.5)
    assert specs_of(written) == specs_of(by_keyword) and logits(written).equal(logits(by_keyword))
    for spec in specs_of(written).values():
        assert (spec.router, spec.options) == ("similarity+smooth", {"tau": 2.0, "budget": 0.5})
    sparse = holdfast.sparsify(tiny_dense("llama"), experts=2, k=1, router="similarity[tau=2]")
    assert {(spec.router, *spec.options.items()) for spec in specs_of(sparse).values()} == {("similarity", ("tau", 2.0))}


def test_an_option_given_twice_or_of_another_type_changes_nothing() -> None:
    model, dense = tiny("olmoe"), tiny_dense("llama")
    before = logits(model)
    twice: dict[str, Any] = {"budget": 1.0}
    for router, options in (("smooth[budget=1]", twice), ("smooth[budget=x]", {}), ("smooth[budgte=1]", {})):
        assert_refused("option", holdfast.reroute, model, router, **options)
        assert_refused("option", holdfast.sparsify, dense, experts=2, k=1, router=router, **options)
    assert logits(model).equal(before)


def test_rerouting_again_replaces_the_router() -> None:
    model = tiny("olmoe")
    before = logits(model)
    for router in ("smooth", "similarity", "attention", "symphony"):
        holdfast.reroute(model, router)
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=1e-4)
    assert logits(holdfast.restore(model)).equal(before)


def test_a_copy_of_a_rerouted_model_is_a_model_of_its_own() -> None:
    model = holdfast.reroute(tiny("mixtral"), "symphony+similarity")
    before = logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for moe_layer in moe_layers(other):
            moe_layer.gate.weight.normal_()
    assert (logits(other) - before).abs().max() > 1e-2
    assert torch.equal(logits(model), before)
    holdfast.restore(other)
    assert torch.equal(logits(model), before)


def test_a_model_in_bf16_is_routed_in_float32_and_keeps_its_state_so() -> None:
    model = holdfast.reroute(tiny("mixtral").to(torch.bfloat16), "symphony+smooth")
    buffers = [buffer for moe_layer in moe_layers(model) for buffer in moe_layer.gate.holdfast.buffers()]
    state = [buffer for buffer in buffers if buffer.is_floating_point()]
    assert state and all(buffer.dtype == torch.float32 for buffer in state)
    with holdfast.trace(model) as routes:
        out = logits(model)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    assert routes[0].logits.dtype == torch.float32
    assert (routes[0].logits.bfloat16().float() != routes[0].logits).any()


def test_rerouting_before_or_after_the_move_to_bf16_is_the_same() -> None:
    after = holdfast.reroute(tiny("mixtral").to(torch.bfloat16), "symphony+smooth")
    before = holdfast.reroute(tiny("mixtral"), "symphony+smooth").to(torch.bfloat16)
    assert torch.equal(logits(before), logits(after))


def offloaded(folder: Path, family: str) -> Any:
    """Loaded with a device_map that keeps a layer's weights on disk until they are needed."""
    pytest.importorskip("accelerate")
    kind = type(tiny(family))
    where = places("cpu") | {"model.layers.1": "disk"}
    return kind.from_pretrained(folder / "plain", device_map=where, offload_folder=folder / "offload").eval()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_a_model_loaded_with_a_device_map_is_rerouted_too(family: str, tmp_path: Path) -> None:
    """Accelerate's hooks hide a class's forward: a swap by class alone silently does nothing."""
    tiny(family).save_pretrained(tmp_path / "plain")
    model = offloaded(tmp_path, family)
    assert any(moe_layer.gate.weight.is_meta for moe_layer in moe_layers(model))
    before = logits(model)
    torch.testing.assert_close(before, logits(tiny(family)))
    holdfast.reroute(model, "native")
    assert torch.equal(logits(model), before)
    holdfast.reroute(model, "smooth")
    torch.testing.assert_close(logits(model), logits(holdfast.reroute(tiny(family), "smooth")))
    holdfast.reroute(model, "remoe")
    assert (logits(model) - before).abs().max() > 0.1
    holdfast.restore(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("router", ["smooth", "symphony", "ac+similarity"])
def test_a_sparsified_model_is_rerouted_and_restored(router: str) -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="smoe", noise=0.5)
    before = logits(model)
    scores = model.model.layers[0].mlp.router.score.weight
    holdfast.reroute(model, router)
    new = model.model.layers[0].mlp.router
    own = new.score.base if router.startswith("ac") else new.score
    assert own.weight is scores  # the same scores
    if router == "symphony":
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    else:
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(holdfast.restore(model)), before)
    assert_refused("restore", holdfast.restore, model)


def test_mistakes_raise_a_one_line_error() -> None:
    model = tiny("mixtral")
    before, names = logits(model), sorted(model.state_dict())
    mistakes: list[tuple[Any, str]] = [
        (lambda: holdfast.reroute(model, "symphonie"), "symphony"),
        (lambda: holdfast.reroute(model, "smooth", k=9), "k is 9"),
        (lambda: holdfast.reroute(model, "top-p", k=2), "router 'top-p' has no k"),
        (lambda: holdfast.sparsify(tiny_dense("llama"), experts=4, k=3, router="xmoe+top-p"), "has no k"),
        (lambda: holdfast.reroute(model, "smooth", bugdet=1), "budget"),
        (lambda: holdfast.reroute(model, "smooth", layers="first:2"), "layers"),
        (lambda: holdfast.reroute(model, "smooth", layers="last:9"), "last:1 to last:3"),
        (lambda: holdfast.reroute(model, "smooth", layers=[3]), "3"),
        (lambda: holdfast.reroute(model, "smooth", layers=[]), "empty"),
        (lambda: holdfast.reroute(model, "native", k=3), "k = 2"),
        (lambda: holdfast.reroute(model, "native", eps=1), "options"),
        (lambda: holdfast.reroute(model, "smoe", losses=lambda *_: {}), "holdfast.Losses"),  # type: ignore[arg-type, return-value]
        (lambda: holdfast.reroute(model, "smoe", rank=torch.ones(1)), "option"),
        (lambda: holdfast.restore(model), "rerouted"),
        (lambda: holdfast.reroute(tiny_dense("llama"), "smooth"), "sparsify"),
        (lambda: holdfast.reroute(tiny_dense("siglip"), "smooth"), "sparsify"),
        (lambda: holdfast.reroute(torch.nn.Linear(2, 2), "smooth"), "Hugging Face"),
    ]
    for mistake, sentence in mistakes:
        assert_refused(sentence, mistake)
    assert torch.equal(logits(model), before)  # and nothing was changed half-way
    assert sorted(model.state_dict()) == names


def test_a_broken_checkpoint_is_refused() -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        moe_layers(model)[1].gate.weight[0, 0] = torch.nan
    assert_refused(r"layers\.1\.mlp\.gate.*NaN", holdfast.reroute, model, "smooth")


def test_an_unsupported_family_raises_an_error_with_advice() -> None:
    config = transformers.JambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = torch.nn.Module()
    model.config = config  # type: ignore[assignment]
    assert_refused("jamba", holdfast.reroute, model, "smooth")


def test_a_gate_whose_forward_another_library_replaced_is_refused() -> None:
    """Set on the instance, so that the class's forward never runs: as transformers 5.17 does to shard experts."""
    model = tiny("mixtral")
    gate = model.model.layers[1].mlp.gate
    gate.forward = gate.forward
    assert_refused(r"model\.layers\.1\.mlp.*forward", holdfast.reroute, model, "symphony")
    assert not any(isinstance(moe_layer.gate, ReroutedGate) for moe_layer in moe_layers(model))


def test_unused_slots_are_refused_where_another_library_dispatches_tokens() -> None:
    """As transformers does with `distributed_config`; a fixed k goes through."""
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward
    assert_refused(r"fixed k.*shard_experts", holdfast.reroute, model, "smooth")
    before = logits(model)
    torch.testing.assert_close(logits(holdfast.reroute(model, "symphony")), before, atol=1e-5, rtol=1e-5)


def _state(model: Any) -> dict[str, Tensor]:
    """What routers and experts of ours hold."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in tensors.items() if "holdfast" in name or "router" in name}


@pytest.mark.parametrize("router", ["symphony", "smooth", "ac", "ac+symphony+smooth"])
@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_a_model_made_on_meta_starts_as_one_made_in_memory(kind: str, router: str) -> None:
    """`init_weights` after `to_empty`, as transformers' own tests do: without it, state would be what the memory held."""

    def build() -> Any:
        if kind == "mixtral":
            return holdfast.reroute(transformers.MixtralForCausalLM(tiny("mixtral").config), router)
        return type(changed)(copy.deepcopy(changed.config))

    changed: Any = holdfast.sparsify(tiny_dense("llama"), experts=4, router=router) if kind == "llama" else None
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)  # as memory may hold
    model.init_weights()
    expected = _state(build())
    assert _state(model).keys() == expected.keys() and expected
    for name, value in _state(model).items():
        if name.endswith(("score.weight", "base.weight")):  # random
            assert 0 < value.std() < 1
        else:
            torch.testing.assert_close(value, expected[name])
    assert not any((parameter == 7).all() for parameter in model.parameters())


def test_init_weights_does_not_change_a_router_that_has_learned() -> None:
    model = holdfast.reroute(tiny("mixtral"), "ac+symphony+smooth").train()
    for _ in range(2):
        model(input_ids=IDS, attention_mask=MASK)
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_layers_with_the_native_router_have_hooks_only_if_their_routing_is_read() -> None:
    def hooked(model: Any) -> list[bool]:
        return [bool(layer.self_attn._forward_pre_hooks or layer.mlp._forward_pre_hooks) for layer in model.model.layers]

    model = tiny("mixtral")
    before = logits(model)
    assert hooked(holdfast.reroute(model, "native")) == [False] * 3
    assert torch.equal(logits(model), before)
    assert hooked(holdfast.reroute(tiny("mixtral"), "native", losses=holdfast.Losses(balance=0.1))) == [True] * 3
    # Without losses, a trainer may request the balance loss of all layers. With them, `ac` still reads the layer before it.
    model = holdfast.reroute(holdfast.reroute(tiny("mixtral"), "native"), "ac", layers=[2])
    assert hooked(model) == [True] * 3
    expected = logits(model)
    holdfast.reroute(model, "ac", layers=[2], losses=holdfast.Losses(balance=0.1))
    assert hooked(model) == [False, True, True]
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("router", ["smoe", "symphony", "smooth", "ac", "hash"])
def test_a_router_of_single_tokens_gets_no_more_than_it_reads_in_evaluation(router: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router, losses=holdfast.Losses(balance=0.1))
    with router_calls(model) as calls:
        model(input_ids=IDS, attention_mask=MASK)
        read = {"ac": {"previous"}, "hash": {"token_ids"}}.get(router, set())
        for call in calls[1:]:  # the first layer of `ac` has no previous one
            values = {field.name: getattr(call.context, field.name) for field in fields(Context)}
            assert {name for name, value in values.items() if value is not None and value is not False} == read
            assert call.tokens.shape == (*IDS.shape, 32)
        model.train()(input_ids=IDS, attention_mask=MASK)  # there, padding counts nowhere
        for call in calls:
            assert call.context is not None and call.context.token_mask is not None
            assert torch.equal(call.context.token_mask, MASK.bool())
