"""Slices through token space: exact lines and points against grids, brute force and the router itself."""

from itertools import combinations

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.geometry.slices import Plane, PlaneKeys, grid, plane_through, slice_ties

CASES = [(6, 2, 0), (6, 1, 1), (16, 2, 2), (9, 5, 3), (3, 2, 4)]


def make_keys(experts: int, k: int, seed: int) -> PlaneKeys:
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, 12, dtype=torch.float64, generator=source)
    points = torch.randn(3, 12, dtype=torch.float64, generator=source)
    return PlaneKeys.of(plane_through(*points), weight, torch.randn(experts, dtype=torch.float64, generator=source) / 4, k)


def box(size: float = 4.0) -> tuple[Tensor, Tensor]:
    return torch.tensor([-size, -0.8 * size]).double(), torch.tensor([1.3 * size, size]).double()


def crosses(one: Tensor, two: Tensor, lines: Tensor) -> bool:
    """Whether the way from one point to the other crosses one of the lines, computed by determinants."""

    def side(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (b - a)[..., 0] * (c - a)[..., 1] - (b - a)[..., 1] * (c - a)[..., 0]

    start, end = lines[:, 0], lines[:, 1]
    apart = (side(start, end, one) * side(start, end, two) <= 0) & (side(one, two, start) * side(one, two, end) <= 0)
    return bool(apart.any())


def test_a_plane_contains_its_three_points_and_projects_others() -> None:
    source = torch.Generator().manual_seed(0)
    points = torch.randn(3, 7, dtype=torch.float64, generator=source)
    plane = plane_through(*points)
    torch.testing.assert_close(plane.basis @ plane.basis.t(), torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(plane.points(plane.coordinates(points)), points)
    assert plane.coordinates(points)[1, 1].abs() < 1e-12 and plane.coordinates(points)[0].norm() == 0
    other = torch.randn(7, dtype=torch.float64, generator=source)
    residual = other - plane.points(plane.coordinates(other))
    torch.testing.assert_close(plane.basis @ residual, torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)


def test_three_points_on_a_line_and_a_k_without_a_threshold_are_refused() -> None:
    point, step = torch.ones(5), torch.arange(5.0)
    assert_refused("on one line", plane_through, point, point + step, point - 2 * step)
    assert_refused("on one line", plane_through, point, point, step)
    plane = Plane(torch.zeros(2).double(), torch.eye(2).double())
    assert_refused("k is 3 of 3", PlaneKeys.of, plane, torch.randn(3, 2), None, 3)


@pytest.mark.parametrize(("experts", "k", "seed"), CASES)
def test_the_set_changes_across_every_line_by_its_two_experts(experts: int, k: int, seed: int) -> None:
    keys = make_keys(experts, k, seed)
    ties = slice_ties(keys, *box())
    assert len(ties.lines) >= 2
    for (start, end), pair in zip(ties.lines, ties.pairs.tolist(), strict=True):
        normal = torch.stack([start[1] - end[1], end[0] - start[0]])
        normal = 1e-7 * normal / normal.norm()
        for share in (0.01, 0.5, 0.99):
            point = start + share * (end - start)
            one, two = (set(keys.sets(point + side * normal).tolist()) for side in (1, -1))
            assert one ^ two == set(pair)


@pytest.mark.parametrize(("experts", "k", "seed"), CASES)
def test_no_set_changes_without_a_line(experts: int, k: int, seed: int) -> None:
    keys, (low, high) = make_keys(experts, k, seed), box()
    lines = slice_ties(keys, low, high).lines
    places = grid(low, high, 40)
    sets, checked = keys.sets(places), 0
    for rows in ((places[:, :-1], places[:, 1:], sets[:, :-1], sets[:, 1:]), (places[:-1], places[1:], sets[:-1], sets[1:])):
        for one, two, before, after in zip(*(part.flatten(0, 1) for part in rows), strict=True):
            if not torch.equal(before, after):
                checked += 1
                assert crosses(one, two, lines)
    assert checked > 20


@pytest.mark.parametrize(("experts", "k", "seed"), CASES)
def test_order_two_points_are_those_of_all_triples(experts: int, k: int, seed: int) -> None:
    """Brute force: solve for the point where three keys are equal, and count the keys above it."""
    keys, (low, high) = make_keys(experts, k, seed), box()
    wanted: dict[tuple[int, ...], Tensor] = {}
    for triple in combinations(range(experts), 3):
        i, j, e = triple
        matrix = torch.stack([keys.slopes[i] - keys.slopes[j], keys.slopes[i] - keys.slopes[e]])
        point = torch.linalg.solve(
            matrix, torch.stack([keys.offsets[j] - keys.offsets[i], keys.offsets[e] - keys.offsets[i]])
        )
        values = keys.at(point)
        above = sum(float(values[other]) > float(values[i]) for other in range(experts) if other not in triple)
        if (low < point).all() and (point < high).all() and k - 2 <= above <= k - 1:
            wanted[triple] = point
    ties = slice_ties(keys, low, high)
    found: dict[tuple[int, ...], Tensor] = {
        tuple(triple): point for triple, point in zip(ties.triples.tolist(), ties.points, strict=True)
    }
    assert found.keys() == wanted.keys()
    for known, point in wanted.items():
        torch.testing.assert_close(found[known], point, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", ["smoe", "smooth[eps=0.3]"])
def test_the_sets_of_a_grid_are_those_of_the_router(name: str) -> None:
    """Every grid point is routed; only float32 rounding at a tie may make a difference."""
    torch.manual_seed(5)
    router = holdfast.create_router(name, dim=12, experts=10, k=2).eval()
    tokens = torch.randn(3, 12).double()
    plane = plane_through(*tokens)
    keys = PlaneKeys.of(plane, router.score.get_parameter("weight"), None, 2)
    places = grid(*box(), 60)
    with torch.no_grad():
        routing = router(plane.points(places).float().reshape(1, -1, 12))
    best = routing.experts[:, :2].sort(dim=-1).values.view(60, 60, 2)
    ordered = keys.at(places).sort(dim=-1, descending=True).values
    clear = ordered[..., 1] - ordered[..., 2] > 1e-4
    assert clear.float().mean() > 0.99
    assert torch.equal(best[clear], keys.sets(places)[clear])
    extra = (routing.experts < 10).sum(-1).view(60, 60) - 2
    if name == "smoe":
        assert extra.max() == 0
    else:  # the experts in the strip are those whose key is less than eps below the second
        gaps = ordered[..., 1:2] - ordered[..., 2:]
        settled = ((gaps - 0.3).abs() > 1e-4).all(-1)
        assert torch.equal(extra[settled], (gaps < 0.3).sum(-1)[settled]) and extra.max() >= 2


def test_a_router_without_ties_in_the_rectangle_has_no_lines() -> None:
    keys = PlaneKeys(torch.zeros(4, 2).double(), torch.arange(4.0).double(), 2)
    ties = slice_ties(keys, *box())
    assert ties.lines.shape == (0, 2, 2) and ties.points.shape == (0, 2)
    far = PlaneKeys(torch.eye(2).double(), torch.tensor([100.0, 0.0]).double(), 1)
    assert len(slice_ties(far, *box()).lines) == 0
