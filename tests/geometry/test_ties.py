"""Nearest ties: against brute force over all sets, against certificates, and through what routers declare."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
import holdfast.geometry.ties as ties_module
from holdfast.certificates import Gate, certify
from holdfast.geometry import NoGeometry, affine_keys, affine_order, nearest_ties, tie_points
from holdfast.routing import Context, Previous, Routing
from holdfast.routing.declarations import Order, Scales


def by_brute_force(weight: Tensor, bias: Tensor, tokens: Tensor, k: int, m: int) -> Tensor:
    """Return the distances (T,): project every token onto the flat of every set, and keep ties at the threshold."""
    experts, nearest = len(weight), torch.full((len(tokens),), torch.inf, dtype=torch.float64)
    for size in range(m + 1, experts + 1):
        for chosen in combinations(range(experts), size):
            members, others = list(chosen), [expert for expert in range(experts) if expert not in chosen]
            rows, offsets = weight[members[1:]] - weight[members[0]], bias[members[1:]] - bias[members[0]]
            points = tokens - (tokens @ rows.t() + offsets) @ torch.linalg.pinv(rows).t()
            keys = points @ weight.t() + bias
            level = keys[:, members].mean(1, keepdim=True)
            above = (keys[:, others] > level).sum(1)
            on_flat = (keys[:, members] - level).abs().amax(1) < 1e-8
            is_tie = (above < k) & (above + size > k) & on_flat
            distance = (points - tokens).norm(dim=1)
            nearest = distance.where(is_tie & (distance < nearest), nearest)
    return nearest


def router_weights(experts: int, width: int, bias: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    draw = [
        torch.randn(*shape, generator=source, dtype=torch.float64) for shape in ((experts, width), (experts,), (1000, width))
    ]
    return draw[0], bias * draw[1], 2 * draw[2]


@pytest.mark.parametrize(
    ("experts", "k", "width", "bias"),
    [(6, 2, 6, 1.0), (6, 2, 6, 0.0), (6, 5, 6, 1.0), (6, 1, 9, 1.0), (7, 3, 4, 0.0), (7, 2, 4, 1.0)],
    ids=["the acceptance", "no bias", "all but one", "one expert", "dependent weights", "dependent weights and bias"],
)
def test_distances_equal_brute_force_over_all_sets(experts: int, k: int, width: int, bias: float) -> None:
    weight, offsets, tokens = router_weights(experts, width, bias, seed=0)
    found = nearest_ties(Order(weight, offsets), tokens, k, (1, 2, 3))
    assert found.exact.all()
    for place, m in enumerate(found.orders):
        torch.testing.assert_close(
            found.distances[:, place], by_brute_force(weight, offsets, tokens, k, m), atol=1e-9, rtol=1e-9
        )


def test_distances_grow_with_the_order_and_consecutive_sets_are_not_enough() -> None:
    """Sets of experts that follow each other in the ranking give too large distances for a part of the tokens."""
    weight, _, tokens = router_weights(6, 6, 0.0, seed=1)
    found = nearest_ties(Order(weight), tokens, 2, (1, 2, 3, 4, 5, 6))
    assert (found.distances.diff(dim=1)[:, :4] >= -1e-9).all()
    assert found.distances[:, 5].isinf().all()  # six experts have no tie of seven
    keys = affine_keys(Order(weight), tokens)
    search = ties_module._Search(keys.products(), keys.index, keys.logits, torch.zeros(1000, 6, 6), 2, 2)
    search.start_from_consecutive()
    too_far = (search.best > found.distances[:, 1] * (1 + 1e-6)).double().mean()
    assert 0.02 < too_far < 0.5


def test_a_search_that_stops_early_is_an_upper_bound_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, tokens = router_weights(12, 16, 0.0, seed=2)
    exact = nearest_ties(Order(weight), tokens[:100], 4, (2, 3))
    monkeypatch.setattr(ties_module, "MOST_SETS", 3)
    found = nearest_ties(Order(weight), tokens[:100], 4, (2, 3))
    assert exact.exact.all() and not found.exact.all()
    assert (found.distances >= exact.distances - 1e-12).all()
    assert torch.equal(found.distances[found.exact], exact.distances[found.exact])


@pytest.mark.parametrize("pieces", [(1, 64), (7, 500)], ids=["one token at a time", "several"])
def test_the_result_does_not_depend_on_how_tokens_are_divided(
    pieces: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, tokens = router_weights(8, 10, 0.5, seed=3)
    whole = nearest_ties(Order(weight, bias), tokens[:60], 3)
    monkeypatch.setattr("holdfast.geometry.flats.MOST_ELEMENTS", pieces[0] * 64)
    monkeypatch.setattr(ties_module, "PIECE", pieces[1])
    parts = nearest_ties(Order(weight, bias), tokens[:60], 3)
    torch.testing.assert_close(parts.distances, whole.distances, atol=1e-12, rtol=1e-12)
    assert torch.equal(parts.sets, whole.sets)


def test_the_experts_tie_at_the_nearest_point() -> None:
    weight, bias, tokens = router_weights(8, 10, 0.5, seed=4)
    order = Order(weight, bias)
    found = nearest_ties(order, tokens, 3, (1, 2, 3))
    for place, m in enumerate(found.orders):
        points = tie_points(order, tokens, found.sets[:, place])
        torch.testing.assert_close((points - tokens).norm(dim=1), found.distances[:, place], atol=1e-9, rtol=1e-9)
        keys = points @ weight.t() + bias
        chosen = found.sets[:, place]
        low, high = keys.where(chosen, torch.inf).amin(1), keys.where(chosen, -torch.inf).amax(1)
        assert (high - low).max() < 1e-9
        assert (chosen.sum(1) >= m + 1).all()
        above = (keys > high.unsqueeze(1) + 1e-9).sum(1)
        assert (above < 3).all() and (above + chosen.sum(1) > 3).all()


def test_a_layer_of_64_experts_is_exact() -> None:
    weight, _, tokens = router_weights(64, 128, 0.0, seed=5)
    found = nearest_ties(Order(weight), tokens[:100], 8)
    assert found.exact.all() and (found.distances.diff(dim=1) >= 0).all()


def test_all_experts_selected_means_no_tie() -> None:
    weight, _, tokens = router_weights(4, 6, 0.0, seed=6)
    found = nearest_ties(Order(weight), tokens[:5], 4)
    assert found.distances.isinf().all() and not found.sets.any()


def test_experts_with_equal_weights_never_tie_unless_they_always_do() -> None:
    weight, _, tokens = router_weights(3, 6, 0.0, seed=7)
    twins = torch.cat([weight, weight[:1]])
    apart = nearest_ties(Order(twins, torch.tensor([0.0, 0, 0, 100], dtype=torch.float64)), tokens, 1, (1, 3))
    assert apart.distances[:, 0].isfinite().all() and apart.distances[:, 1].isinf().all()
    same = nearest_ties(Order(twins), tokens, 1, (1,))
    on_top = (tokens @ weight.t()).argmax(1) == 0
    assert (same.distances[on_top] == 0).all() and (same.distances[~on_top] > 0).all()


@pytest.mark.parametrize("name", ["smoe", "xmoe", "smooth", "ac", "xmoe+ac"])
def test_order_1_is_the_radius_of_the_certificate(name: str) -> None:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=24, experts=8, k=2)
    source = torch.Generator().manual_seed(1)
    earlier, tokens = (torch.randn(2, 200, 24, generator=source) for _ in range(2))
    logits = torch.randn(400, 8, generator=source)
    context = Context(previous=Previous(earlier * torch.linspace(0.1, 3, 24), routing_of(logits)))
    router(tokens, context)
    router.eval()
    order, k = affine_order(router, tokens, context)
    found = nearest_ties(order, tokens, k, (1,))
    radius = certify(router, tokens, context, arithmetic=None).distance.flatten()
    assert k == 2 and ("ac" not in name or order.scales is not None)
    torch.testing.assert_close(found.distances[:, 0], radius, atol=1e-6, rtol=1e-6)


def routing_of(logits: Tensor) -> Routing:
    weights, experts = torch.softmax(logits, -1).topk(2)
    return Routing(logits, torch.softmax(logits, -1), experts, weights)


@pytest.mark.parametrize("kind", ["clusters", "modalities"])
def test_ties_of_a_cluster_or_a_modality_are_those_of_its_own_weights(kind: str) -> None:
    weight, bias, tokens = router_weights(6, 6, 1.0, seed=8)
    factors = torch.rand(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.2
    index, own = torch.arange(1000) % 3, [weight * factor for factor in factors]
    order = Order(weight, bias, scales=Scales(torch.nn.functional.one_hot(index, 3).double(), factors))
    if kind == "modalities":
        order = Order(torch.cat(own, dim=1), bias, block=index)
    found = nearest_ties(order, tokens, 2, (1, 2))
    for number, matrix in enumerate(own):
        alone = nearest_ties(Order(matrix, bias), tokens[index == number], 2, (1, 2))
        torch.testing.assert_close(found.distances[index == number], alone.distances, atol=1e-9, rtol=1e-9)
    points = tie_points(order, tokens, found.sets[:, 1])
    torch.testing.assert_close((points - tokens).norm(dim=1), found.distances[:, 1], atol=1e-9, rtol=1e-9)


def test_a_native_gate_has_an_order() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    order, k = affine_order(Gate(weight, 2), torch.randn(10, 16))
    assert k == 2 and torch.equal(order.matrix, weight)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("symphony", "informed or nonlinear gates"),
        ("similarity", "informed or nonlinear gates"),
        ("top-p", "informed or nonlinear gates"),
        ("remoe", "does not select the k largest logits"),
        ("sparsemax", "no certificate is known for sparsemax"),
        ("softmoe", "declares no order"),
    ],
)
def test_a_router_without_flat_ties_is_refused_with_the_reason(name: str, reason: str) -> None:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=16, experts=4, k=2).eval()
    with pytest.raises(NoGeometry, match=reason):
        affine_order(router, torch.randn(1, 10, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"k": 0}, "k is 0"), ({"k": 7}, "k is 7"), ({"orders": (0,)}, "orders are"), ({"orders": ()}, "orders are")],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"k": 2, "orders": (1,)} | change
    assert_refused(message, nearest_ties, Order(torch.eye(6)), torch.ones(3, 6), **arguments)
    assert_refused("NaN", nearest_ties, Order(torch.eye(6)), torch.full((3, 6), torch.nan), 2)


def test_shares_count_tokens_within_eps() -> None:
    weight, _, tokens = router_weights(6, 6, 0.0, seed=1)
    found = nearest_ties(Order(weight), tokens, 2)
    assert torch.equal(found.share_within(torch.tensor([0.1, 1.0]))[1], (found.distances <= 1.0).double().mean(0))
    assert replace(found, distances=found.distances + 10).share_within(torch.tensor([1.0])).sum() == 0
