"""Experts that are disabled in evaluation: equal to a forward in which their gates are 0 before selection."""

from typing import Any

import pytest
import torch
from router_names import IN_TEXT_MODELS
from tiny import EXTRA, tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.certificates import certify
from holdfast.hub.layers import moe_layers

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1]), torch.tensor([0])), torch.tensor(0))
FIXED = {"hash", "stablemoe", "softmoe", "smear"}


@torch.no_grad()
def run(model: Any) -> tuple[Tensor, list[holdfast.Routing]]:
    with holdfast.trace(model) as routes:
        out: Tensor = model(input_ids=IDS, attention_mask=MASK).logits
    return out[MASK.bool()], list(routes)


def most_used(routes: list[holdfast.Routing]) -> dict[int, int]:
    return {layer: int(routing.chosen.sum(0).argmax()) for layer, routing in enumerate(routes)}


def naive(family: str, gates: Tensor, bias: Tensor | None, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the k best experts of each token and their weights, by sorting, for families without groups."""
    keys = gates if bias is None else gates + bias
    chosen = [sorted(range(len(row)), key=lambda e: (-float(row[e]), e))[:k] for row in keys]
    weights = [[float(row[e]) for e in experts] for row, experts in zip(gates, chosen, strict=True)]
    if family not in ("olmoe", "qwen2_moe", "qwen3_moe"):  # which do not renormalise in these configs
        weights = [[weight / sum(row) for weight in row] for row in weights]
    return chosen, weights


@pytest.mark.parametrize("changed", [False, True], ids=["unchanged", "rerouted natively"])
@pytest.mark.parametrize("family", sorted(EXTRA))
def test_a_native_gate_takes_the_next_best_expert_of_its_family(family: str, changed: bool) -> None:
    model = tiny(family)
    before, routes = run(model)
    lost = most_used(routes)
    if changed:
        holdfast.reroute(model, "native")
    with holdfast.disable(model, lost):
        after, without = run(model)
    assert not torch.allclose(after, before)
    for layer, routing in enumerate(without):
        assert (
            not bool((routing.dense_weights[:, lost[layer]] != 0).any())
            and routing.experts.shape == routes[layer].experts.shape
        )
    assert torch.equal(run(model)[0], before)
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe"):
        gates = routes[0].gates.clone()
        gates[:, lost[0]] = 0.0
        chosen, weights = naive(family, gates, None, routes[0].experts.shape[1])
        assert [sorted(row) for row in chosen] == without[0].experts.sort(dim=-1).values.tolist()
        torch.testing.assert_close(without[0].weights.sort(dim=-1).values, torch.tensor(weights).sort(dim=-1).values)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "phimoe"])
def test_the_native_gate_and_our_router_of_its_rule_lose_an_expert_alike(family: str) -> None:
    native, rerouted = tiny(family), holdfast.reroute(tiny(family), "smoe")
    lost = most_used(run(native)[1])
    with holdfast.disable(native, lost), holdfast.disable(rerouted, lost):
        torch.testing.assert_close(run(native)[0], run(rerouted)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*IN_TEXT_MODELS} - FIXED))
def test_a_router_reads_gates_of_0_for_disabled_experts(name: str) -> None:
    torch.manual_seed(0)
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, router=name, noise=0.5).eval()
    before, routes = run(model)
    with holdfast.disable(model, {0: [1, 2], 1: 0}):
        after, without = run(model)
        assert not torch.equal(after, before)
        for layer, lost in ((0, [1, 2]), (1, [0])):
            assert not bool(without[layer].gates[:, lost].any()) and not bool(without[layer].dense_weights[:, lost].any())
        with holdfast.disable(model, {0: 3}):
            assert not bool(run(model)[1][0].gates[:, [1, 2, 3]].any())
        assert torch.equal(run(model)[0], after)
    assert torch.equal(run(model)[0], before)
    if name in ("smoe", "xmoe", "switch"):
        kept = routes[0].gates.clone()
        kept[:, [1, 2]] = 0.0
        best = kept.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(without[0].experts, best.indices[:, : without[0].experts.shape[1]])


def test_an_expert_that_nothing_uses_can_be_lost_without_a_change_to_the_bit() -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.gate.weight[5] = layer.gate.weight[:5].mean(0)
    before, routes = run(model)
    unused = {layer: int(e) for layer, r in enumerate(routes) for e in (~r.chosen.any(0)).nonzero().flatten()[:1]}
    assert unused
    with holdfast.disable(model, unused):
        assert torch.equal(run(model)[0], before)


def test_a_layer_of_its_own_loses_experts_too() -> None:
    layer = holdfast.MoE(holdfast.create_router("smoe", dim=8, experts=4), holdfast.Experts(8, 8, 4)).eval()
    with holdfast.disable(layer, {0: 2}):
        assert not bool((layer(torch.randn(2, 9, 8))[1].experts == 2).any())


def test_what_cannot_be_disabled_is_refused() -> None:
    def enter(model: Any, experts: dict[int, Any]) -> None:
        with holdfast.disable(model, experts):
            model.train()
            model(input_ids=IDS)

    assert_refused("no MoE layer 9.*counted from 0", enter, tiny("mixtral"), {9: 0})
    assert_refused("layer 0 has no expert 8", enter, tiny("mixtral"), {0: 8})
    assert_refused("layer 1 would have no expert left", enter, tiny("mixtral"), {1: range(8)})
    for router in ("native", "smoe", None):
        model = tiny("mixtral") if router is None else holdfast.reroute(tiny("mixtral"), router)
        assert_refused("experts are disabled in evaluation only", enter, model, {0: 1})
    hashed = holdfast.sparsify(tiny_dense("llama"), experts=4, router="hash")
    assert_refused("experts are chosen without scores", enter, hashed, {0: 1})


@pytest.mark.parametrize("changed", [False, True], ids=["unchanged", "rerouted"])
def test_a_disable_inside_another_adds_to_it(changed: bool) -> None:
    model = tiny("mixtral")
    if changed:
        holdfast.reroute(model, "smoe")
    with holdfast.disable(model, {0: [0, 1]}):
        expected = run(model)[0]
    with holdfast.disable(model, {0: 0}):
        with holdfast.disable(model, {0: 1}):
            assert torch.equal(run(model)[0], expected)
        others = list(range(1, run(model)[1][0].gates.shape[1]))
        assert_refused("another holdfast.disable is around this one", holdfast.disable(model, {0: others}).__enter__)
        with holdfast.trace(model) as routes:
            model(input_ids=IDS)
        assert not bool((routes[0].dense_weights[:, 0] != 0).any())


def test_certificates_are_refused_without_all_experts() -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe")
    router = moe_layers(model)[0].router
    assert router is not None
    with holdfast.disable(model, {0: 0}):
        assert_refused("certify it outside of that", certify, router, torch.randn(3, router.dim))


@pytest.mark.parametrize("experts", [[0], {0: None}, {0: "1"}, {0: 1.5}])
def test_experts_of_the_wrong_type_are_refused(experts: Any) -> None:
    assert_refused("expected a number|give a dict", holdfast.disable(tiny("mixtral"), experts).__enter__)
