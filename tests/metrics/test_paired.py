"""Intervals over seeds and test examples: against scipy, published examples and simulations."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from interval_coverage import coverage
from wording import assert_refused, mentions

from holdfast.metrics import (
    Blocks,
    Cost,
    Predictions,
    Shares,
    block_losses,
    cost_of_attack,
    difference_of,
    level_of,
    paired,
)
from holdfast.metrics.paired import Score, newcombe, read_per_example, wilson

NUMBERS = st.floats(-100, 100).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=8))
def test_over_seeds_alone_the_interval_is_that_of_scipys_paired_t_test(seeds: list[tuple[float, float]]) -> None:
    from scipy import stats  # type: ignore[import-untyped]

    baseline, other = [a for a, _ in seeds], [b for _, b in seeds]
    differences = np.array(other) - np.array(baseline)
    found = paired(baseline, other)
    assert found.low is not None and found.high is not None and found.over == "these examples only"
    assert found.mean == pytest.approx(differences.mean(), abs=1e-9)
    if differences.std() > 1e-6:
        interval = stats.ttest_rel(other, baseline).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_from_three_seeds_on_the_squares_of_both_distances_are_added() -> None:
    seeds = paired([1.0, 2.0, 3.0], [0.9, 1.89, 2.91])
    both = paired([1.0, 2.0, 3.0], [0.9, 1.89, 2.91], examples=(-0.13, -0.06))
    assert seeds.high is not None and both.low is not None and both.high is not None
    half = seeds.high - seeds.mean
    assert (both.low, both.high) == pytest.approx((-0.1 - math.hypot(half, 0.03), -0.1 + math.hypot(half, 0.04)))
    assert both.kind == "lower"
    assert mentions(both.words, "-0.1 ", "95%", "-0.1389 to -0.05291", "3 seeds")
    none = paired([1.0, 2.0, 3.0], [1.1, 1.9, 3.01], examples=(-0.2, 0.2))
    assert none.kind == "same" and mentions(none.words, "no difference", "3 seeds", "above 0.32 would show")


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_seeds_have_the_interval_of_these_models_and_claim_nothing(count: int) -> None:
    found = paired([1.0] * count, [1.8] * count, examples=(0.6, 1.0))  # equal differences: t over seeds has no width
    assert (found.low, found.high) == pytest.approx((0.6, 1.0)) and found.kind == "unknown"
    assert mentions(found.words, "+0.8 ", "+0.6 to +1", "these models only")
    bare = paired([1.0] * count, [0.5] * count)
    assert (bare.mean, bare.low, bare.high, bare.kind) == (-0.5, None, None, "unknown")
    assert mentions(bare.words, "-0.5", "no interval")


def test_pairs_that_are_not_pairs_are_one_clear_sentence() -> None:
    assert_refused(r"\b2 seeds.*\b1\b", paired, [1.0, 2.0], [1.0])
    assert_refused(r"\b0 seeds", paired, [], [])
    assert_refused(r"seed 1.*nan", paired, [1.0, 2.0], [1.0, float("nan")])


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (3, 10), (10, 10), (490, 500)])
def test_wilsons_interval_is_scipys(hits: int, count: int) -> None:
    from scipy.stats import binomtest

    theirs = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(hits / count, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


# both right, only the first, only the second, neither: Newcombe (1998), table II; Bentur et al. in Fagerland et al. (2014)
PUBLISHED = [
    ((36, 12, 2, 0), (0.0569, 0.3404)),
    ((20, 12, 2, 16), (0.0562, 0.3292)),
    ((1, 1, 7, 12), (-0.507, -0.0256)),
]


@pytest.mark.parametrize(("counts", "interval"), PUBLISHED)
def test_newcombes_interval_is_the_published_one(counts: tuple[int, ...], interval: tuple[float, float]) -> None:
    first, second = (np.repeat(np.array(values, dtype=float), counts) for values in ([1, 1, 0, 0], [1, 0, 1, 0]))
    assert newcombe(second, first) == pytest.approx(interval, abs=2e-4)


def scores(*wrong: object) -> list[Score]:
    """Return one model for each array of wrong answers."""
    each = [Shares(np.asarray(one, dtype=float)) for one in wrong]
    return [{"figure": 100 * one.wrong.mean(), "per_example": one.stored()} for one in each]


def test_equal_seeds_have_an_interval_and_none_leaves_what_is_possible() -> None:
    before, after = [0, 0, 0, 1], [0, 0, 1, 1]
    same = difference_of(scores(before, before, before), scores(after, after, after))  # t over seeds has no width
    assert same is not None and same.low is not None and same.high is not None and same.low < 0 < 25 < same.high
    wild = scores([0] * 4, [1] * 4, [0] * 4)  # t over these seeds reaches from -110% to 177%
    level, apart = level_of(wild), difference_of(wild, scores([1] * 4, [0] * 4, [1] * 4))
    assert level is not None and (level.low, level.high) == (0, 100)
    assert apart is not None and (apart.low, apart.high) == (-100, 100)


def test_blocks_of_one_size_have_scipys_interval_and_perplexities_its_image() -> None:
    from scipy import stats

    draw = np.random.default_rng(0)
    before, after = (Blocks(draw.normal(20.0, 0.2, 50), np.full(50, 10.0), perplexity=False) for _ in range(2))
    rise = (after.losses - before.losses) / 10
    expected = stats.t.interval(0.95, 49, loc=rise.mean(), scale=stats.sem(rise))
    assert Blocks.interval([after], [before]) == pytest.approx(expected)
    low, high = Blocks.interval([Blocks(before.losses, before.words)]) or (0, 0)
    around = stats.t.interval(0.95, 49, loc=before.mean, scale=stats.sem(before.losses / 10))
    assert (low, high) == pytest.approx(np.exp(around), rel=1e-4)
    assert Blocks.interval([Blocks(np.ones(1), np.ones(1))]) is None


def test_examples_are_read_as_they_were_stored() -> None:
    labels = np.array([0.5, 1.5, 3.0])
    kinds = [
        Shares(np.array([1.0, 0.0, 1.0])),
        Shares(np.array([0.25, 0.0, 1.0])),
        Blocks(np.array([1.5, 2.0]), np.array([3.0, 4.0]), perplexity=False),
        Predictions("pearson", np.array([1.0, 2.0, 2.5]), labels),
    ]
    for kind in kinds:
        found = read_per_example(kind.stored())
        assert type(found) is type(kind) and found.stored() == kind.stored() and len(found) == len(kind)
    assert len(str(Shares(np.ones(10_000)).stored()["wrong"])) == 2500
    assert difference_of(scores([0, 1]), scores([0, 1, 1])).over is None  # type: ignore[union-attr]  # other examples


def test_a_metric_of_all_labels_is_compared_by_drawing_examples() -> None:
    draw = np.random.default_rng(0)
    labels = draw.normal(size=200)
    good, bad = (Predictions("pearson", labels + noise * draw.normal(size=200), labels) for noise in (0.3, 1.5))
    interval = Predictions.interval([good], [bad])
    assert interval is not None and 0.2 < interval[0] < interval[1] < 0.6
    assert Predictions.interval([bad], [bad]) == (0, 0) and Predictions.interval([good]) == Predictions.interval([good])


@pytest.mark.parametrize(("own", "seeds"), [(0.0, 3), (1.0, 5)])
def test_the_interval_covers_the_truth_where_seeds_alone_do_not(own: float, seeds: int) -> None:
    """Models of one router err on the same examples if `own` is 1. `benchmarks/interval_coverage.py` has more settings."""
    found = coverage((0.9, 0.93), 0.2, own, examples=40, seeds=seeds, runs=150)
    assert found["difference"] >= 0.93 and found["level"] >= 0.9
    assert own == 0 or found["seeds alone"] < 0.8


def losses(blocks: list[list[float]]) -> Blocks:
    """With a word that is not counted at the end."""
    values = [loss for block in blocks for loss in block]
    numbers = [number for number, block in enumerate(blocks) for _ in block]
    return block_losses(torch.tensor([*values, 99.0]), torch.tensor([*numbers, -1]), len(blocks))


def test_of_blocks_of_one_size_it_is_scipys_interval_of_the_mean_difference() -> None:
    from scipy import stats

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
    assert_refused("same words", cost_of_attack, losses([[1.0]]), losses([[1.0, 2.0]]))


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
