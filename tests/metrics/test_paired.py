"""Paired differences over seeds, against scipy."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from wording import mentions

from holdfast.metrics import paired
from holdfast.metrics.paired import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 30, 101])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_quantile_of_students_t_is_scipys(freedom: int, confidence: float) -> None:
    from scipy import stats  # type: ignore[import-untyped]

    assert student_quantile(freedom, confidence) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9)


NUMBERS = st.floats(-100, 100).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_the_interval_is_that_of_scipys_paired_t_test(seeds: list[tuple[float, float]]) -> None:
    import numpy as np
    from scipy import stats

    baseline, other = [a for a, _ in seeds], [b for _, b in seeds]
    differences = np.array(other) - np.array(baseline)
    found = paired(baseline, other)
    assert found.low is not None and found.high is not None
    assert found.mean == pytest.approx(differences.mean(), abs=1e-9)
    if differences.std() > 1e-6:
        interval = stats.ttest_rel(other, baseline).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_an_interval_that_leaves_0_out_is_a_difference_and_one_that_holds_it_is_none() -> None:
    better = paired([1.0, 2.0, 3.0], [0.9, 1.89, 2.91])
    assert better.differs and mentions(better.words, "-0.1 ", "95%", "-0.1248 to -0.07516", "3 seeds")
    noise = paired([1.0, 2.0, 3.0], [1.1, 1.9, 3.01])
    assert noise.differs is False and mentions(noise.words, "no difference", "-0.24")
    assert mentions(paired([1.0, 2.0], [1.0, 2.0]).words, "no difference", "+0 to +0", "2 seeds")
    assert str(better) == better.words


def test_one_seed_has_no_interval_and_says_so() -> None:
    single = paired([1.0], [0.5])
    assert (single.mean, single.low, single.high, single.seeds, single.differs) == (-0.5, None, None, 1, None)
    assert mentions(single.words, "-0.5 ", "one seed")


def test_pairs_that_are_not_pairs_are_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match=r"\b2 seeds.*\b1\b"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match=r"\b0 seeds"):
        paired([], [])
    with pytest.raises(ValueError, match=r"seed 1.*nan"):
        paired([1.0, 2.0], [1.0, float("nan")])
