"""The cost of an attack on the words that it left alone, against a plain loop and scipy."""

import math

import pytest
import torch

from holdfast.metrics import BlockLosses, Cost, cost_of_attack, cost_over_seeds


def losses(blocks: list[list[float]]) -> BlockLosses:
    """With a word that is not counted at the end."""
    values = [loss for block in blocks for loss in block]
    numbers = [number for number, block in enumerate(blocks) for _ in block]
    return BlockLosses.of(torch.tensor([*values, 99.0]), torch.tensor([*numbers, -1]), len(blocks))


def test_of_blocks_of_one_size_it_is_scipys_interval_of_the_mean_difference() -> None:
    from scipy import stats  # type: ignore[import-untyped]

    clean = torch.rand(30, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attacked = clean + 0.1 * torch.rand(30, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cost = cost_of_attack(losses(clean.tolist()), losses(attacked.tolist()))
    differences = (attacked - clean).mean(1).numpy()
    assert cost is not None and cost.mean == pytest.approx(differences.mean(), rel=1e-6)
    low, high = stats.t.interval(0.95, 29, loc=differences.mean(), scale=stats.sem(differences))
    assert (cost.low, cost.high) == pytest.approx((low, high), rel=1e-5)


def test_every_word_counts_alike_and_empty_blocks_not_at_all() -> None:
    cost = cost_of_attack(losses([[1.0, 1.0, 1.0], [2.0], []]), losses([[2.0, 1.0, 1.0], [2.0], []]))
    assert cost is not None and cost.mean == pytest.approx(0.25)
    (one,) = [cost_of_attack(losses([[1.0]]), losses([[1.5]]))]
    assert one == Cost(0.5, None, None) and "no interval" in one.words
    assert cost_of_attack(losses([[], []]), losses([[], []])) is None
    with pytest.raises(ValueError, match="same words"):
        cost_of_attack(losses([[1.0]]), losses([[1.0, 2.0]]))


def test_it_is_said_as_a_rise_of_the_perplexity() -> None:
    assert Cost(math.log(1.02), math.log(1.01), math.log(1.03)).words == "+2.00% (95% interval +1.00% to +3.00%)"


def test_over_seeds_the_wider_interval_counts() -> None:
    alike = cost_over_seeds([Cost(0.02, 0.01, 0.03)] * 3)  # seeds agree: the text decides
    assert (alike.low, alike.high) == pytest.approx((0.01, 0.03))
    apart = cost_over_seeds([Cost(mean, mean - 0.001, mean + 0.001) for mean in (0.01, 0.02, 0.03)])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (apart.low, apart.mean, apart.high) == pytest.approx((0.02 - half, 0.02, 0.02 + half), rel=1e-5)
    single = cost_over_seeds([Cost(0.02, 0.01, 0.03)])
    assert (single.low, single.high) == pytest.approx((0.01, 0.03))
    assert cost_over_seeds([Cost(0.02, None, None)]) == Cost(0.02, None, None)
