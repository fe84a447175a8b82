"""The answer of a what-if: which differences are clear, and under which perturbations nothing changes."""

import math
from typing import Any

import pytest
from report.audited import pair, perturbed, report_of, stored_audit

from holdfast.auditing.findings import Answer, answer, direction, unchanged
from holdfast.auditing.reports import Pair


def exact_p(fewer: int, more: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, in which each prediction that changes is a fair coin."""
    total, few = fewer + more, min(fewer, more)
    return min(1.0, 2 * sum(math.comb(total, count) for count in range(few + 1)) / 2**total)


def test_a_difference_is_clear_about_where_the_exact_test_says_so() -> None:
    count = 1000
    for before in range(60):
        for after in range(60):
            found = direction(Pair(before / count, after / count), count)
            p = exact_p(before, after) if before + after else 1.0
            if p > 0.065:
                assert found == "same", (before, after)
            elif p < 0.045:
                assert found == ("fewer" if after < before else "more"), (before, after)


def test_a_share_that_is_not_known_differs_from_none() -> None:
    assert direction(Pair(0.5, None), 1000) == direction(Pair(None, 0.5), 1000) == "same"


def with_router(**changed: dict[str, Any]) -> dict[str, Any]:
    """Return a stored audit whose what-if has a second perturbation."""
    stored = stored_audit()
    stored["perturbations"]["words"] = perturbed("words", 0.2, 0.2)
    given = {"flips": pair(0.2, 0.2), "flip_output": pair(0.1, 0.0), "output": pair(0.1, 0.1)}
    for measure, value in {**given, "prediction_flips": pair(0.2, 0.4), **changed}.items():
        stored["what_if"][measure]["words"] = value
    return stored


def test_an_answer_counts_predictions_and_compares_what_flips_do() -> None:
    found = answer(report_of(with_router()))
    assert found == Answer("smooth", {"noise.0.01": "same", "words": "more"}, {"noise.0.01": 0.003 / 0.0625, "words": 0.0})
    assert (found.count("fewer"), found.count("more"), found.count("same")) == (0, 1, 1)
    stored = stored_audit()
    stored["what_if"] = None
    assert answer(report_of(stored)) is None


def test_a_perturbation_without_flips_before_has_no_ratio() -> None:
    found = answer(report_of(with_router(flip_output=pair(0.0, 0.1))))
    assert found is not None and "words" not in found.flip_outputs


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("changed", "nothing"),
    [
        ({}, True),
        ({"output": {"total": 9e-6, "flip": 0.0, "rest": 9e-6, "flip_share": 0.0}}, True),  # rounding
        ({"output": {"total": 2e-5, "flip": 0.0, "rest": 2e-5, "flip_share": 0.0}}, False),
        ({"output": {"total": None, "flip": None, "rest": None, "flip_share": None}}, False),  # not finite
        ({"flips": 0.01}, False),
        ({"first_flips": 0.01}, False),
        ({"prediction_flips": 0.0025}, False),
        ({"prediction_flips": None, "loss": None}, True),
        ({"loss": {"before": 2.0, "after": 2.0, "change": -4e-5, "size": 4e-5}}, True),
        ({"loss": {"before": 2.0, "after": 2.0, "change": -6e-5, "size": 6e-5}}, False),
        ({"loss": {"before": 2.0, "after": None, "change": None, "size": None}}, False),
    ],
)
def test_a_perturbation_changes_nothing_if_no_number_does(changed: dict[str, Any], nothing: bool) -> None:
    stored = stored_audit()
    stored["perturbations"]["none"]["overall"] |= changed
    assert unchanged(report_of(stored)) == (["none"] if nothing else [])


@pytest.mark.parametrize("measure", ["flips", "output", "prediction_flips"])
def test_a_change_with_the_other_router_only_is_a_change(measure: str) -> None:
    stored = stored_audit()
    stored["what_if"][measure]["none"] = pair(0.0, 0.01)
    assert unchanged(report_of(stored)) == []
