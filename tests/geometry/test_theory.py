"""The theory of Symphony, Mutual-Inform and ACMoE beside measurement."""

import math

import pytest
import torch
from torch import Tensor

from holdfast.geometry import (
    cluster_separation,
    co_selection_widths,
    graph_under_noise,
    mixed_entropies,
    similarity_weights,
    top_k_weights,
    tsne_coordinates,
)


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


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_wrong_sets_are_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha is"):
        co_selection_widths(torch.ones(2, 2, dtype=torch.bool), alpha)
    with pytest.raises(ValueError, match="same number of experts"):
        co_selection_widths(torch.tensor([[True, False], [True, True]]))


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
    with pytest.raises(ValueError, match="rows of the gates"):
        mixed_entropies(torch.ones(3, 2), torch.eye(3))
    with pytest.raises(ValueError, match="rows of the weights"):
        mixed_entropies(torch.full((3, 2), 0.5), -torch.eye(3))


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
    with pytest.raises(ValueError, match="at least two clusters"):
        cluster_separation(torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected"):
        cluster_separation(torch.randn(20, 3), torch.zeros(5, dtype=torch.int64))


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
    with pytest.raises(ValueError, match="at least 4 tokens"):
        tsne_coordinates(torch.randn(3, 8))
