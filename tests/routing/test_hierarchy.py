"""Groups of experts: the best groups, then the best experts within them, by one gate (grouped) or two (hierarchical)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Router
from holdfast.routing.hierarchy import group_of, members


def build(name: str = "grouped", **options: Any) -> Router:
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
    ours, flat = build(f"{others}grouped", weights=weights, **options), build(f"{others}smoe", weights=weights)
    for training in (True, False):
        x = tokens().requires_grad_()
        first, second = (router.train(training)(x, holdfast.Context()) for router in (ours, flat))
        for name in ("logits", "gates", "experts", "weights"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        pair = [torch.autograd.grad(routing.weights.square().sum(), x)[0] for routing in (first, second)]
        assert torch.equal(*pair)


@pytest.mark.parametrize(("experts", "groups"), [(7, 3), (8, 3), (5, 5), (9, 2)])
def test_groups_of_unequal_size_differ_by_at_most_one_expert(experts: int, groups: int) -> None:
    listed = members(experts, groups, torch.device("cpu")).tolist()
    group = group_of(experts, groups, torch.device("cpu")).tolist()
    sizes = [sum(expert < experts for expert in own) for own in listed]
    assert sum(sizes) == experts and max(sizes) - min(sizes) <= 1
    assert group == sorted(group) and set(group) == set(range(groups))
    assert all(group[expert] == number for number, own in enumerate(listed) for expert in own if expert < experts)


def test_ties_of_groups_go_to_the_lower_one() -> None:
    router = build(groups=3, top_groups=1)
    torch.nn.init.zeros_(router.score.get_parameter("weight"))
    assert (router(tokens()).experts == torch.arange(3)).all()


@pytest.mark.parametrize("name", ["grouped", "hierarchical"])
@pytest.mark.parametrize("experts", [1, 2, 3, 16, 61])
def test_the_defaults_fit_any_number_of_experts(name: str, experts: int) -> None:
    for k in {1, (experts + 1) // 2, experts}:
        routing = build(name, experts=experts, k=k)(tokens())
        assert routing.used.all() and (routing.chosen.sum(1) == k).all()


def test_a_group_whose_gate_underflows_keeps_its_place() -> None:
    """q of groups 1 and 2 is 0 in float32; group 2 still comes before group 1."""
    router = build("hierarchical", groups=3, top_groups=2, k=5).eval()
    with torch.no_grad():
        router.score.get_parameter("weight")[9:] = torch.tensor([[0.0], [-300.0], [-200.0]]).expand(3, 12)
    routing = router(torch.ones(1, 4, 12))
    assert bool((routing.gates[:, 3:] == 0).all())
    assert torch.equal(routing.experts.sort(1).values // 3, torch.tensor([[0, 0, 0, 2, 2]]).expand(4, -1))


@pytest.mark.parametrize("options", [{"groups": 4, "top_groups": 1}, {"groups": 5, "top_groups": 2, "k": 2}], ids=str)
def test_each_modality_has_groups_of_its_own(options: dict[str, int]) -> None:
    router = build("hierarchical", experts=12, by="modality", losses=holdfast.Losses(balance=1.0), **options)
    modality = (torch.arange(39) % 3 > 0).long().view(3, 13)
    routing = router(tokens(), holdfast.Context(modality=modality))
    groups = options["groups"]
    group = group_of(12, groups, torch.device("cpu"))
    owner = group_of(groups, 2, torch.device("cpu"))[group]
    own = owner == modality.view(-1, 1)
    torch.testing.assert_close(routing.gates.sum(1), torch.ones(39))
    assert bool((routing.gates[~own] == 0).all()) and bool((owner[routing.experts] == modality.view(-1, 1)).all())
    # Within its groups a token has the gates of a router that has no others.
    free = build("hierarchical", experts=12, losses=holdfast.Losses(balance=1.0), **options)
    everywhere = free(tokens()).gates.where(own, 0.0)
    torch.testing.assert_close(routing.gates, everywhere / everywhere.sum(1, keepdim=True))
    assert routing.balance_groups is not None
    assert torch.equal(routing.balance_groups, torch.nn.functional.one_hot(modality.flatten(), 2).bool())
    assert_refused("no modality", router, tokens())
