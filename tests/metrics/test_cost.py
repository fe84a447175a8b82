"""The cost of an attack on the words that it left alone, against a plain loop and scipy."""

import math

import numpy as np
import pytest
import torch

from holdfast.metrics import Blocks, Cost, block_losses, cost_of_attack, level_of


def losses(blocks: list[list[float]]) -> Blocks:
    """With a word that is not counted at the end."""
    values = [loss for block in blocks for loss in block]
    numbers = [number for number, block in enumerate(blocks) for _ in block]
    return block_losses(torch.tensor([*values, 99.0]), torch.tensor([*numbers, -1]), len(blocks))


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
    assert one is not None and (one.mean, one.low, one.high) == (0.5, None, None) and "no interval" in one.words
    assert cost_of_attack(losses([[], []]), losses([[], []])) is None
    with pytest.raises(ValueError, match="same words"):
        cost_of_attack(losses([[1.0]]), losses([[1.0, 2.0]]))


def test_it_is_said_as_a_rise_of_the_perplexity() -> None:
    cost = Cost(math.log(1.02), math.log(1.01), math.log(1.03), "seeds and examples")
    assert cost.words == "+2.00% (95% interval +1.00% to +3.00%)"
    few = Cost(math.log(1.02), math.log(1.01), math.log(1.03), "these models only")
    assert few.words == "+2.00% (95% interval +1.00% to +3.00%, these models only)"


def test_over_seeds_blocks_and_seeds_count() -> None:
    """Seeds that agree have the interval of the blocks; the seeds share the text, so it is no narrower."""
    clean = block_losses(torch.ones(20), torch.arange(20) // 2, 10)
    rise = torch.rand(20, generator=torch.Generator().manual_seed(0))
    one = cost_of_attack(clean, block_losses(1 + rise, torch.arange(20) // 2, 10))
    assert one is not None and one.low is not None and one.high is not None and one.over == "these models only"
    alike = level_of([one.summary()] * 3)
    assert alike is not None and (alike.low, alike.high) == pytest.approx((one.low, one.high), abs=1e-5)
    assert alike.over == "seeds and examples"
    costs = [cost_of_attack(clean, block_losses(1 + rise + shift, torch.arange(20) // 2, 10)) for shift in (0, 0.01, 0.02)]
    apart = level_of([cost.summary() for cost in costs if cost])
    half = math.hypot(4.302653 * 0.01 / math.sqrt(3), one.high - one.mean)
    assert apart is not None and np.subtract(apart.high or 0, apart.mean) == pytest.approx(half, rel=1e-4)
    assert level_of([{}]) is None
