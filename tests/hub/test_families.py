"""Families without a row: recognised by their modules, with a rule that is measured on the gate, or declared by the user."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families_page import PAGE, listed
from family_checks import check_dense, check_moe, outcome
from family_models import DENSE_MODELS, MOE_MODELS, dense_inputs, is_installed, model_type, tiny_dense, tiny_moe
from tiers import quick_or_slow
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast.hub import MOE_FAMILIES, GateRule, MoEFamily
from holdfast.hub.families.moe import SparseMixer
from holdfast.hub.families.recognition import check_declared, recognise
from holdfast.hub.layers import moe_family, moe_layers
from holdfast.routing.rules import Scores
from holdfast.version import versions

IS_VERSION_OF_PAGE = f"transformers {versions()['transformers']}:" in PAGE
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
ONE_OF_EACH_RULE = ["flex_olmo", "dots1", "mistral4", "lfm2_moe", "hunyuan_v1_moe"]
ODD_DENSE = ["opt", "bloom", "t5", "wav2vec2"]
needs_flex_olmo = pytest.mark.skipif(not is_installed("flex_olmo"), reason="this transformers has no FlexOlmo")


def test_the_page_lists_every_family_and_enough_of_them_pass() -> None:
    passed, refused = listed("MoE")
    assert sorted([*passed, *refused]) == sorted(MOE_MODELS) and len(passed) >= 35
    dense, refused = listed("Dense")
    assert sorted([*dense, *refused]) == sorted(DENSE_MODELS) and len(dense) >= 28


@pytest.mark.parametrize("family", quick_or_slow(MOE_MODELS, ONE_OF_EACH_RULE))
def test_an_moe_family_gives_what_the_page_says(family: str) -> None:
    if not is_installed(family):
        pytest.skip("this transformers does not have it")
    found = outcome(check_moe, family)  # with another version of transformers, it passes or is refused
    assert found.passed == (family in listed("MoE")[0]) or not IS_VERSION_OF_PAGE, found.text


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "minimax", "lfm2_moe", "flint"])
def test_one_expert_for_each_token_has_the_rule_of_two(family: str) -> None:
    if not is_installed(family):
        pytest.skip("this transformers does not have it")
    model = tiny_moe(family)
    rule_of_two = moe_family(model).rule
    for layer in moe_layers(model):
        layer.gate.top_k = 1
    assert moe_family(model).rule == rule_of_two
    with torch.no_grad():
        expected = model(input_ids=IDS)[0]
        for router in ("native", "smoe"):
            with holdfast.trace(holdfast.reroute(model, router)) as routes:
                torch.testing.assert_close(model(input_ids=IDS)[0], expected, atol=1e-4, rtol=1e-4)
            assert all(torch.allclose(each.weights, each.weights[0], atol=1e-4) for each in routes)


@pytest.mark.parametrize("family", quick_or_slow(DENSE_MODELS, ODD_DENSE))
def test_a_dense_family_gives_what_the_page_says(family: str) -> None:
    found = outcome(check_dense, family)
    assert found.passed == (family in listed("Dense")[0]), found.text


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("t5", {"feed_forward_proj": "gated-gelu"}),
        ("dinov2", {"use_swiglu_ffn": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("falcon", {"new_decoder_architecture": True}),
    ],
    ids=str,
)
def test_variants_of_a_dense_family(family: str, changes: dict[str, Any]) -> None:
    assert check_dense(family, **changes).passed


Gate = Callable[..., Any]  # a gate's forward
UNKNOWN_RULE = "rule that Holdfast does not know"


def changing(change: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Gate], Gate]:
    """Return what changes the logits, weights and experts that a gate returns."""
    return lambda forward: lambda gate, hidden_states: change(*forward(gate, hidden_states))


def noisy(*modes: bool) -> Callable[[Gate], Gate]:
    """Return what adds noise to a gate's tokens, in training (True) or in evaluation (False)."""

    def change(forward: Gate) -> Gate:
        def noisy_forward(gate: Any, hidden_states: Tensor) -> Any:
            noise = 0.1 * torch.randn_like(hidden_states) if gate.training in modes else 0.0
            return forward(gate, hidden_states + noise)

        return noisy_forward

    return change


def extra_argument(forward: Gate) -> Gate:
    def forward_with_temperature(gate: Any, hidden_states: Tensor, temperature: float = 1.0) -> Any:
        return forward(gate, hidden_states)

    return forward_with_temperature


def wrong_on_ties(logits: Tensor, weights: Tensor, experts: Tensor) -> Any:
    is_tie = (logits == logits[:, :1]).all(-1, keepdim=True)
    return logits, weights.where(~is_tie, 0.1), experts


def wrong_for_one_token(logits: Tensor, weights: Tensor, experts: Tensor) -> Any:
    return logits, weights if len(weights) > 1 else weights / 2, experts


# What a gate must not do, and what the message must say.
HOSTILE: dict[str, tuple[Callable[[Gate], Gate], str]] = {
    "wrong weights": (changing(lambda logits, weights, experts: (logits, weights * 1.001, experts)), UNKNOWN_RULE),
    "random in evaluation": (noisy(True, False), "random results in evaluation"),
    "random in training": (noisy(True), "random results in training"),
    "an extra argument": (extra_argument, "also takes 'temperature'"),
    "two values": (changing(lambda logits, weights, experts: (logits, weights)), "returns 2 values"),
    "no gradient": (changing(lambda logits, weights, experts: (logits, weights.detach(), experts)), UNKNOWN_RULE),
    "capped logits": (changing(lambda logits, *rest: (3 * torch.tanh(logits / 3), *rest)), "not a linear map"),
    "wrong on ties": (changing(wrong_on_ties), UNKNOWN_RULE),
    "wrong for one token": (changing(wrong_for_one_token), UNKNOWN_RULE),
}


@needs_flex_olmo
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_gate_that_differs_is_refused_by_name(kind: str) -> None:
    model, (change, says) = tiny_moe("flex_olmo"), HOSTILE[kind]
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.__class__ = type("Gate", (type(gate),), {"forward": change(type(gate).forward)})
    with pytest.raises(ValueError, match=says) as refusal:
        holdfast.reroute(model, "smoe")
    assert "model.layers.0.mlp" in str(refusal.value) and "did you mean" not in str(refusal.value)


def in_every_mlp(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: [change(layer.mlp) for layer in model.model.layers]


def with_another_kind_of_layer(model: Any) -> None:
    model.model.layers[1].mlp.gate.norm_topk_prob = not model.model.layers[1].mlp.gate.norm_topk_prob


DIFFERENT: dict[str, tuple[Callable[[Any], object], str]] = {
    "an extra buffer": (in_every_mlp(lambda mlp: mlp.gate.register_buffer("temperature", torch.ones(8))), "temperature"),
    "shared experts": (
        lambda model: setattr(model.model.layers[1].mlp, "experts", model.model.layers[0].mlp.experts),
        "share one FlexOlmoExperts",
    ),
    "a shared block": (lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp), "share one FlexOlmo"),
    "two gates": (in_every_mlp(lambda mlp: setattr(mlp, "other", copy.deepcopy(mlp.gate))), "2 modules"),
    "another kind of layer": (with_another_kind_of_layer, "different kinds"),
}


@needs_flex_olmo
@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_model_that_differs_is_refused_by_name(kind: str) -> None:
    model, (change, says) = tiny_moe("flex_olmo"), DIFFERENT[kind]
    change(model)
    assert_refused(says, holdfast.reroute, model, "smoe")


@needs_flex_olmo
def test_a_model_on_meta_is_recognised_as_the_same_model_in_memory() -> None:
    model = tiny_moe("flex_olmo")
    with torch.device("meta"):
        empty = type(model)(model.config)
        assert recognise(empty) == recognise(model)


@needs_flex_olmo
def test_recognition_changes_neither_random_numbers_nor_weights() -> None:
    model = tiny_moe("flex_olmo")
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    model.model.layers[0].mlp.gate.never_seen_before = 1  # so that no stored result is used
    with torch.inference_mode():
        moe_family(model)
    assert torch.equal(torch.randn(3), expected)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("family", sorted(name for name in MOE_MODELS if model_type(name) in MOE_FAMILIES))
def test_our_own_rows_pass_the_same_check(family: str) -> None:
    for layer in moe_layers(tiny_moe(family)):
        assert layer.family is not None
        check_declared(layer.family, layer.name, layer.block)


@pytest.mark.skipif(not is_installed("deepseek_v2"), reason="this transformers has no DeepSeek-V2")
def test_groups_that_are_valued_by_their_best_expert_are_recognised() -> None:
    model = tiny_moe("deepseek_v2")
    for layer in moe_layers(model):
        layer.gate.topk_method = "group_limited_greedy"
    rule = moe_family(model).rule
    assert rule == GateRule("softmax", renormalise=False, grouped=True, counted=1)


@pytest.mark.skipif(not is_installed("hy_v3"), reason="this transformers has no HY-V3")
def test_a_bias_of_the_block_ranks_experts_in_a_copy_of_the_model_too() -> None:
    model = holdfast.reroute(tiny_moe("hy_v3"), "smoe")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = model(IDS).logits
        for layer in copied.model.layers[1:]:
            layer.mlp.e_score_correction_bias[:2] += 10  # these experts are selected from now on
        with holdfast.trace(copied) as routes:
            copied(IDS)
        assert all(bool(((routing.experts == 0) | (routing.experts == 1)).all()) for routing in routes)
        assert torch.equal(model(IDS).logits, before)


@needs_flex_olmo
def test_a_recognised_family_is_audited_and_certified() -> None:
    given = tiny_moe("flex_olmo")
    report = holdfast.audit(given, [{"input_ids": IDS}])
    assert len(report.layers) == 3
    assert len(holdfast.certify(given, [{"input_ids": IDS}]).layers) == 3


def test_zero_logits_have_the_weights_of_the_familys_gate() -> None:
    logits = torch.zeros(1, 1, 4)
    experts = torch.tensor([[[0, 1]]])
    rule = SparseMixer(SimpleNamespace(router_jitter_noise=0.01))
    weights = rule.weigh(Scores(logits, rule.gate(logits), informed=False, raw=logits), experts, experts >= 0, None, 2)
    torch.testing.assert_close(weights, torch.tensor([[[1 / 4, 1 / 3]]]))


# Families that a user declares.
@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test registers."""
    monkeypatch.setattr("holdfast.hub.layers.MOE_FAMILIES", dict(MOE_FAMILIES))
    monkeypatch.setattr("holdfast.hub.layers._REGISTERED", set())


def of_a_new_type(kind: str = "new_moe") -> Any:
    """Return a FlexOlmo whose gate has a module of its own, by which it is not recognised."""
    model = tiny_moe("flex_olmo")
    model.config.model_type = kind
    for layer in model.model.layers:
        layer.mlp.gate.register_buffer("seen", torch.zeros(8))
    return model


@needs_flex_olmo
def test_a_declared_family_is_rerouted_and_restored(declared: None) -> None:
    model = of_a_new_type()
    assert_refused(r"new_moe.*seen.*register_family", holdfast.reroute, model, "native")
    holdfast.register_family(MoEFamily("new_moe", gate="gate", rule=GateRule("softmax", renormalise=False)))
    with torch.no_grad():
        before = model(IDS).logits
        assert torch.equal(holdfast.reroute(model, "native")(IDS).logits, before)
        torch.testing.assert_close(holdfast.reroute(model, "symphony")(IDS).logits, before)
        assert not torch.allclose(holdfast.reroute(model, "xmoe")(IDS).logits, before)
        assert torch.equal(holdfast.restore(model)(IDS).logits, before)


@needs_flex_olmo
@pytest.mark.parametrize("rule", [GateRule("softmax", renormalise=True), GateRule("sigmoid", renormalise=False)], ids=str)
def test_a_wrong_declaration_is_refused(declared: None, rule: GateRule) -> None:
    holdfast.register_family(MoEFamily("new_moe", gate="gate", rule=rule))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate: the row of new_moe is wrong: the weights"):
        holdfast.reroute(of_a_new_type(), "smoe")


@needs_flex_olmo
def test_a_declaration_that_misses_layers_is_refused(declared: None) -> None:
    holdfast.register_family(MoEFamily("new_moe", gate="router", rule=GateRule("softmax", renormalise=False)))
    assert_refused(r"model\.layers\.0.*0 layers fit", holdfast.reroute, of_a_new_type(), "smoe")


def test_a_family_is_declared_in_one_way(declared: None) -> None:
    row = MOE_FAMILIES["mixtral"]
    holdfast.register_family(row)
    assert_refused("mixtral has a row already", holdfast.register_family, replace(row, gate="router"))
    assert_refused("not a str", holdfast.register_family, "mixtral")


def test_a_family_that_is_not_known_gets_no_spelling_hint() -> None:
    model = tiny_dense("llama")
    model.config.model_type = "lama"
    for change in (lambda: holdfast.reroute(model, "smoe"), lambda: holdfast.sparsify(model, experts=4)):
        with pytest.raises(ValueError, match="register_family") as refusal:
            change()
        assert "did you mean" not in str(refusal.value)


# Dense families that differ from Llama.
def test_units_of_a_network_with_dropout_inside_are_dropped_in_training_only() -> None:
    model = holdfast.sparsify(tiny_dense("wav2vec2", hidden_dropout=0.0, attention_dropout=0.0), experts=4)
    sound = dense_inputs("wav2vec2")["input_values"]
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p != model.config.activation_dropout:
            module.p = 0.0
    model.config.feat_proj_dropout = model.config.final_dropout = 0.0
    with torch.no_grad():
        assert torch.equal(model(sound).logits, model(sound).logits)
        model.train()
        assert not torch.equal(model(sound).logits, model(sound).logits)
    experts = moe_layers(model)[0].experts
    assert experts.activation.dropout.p == model.config.activation_dropout == 0.1


def test_dropout_between_the_linear_maps_of_a_layer_is_refused() -> None:
    assert_refused(r"activation_dropout is 0\.1", holdfast.sparsify, tiny_dense("bart", activation_dropout=0.1), experts=4)


@pytest.mark.parametrize("family", ["gptj", "falcon", "bloom", "mpnet", "deberta-v2", "t5"])
def test_routers_that_read_other_tokens_are_refused_where_attention_is_not_captured(family: str) -> None:
    model = tiny_dense(family)
    before = copy.deepcopy(model.state_dict())
    for router in ("similarity", "attention"):
        assert_refused("attention cannot be captured", holdfast.sparsify, model, experts=4, router=router)
    assert sorted(model.state_dict()) == sorted(before)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper", "wav2vec2"])
def test_routers_by_token_id_are_refused_where_layers_have_other_tokens(family: str) -> None:
    assert_refused("by token id", holdfast.sparsify, tiny_dense(family), experts=4, router="hash")


@pytest.mark.parametrize("router", ["similarity", "attention", "ac+symphony+attention+smooth"])
@pytest.mark.parametrize("family", ["opt", "gpt_neox", "phi", "mistral", "llama", "qwen3", "phi3", "gpt2"])
def test_no_token_reads_a_later_one(family: str, router: str) -> None:
    """OPT flattens its tokens before the feed-forward network."""
    model = holdfast.sparsify(tiny_dense(family), experts=4, router=router, init="random")
    changed = IDS.clone()
    changed[:, 8:] = 5
    with torch.no_grad():
        one, other = (model(ids, use_cache=False).logits for ids in (IDS, changed))
    torch.testing.assert_close(one[:, :8], other[:, :8], atol=1e-4, rtol=1e-4)
    assert (one[:, 8:] - other[:, 8:]).abs().max() > 0.1


@pytest.mark.parametrize(("family", "router"), [("t5", "smoe"), ("bart", "smoe"), ("bart", "similarity")])
def test_an_encoder_and_decoder_generates_the_same_with_and_without_a_cache(family: str, router: str) -> None:
    model = holdfast.sparsify(tiny_dense(family), experts=4, router=router, init="random")
    batch = {name: value for name, value in dense_inputs(family).items() if name != "labels"}
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**batch, **options), model.generate(**batch, **options, use_cache=False))


def test_the_padding_of_an_encoder_and_decoder_is_not_one_mask() -> None:
    model = holdfast.sparsify(tiny_dense("t5"), experts=4)
    with holdfast.trace(model) as routes, torch.no_grad():
        model(**dense_inputs("t5"))
    assert len(routes) == 4 and routes[0].experts.shape == (24, 2)
    with pytest.raises(ValueError, match="encoder and the decoder"):
        _ = routes.token_mask
