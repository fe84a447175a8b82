"""Hierarchical gates: the best groups of experts, then the best experts within them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import Router
from holdfast.certificates import certify
from holdfast.routing.hierarchy import GroupedRule
from holdfast.routing.rules import Softmax


def build(name: str = "hierarchical", **options: Any) -> Router:
    torch.manual_seed(0)
    return holdfast.create_router(name, **{"dim": 12, "experts": 9, "k": 3, **options})


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(3, 13, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 4, "top_groups": 4}], ids=str)
@pytest.mark.parametrize("weights", ["softmax", "switch"])
@pytest.mark.parametrize("others", ["", "symphony+", "xmoe+"])
def test_a_gate_with_one_group_or_all_groups_is_the_flat_one_to_the_bit(
    options: dict[str, int], weights: str, others: str
) -> None:
    ours, flat = build(f"{others}hierarchical", weights=weights, **options), build(f"{others}smoe", weights=weights)
    for training in (True, False):
        x = tokens().requires_grad_()
        first, second = (router.train(training)(x, holdfast.Context()) for router in (ours, flat))
        for name in ("logits", "gates", "experts", "weights"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        pair = [torch.autograd.grad(routing.weights.square().sum(), x)[0] for routing in (first, second)]
        assert torch.equal(*pair)


def test_a_token_uses_the_groups_with_the_largest_sums_of_gates() -> None:
    router = build(groups=3, top_groups=1)
    routing = router(tokens())
    mass = routing.gates.unflatten(1, (3, 3)).sum(-1)
    assert torch.equal(routing.experts // 3, mass.argmax(-1, keepdim=True).expand(-1, 3))
    assert (routing.experts.sort(1).values % 3 == torch.arange(3)).all()
    flat = build("smoe")(tokens())
    assert not torch.equal(routing.chosen, flat.chosen)


def test_the_product_of_both_gates_is_the_gate() -> None:
    """p_group p_in_group = g, so raw weights are the gates themselves."""
    routing = build(groups=3, top_groups=2, weights="switch")(tokens())
    mass = routing.gates.unflatten(1, (3, 3)).sum(-1).repeat_interleave(3, dim=1)
    product = mass * (routing.gates / mass)
    torch.testing.assert_close(routing.weights, product.gather(1, routing.experts))


@pytest.mark.parametrize(("experts", "groups"), [(7, 3), (8, 3), (5, 5), (9, 2)])
def test_groups_of_unequal_size_differ_by_at_most_one_expert(experts: int, groups: int) -> None:
    rule = GroupedRule(Softmax(True), experts, groups, 1)
    members, group_of = rule.members(torch.device("cpu")).tolist(), rule.group_of(torch.device("cpu")).tolist()
    sizes = [sum(expert < experts for expert in own) for own in members]
    assert sum(sizes) == experts and max(sizes) - min(sizes) <= 1
    assert group_of == sorted(group_of) and set(group_of) == set(range(groups))
    assert all(group_of[expert] == group for group, own in enumerate(members) for expert in own if expert < experts)


def test_ties_of_groups_go_to_the_lower_one() -> None:
    router = build(groups=3, top_groups=1)
    torch.nn.init.zeros_(router.score.get_parameter("weight"))
    assert (router(tokens()).experts == torch.arange(3)).all()


@pytest.mark.parametrize("experts", [1, 2, 3, 16, 61])
def test_the_defaults_fit_any_number_of_experts(experts: int) -> None:
    for k in {1, (experts + 1) // 2, experts}:
        routing = build(experts=experts, k=k)(tokens())
        assert routing.used.all() and (routing.chosen.sum(1) == k).all()


@pytest.mark.parametrize("options", [{"groups": 3, "top_groups": 1}, {"groups": 4, "top_groups": 2}], ids=str)
@pytest.mark.parametrize("name", ["hierarchical", "symphony+hierarchical", "xmoe+hierarchical"])
def test_its_certificate_is_sound_also_against_group_changes(name: str, options: dict[str, int]) -> None:
    """Steps towards every group and every expert, by the whole radius."""
    router = build(name, **options, **({"init": "kaiming"} if "symphony" in name else {})).eval()
    x = 2 * tokens()
    found = certify(router, x)
    assert (found.radius > 0).float().mean() > 0.5 and found.radius.isfinite().all()
    before = router(x).chosen
    rule = router.select.rule
    assert isinstance(rule, GroupedRule)
    groups = rule.group_of(x.device)
    for group in range(options["groups"]):
        moved = x.clone()
        for _ in range(8):
            leaf = moved.requires_grad_()
            gates = router(leaf).gates
            worth = torch.zeros(len(gates), options["groups"]).index_add(1, groups, gates)
            (slope,) = torch.autograd.grad((worth[:, group] - worth.amax(1)).sum() + gates[:, group].sum(), leaf)
            step = moved.detach() - x + 0.5 * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            reach = 0.999 * found.radius.float().unsqueeze(-1)
            moved = x + step * reach / step.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        assert torch.equal(router(moved).chosen, before)
