"""The theory of Symphony, Mutual-Inform and ACMoE beside measurement."""

import math

import pytest
import torch
from torch import Tensor
from wording import assert_refused

from holdfast.geometry import (
    cluster_separation,
    co_selection_widths,
    graph_under_noise,
    mixed_entropies,
    region_constants,
    region_regularity,
    similarity_weights,
    top_k_weights,
    tsne_coordinates,
)
from holdfast.routing.declarations import Order


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sets_of(tokens: Tensor, weight: Tensor, k: int = 2) -> Tensor:
    return top_k_weights(tokens @ weight.t(), k) > 0


def test_the_graph_of_a_batch_stays_within_hoeffdings_width() -> None:
    """Of many batches, at most alpha have an entry beyond its half-width; the half-widths are not far too wide."""
    weight = torch.randn(4, 8, generator=generator(0))
    everything = co_selection_widths(sets_of(torch.randn(200_000, 8, generator=generator(1)), weight))
    beyond, total, ratios = 0, 0, []
    for batch in range(200):
        found = co_selection_widths(sets_of(torch.randn(300, 8, generator=generator(10 + batch)), weight), alpha=0.1)
        error = (found.graph - everything.graph).abs()
        beyond += int((error > found.half_widths.unsqueeze(1)).sum())
        total += error.numel()
        ratios.append(float((error / found.half_widths.unsqueeze(1)).max()))
    assert beyond / total <= 0.1 and max(ratios) > 0.5


def test_the_graph_is_that_of_algorithm_1() -> None:
    chosen = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    found = co_selection_widths(chosen, alpha=0.05)
    counts = chosen.double().t() @ chosen.double()
    torch.testing.assert_close(found.graph[:3], (counts / counts.sum(1, keepdim=True))[:3])
    assert found.counts.tolist() == [3, 2, 1, 0] and found.half_widths[3].isinf() and (found.graph[3] == 0).all()
    assert float(found.half_widths[0]) == pytest.approx(math.sqrt(math.log(40) / 6) / 2)
    assert found.joint_half_width == pytest.approx(math.sqrt(math.log(40) / 6))


def test_noise_moves_the_graph_more_the_larger_it_is() -> None:
    weight, tokens = torch.randn(6, 16, generator=generator(0)), torch.randn(2000, 16, generator=generator(1))
    found = graph_under_noise(lambda x: sets_of(x, weight), tokens, [0.0, 0.01, 0.3])
    assert found.mean[0] == 0 and found.mean[0] < found.mean[1] < found.mean[2] and found.beyond[0] == 0


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("relative", [0.02, 0.2])
def test_no_noise_moves_a_joint_frequency_beyond_the_constants_of_the_regions(k: int, relative: float) -> None:
    """Perturbations in random directions, and those that move all tokens from one expert to another."""
    weight, tokens = torch.randn(5, 6, generator=generator(0)).double(), torch.randn(400, 6, generator=generator(1)).double()
    bias = 0.2 * torch.randn(5, generator=generator(2)).double()

    def joint(points: Tensor) -> Tensor:
        return co_selection_widths(top_k_weights(points @ weight.t() + bias, k) > 0).joint

    found = region_constants(Order(weight, bias), tokens, k, [relative])
    clean, lengths = joint(tokens), relative * tokens.norm(dim=1, keepdim=True)
    directions = [torch.randn(400, 6, generator=generator(3 + seed)).double() for seed in range(10)]
    directions += [(weight[i] - weight[j]).expand(400, 6) for i in range(5) for j in range(5) if i != j]
    largest = 0.0
    for direction in directions:
        moved = joint(tokens + lengths * direction / direction.norm(dim=1, keepdim=True))
        assert (moved >= found.lower[0] - 1e-12).all() and (moved <= found.upper[0] + 1e-12).all()
        largest = max(largest, float((moved - clean).abs().max()))
    assert 0.3 * float(found.change) < largest <= float(found.change) + 1e-12
    torch.testing.assert_close(found.constant, found.change / relative)


def test_for_a_disc_the_constant_is_that_of_the_surface() -> None:
    """Three sectors in the plane, with two rays as faces: noise of r eps takes two thin sectors of tokens into each."""
    angles = torch.tensor([0.1, 2.0, 4.4], dtype=torch.float64)
    order = Order(torch.stack([angles.cos(), angles.sin()], dim=1))
    radius = 0.1 + 3.0 * torch.rand(200_000, generator=generator(0), dtype=torch.float64)
    turn = 2 * math.pi * torch.arange(200_000, dtype=torch.float64) / 200_000
    tokens = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
    found = region_constants(order, tokens, 2, [0.01])
    expected = 2 * math.asin(0.01) / (2 * math.pi)
    assert float(found.change) == pytest.approx(expected, rel=0.01)
    off = ~torch.eye(3, dtype=torch.bool)
    clean = co_selection_widths(sets_of(tokens, order.matrix)).joint
    for bound in (found.upper[0] - clean, clean - found.lower[0]):
        assert bound[off].tolist() == pytest.approx([expected] * 6, rel=0.01)


def test_regions_of_equal_directions_are_as_regular_as_their_sectors() -> None:
    """k = 1 of n equal directions in the plane: sectors of 2 pi / n, in which s is the sine of half of it."""
    for experts in (3, 4, 7):
        angles = 2 * math.pi * torch.arange(experts, dtype=torch.float64) / experts
        order = Order(torch.stack([angles.cos(), angles.sin()], dim=1))
        sine = math.sin(math.pi / experts)
        found = region_regularity(order, torch.arange(experts).unsqueeze(1))
        assert found.tolist() == pytest.approx([sine / (2 + 2 * sine)] * experts)


def test_the_ball_of_a_region_is_inside_it_and_no_larger_one_is_found() -> None:
    weight = torch.randn(6, 8, generator=generator(0)).double()
    members = top_k_weights(torch.randn(1, 8, generator=generator(1)).double() @ weight.t(), 2)[0].nonzero().t()
    rho = float(region_regularity(Order(weight, torch.randn(6).double()), members))
    sine = 2 * rho / (1 - 2 * rho)
    inside = torch.zeros(6, dtype=torch.bool).index_fill(0, members[0], True)
    normals = (weight[inside].unsqueeze(1) - weight[~inside]).flatten(0, 1)
    units = normals / normals.norm(dim=1, keepdim=True)
    best, centre = -1.0, units.mean(0)
    for step in range(2000):  # subgradient ascent of the smallest angle to a face
        centre = centre / centre.norm() + 0.5 / (10 + step) * units[(units @ (centre / centre.norm())).argmin()]
        best = max(best, float((units @ (centre / centre.norm())).min()))
    assert 0.97 * sine < best <= sine + 1e-9


def test_all_experts_of_a_token_have_one_region() -> None:
    order, tokens = Order(torch.randn(3, 4, generator=generator(0))), torch.randn(20, 4, generator=generator(1))
    assert float(region_constants(order, tokens, 3, [0.5]).change) == 0
    assert region_regularity(order, torch.tensor([[0, 1, 2]])).tolist() == [0.5]
    assert_refused("longer than 0", region_constants, order, tokens, 2, [0.0])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_wrong_sets_are_refused(alpha: float) -> None:
    assert_refused("alpha is", co_selection_widths, torch.ones(2, 2, dtype=torch.bool), alpha)
    assert_refused("same number of experts", co_selection_widths, torch.tensor([[True, False], [True, True]]))


@pytest.mark.parametrize("tau", [0.1, 1.0, None])
@pytest.mark.parametrize("confident", [False, True])
def test_the_bound_of_informed_entropies_is_true(tau: float | None, confident: bool) -> None:
    tokens = torch.randn(40, 16, generator=generator(0))
    gates = (2 * torch.randn(40, 5, generator=generator(1))).softmax(-1)
    own = torch.special.entr(gates.double()).sum(-1)
    weights = similarity_weights(tokens, tau=tau, certainty=own if confident else None)
    assert (weights.triu(1) == 0).all()
    found = mixed_entropies(gates, weights)
    assert (found.informed <= found.bound + 1e-9).all()
    assert (found.informed >= found.bound - found.mixing - 1e-9).all()  # entropy is concave
    if confident:
        assert (found.bound <= found.own + found.mixing + 1e-9).all()
    if tau == 0.1:  # the limit of the proposition: the weights of a token are one-hot, the token itself
        assert (found.mixing < 0.5).all() and torch.allclose(found.informed, found.own, atol=0.5)


def test_gates_that_are_no_distribution_are_refused() -> None:
    assert_refused("rows of the gates", mixed_entropies, torch.ones(3, 2), torch.eye(3))
    assert_refused("rows of the weights", mixed_entropies, torch.full((3, 2), 0.5), -torch.eye(3))


def gaussian_clusters(aligned: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens of two Gaussian clusters whose means differ where they are tight (`aligned`) or where they are wide."""
    spread = torch.linspace(0.2, 3.0, 10)
    apart = torch.zeros(10)
    apart[:3] = 1.0
    apart = apart if aligned else apart.flip(0)
    clusters = torch.arange(4000) % 2
    tokens = torch.randn(4000, 10, generator=generator(seed)) * spread + clusters.unsqueeze(1) * apart
    return tokens, clusters


def test_lemma_2_predicts_the_misassignment_of_gaussian_clusters() -> None:
    for aligned in (True, False):
        for noise in (0.0, 0.5):
            found = cluster_separation(*gaussian_clusters(aligned), noise=noise)
            for space in (found.plain, found.scaled):
                error = 4 * (space.predicted * (1 - space.predicted) / 2000).sqrt() + 0.01
                assert ((space.measured - space.predicted).abs() <= error).all()


def test_scaling_separates_clusters_only_where_they_are_tight() -> None:
    """Lemma 1 of the paper needs means that differ in tight features; without that, M brings clusters together."""
    good, bad = (cluster_separation(*gaussian_clusters(aligned)) for aligned in (True, False))
    assert (good.scaled.distance > good.plain.distance).all() and (good.scaled.predicted < good.plain.predicted).all()
    assert (bad.scaled.distance < bad.plain.distance).all()
    # With axes as eigenvectors, M makes the covariance rounder, as proposition 2 states.
    assert (good.scaled.condition < good.plain.condition).all()


def test_rotated_covariances_may_get_a_larger_condition_number() -> None:
    """Proposition 2 exchanges M and the eigenvectors of the covariance, which do not commute."""
    larger = []
    for seed in range(20):
        source = generator(seed)
        rotation = torch.linalg.qr(torch.randn(10, 10, generator=source))[0]
        deviations = (torch.rand(10, generator=source) ** 2 + 0.01).sqrt()
        clusters = torch.arange(4000) % 2
        tokens = torch.randn(4000, 10, generator=source) * deviations @ rotation.t() + clusters.unsqueeze(1)
        found = cluster_separation(tokens, clusters)
        larger.append(float((found.scaled.condition > found.plain.condition).double().mean()))
    assert 0.05 < sum(larger) / 20 < 0.6


def test_too_few_clusters_are_refused() -> None:
    assert_refused("at least two clusters", cluster_separation, torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))
    assert_refused("expected", cluster_separation, torch.randn(20, 3), torch.zeros(5, dtype=torch.int64))


@pytest.mark.slow
def test_tsne_keeps_distant_clusters_apart() -> None:
    clusters = torch.arange(300) % 3
    tokens = torch.randn(300, 8, generator=generator(0)) + 20 * torch.nn.functional.one_hot(clusters, 8)
    places, kept = tsne_coordinates(tokens, most=150)
    assert places.shape == (150, 2) and (kept.diff() > 0).all()
    chosen = clusters[kept]
    nearest = torch.cdist(places, places).fill_diagonal_(torch.inf).argmin(1)
    assert (chosen[nearest] == chosen).double().mean() > 0.95
    again, _ = tsne_coordinates(tokens, most=150)
    assert torch.equal(places, again)


def test_tsne_refuses_too_few_tokens() -> None:
    assert_refused("at least 4 tokens", tsne_coordinates, torch.randn(3, 8))
