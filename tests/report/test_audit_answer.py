"""What a reader sees first: places on scales, the answer in words, the price. Numbers are those of the report."""

import math
from typing import Any

import pytest
from report.audited import pair, perturbed, report_of, stored_audit
from wording import mentions

from holdfast.auditing import diagnose
from holdfast.auditing.findings import Answer
from holdfast.report import render_audit
from holdfast.report.first_screen import (
    LEFT,
    MOST_ROWS,
    RIGHT,
    ZERO,
    FirstScreen,
    changed_by,
    figure,
    first_screen,
    jump_words,
    log_scale,
    perturbation_label,
)


def screen_of(stored: dict[str, Any]) -> FirstScreen:
    report = report_of(stored)
    return first_screen(report, diagnose(report))


def with_shares(*shares: tuple[str, float | None, float | None], count: int = 4000) -> dict[str, Any]:
    """Return a stored audit with these perturbations: name, share of predictions before and after."""
    stored = stored_audit()
    other = stored["what_if"]
    for measure in ("flips", "flip_output", "output", "prediction_flips"):
        other[measure] = {}
    stored["perturbations"] = {}
    for name, before, after in shares:
        one = stored["perturbations"][name] = perturbed(name, 0.1, 0.1)
        one["overall"] |= {"prediction_flips": before, "predictions": count}
        other["flips"][name], other["flip_output"][name] = pair(0.1, 0.1), pair(0.08, 0.02)
        other["output"][name], other["prediction_flips"][name] = pair(0.1, 0.1), pair(before, after)
    return stored


def test_a_scale_has_powers_of_ten_and_a_place_for_zero() -> None:
    place, ticks = log_scale([0.0, 0.002, 0.05])
    assert [text for _, text in ticks] == ["0", "0.1%", "1%", "10%"]
    assert [at for at, _ in ticks] == [ZERO, LEFT, pytest.approx((LEFT + RIGHT) / 2), RIGHT]
    assert (
        place(0.0) == ZERO
        and place(0.1) == RIGHT
        and place(math.sqrt(0.001 * 0.01)) == pytest.approx((3 * LEFT + RIGHT) / 4)
    )
    assert log_scale([0.5])[1] == [(LEFT, "10%"), (RIGHT, "100%")]  # without a zero there is no place for it
    place, ticks = log_scale([1e-9, 0.05])
    assert [text for _, text in ticks] == ["0.001%", "0.01%", "0.1%", "1%", "10%"] and place(1e-9) == LEFT
    assert [text for _, text in log_scale([1e-9, 0.5])[1]] == ["", "0.01%", "", "1%", "", "100%"]  # they would touch
    assert len(log_scale([0.0, 0.0])[1]) > 1


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("value", "text"),
    [(4.76, "4.760"), (116.8848, "116.9"), (12345.6, "12,346"), (0.0, "0.000"), (1.5e-9, "0.000000"), (None, "\u2013")],
)
def test_figures_keep_four_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([("words", 0.2, 0.1), ("typos", 0.1, 0.1)], "predictions change less often under 1 of 2 perturbations."),
        ([("words", 0.1, 0.2), ("typos", 0.1, 0.1)], "predictions change more often under 1 of 2 perturbations."),
        (
            [("words", 0.1, 0.2), ("typos", 0.1, 0.05)],
            "predictions change less often under 1 and more often under 1 of 2 perturbations.",
        ),
        (
            [("words", 0.1, 0.101), ("typos", 0.1, 0.1)],
            "predictions change about as often as before under all 2 perturbations.",
        ),
        ([("words", None, None)], "the output change by flips is smaller under 1 of 1 perturbation, by 75%."),
        ([], "flips change no output."),
    ],
)
def test_the_answer_is_one_sentence(shares: list[Any], says: str) -> None:
    found = screen_of(with_shares(*shares))
    assert found.sentence == f"With smooth, {says}" and len(found.sentence.split()) <= 20
    assert len(found.plots) == (0 if not shares else 1 if shares[0][1] is None else 2)


def test_a_larger_output_change_by_flips_is_said() -> None:
    found = Answer("smoe", {}, {"noise.0.01": 0.5, "noise.0.05": 4.2})
    said = "the output change by flips is smaller under 1 of 2 perturbations, by 50%"
    assert jump_words(found) == f"{said}, and larger under 1, at most 4.2 times as large."
    assert jump_words(Answer("smoe", {}, {"words": 1.0})).endswith("smaller under 0 of 1 perturbation.")


def test_the_picture_has_the_numbers_of_the_report_the_most_changed_predictions_first() -> None:
    stored = with_shares(("noise.0.01", 0.002, 0.0), ("words", 0.2, 0.1), ("typos", 0.01, 0.0125))
    predictions, outputs = screen_of(stored).plots
    assert [(row.name, row.text, row.mark) for row in predictions.rows] == [
        ("words", "20% → 10%", "▼"), ("typos", "1.0% → 1.2%", "≈"), ("noise.0.01", "0.20% → 0%", "▼"),
    ]  # fmt: skip
    place, _ = log_scale([0.2, 0.1, 0.01, 0.0125, 0.002, 0.0])
    assert [row.places for row in predictions.rows] == [[place(0.2), place(0.1)], [place(0.01), place(0.0125)],
                                                        [place(0.002), ZERO]]  # fmt: skip
    assert {row.text for row in outputs.rows} == {"8.0% → 2.0%"} and [row.label for row in outputs.rows] == [
        "10% words swapped", "10% words misspelt", "1% noise",
    ]  # fmt: skip


def test_the_price_is_before_and_after_and_says_which_perplexity_it_is() -> None:
    tiles = {tile.name: (tile.value, tile.note) for tile in screen_of(stored_audit()).tiles}
    assert tiles == {
        "experts per token": ("2 → 3.5", "+75%"),
        "loss, unperturbed": ("2.000 → 2.125", "+0.1250"),
        "perplexity, unperturbed": ("7.389 → 8.373", "+13%"),
    }


def test_rows_that_do_not_fit_are_counted_and_those_without_a_change_are_named() -> None:
    stored = with_shares(*((f"noise.0.0{level}", 0.1, 0.1) for level in range(1, 10)), ("words", 0.2, 0.2))
    for name in ("none", "batch.left"):
        stored["perturbations"][name] = perturbed(name, 0.0, 0.0, harmless=True)
    found = screen_of(stored)
    assert len(found.plots[0].rows) == MOST_ROWS and found.plots[0].rows[0].name == "words"
    assert mentions(found.caption, "Nothing changes under none and batch.left", "2 more perturbations")


def test_a_key_names_the_routers_of_the_dots_before_them() -> None:
    assert screen_of(stored_audit()).other == "smooth"
    answer = render_audit(report_of(stored_audit())).split('<div id="answer">')[1]
    key, *_ = answer.split('<div class="pictures">')
    assert mentions(key.split('<p class="key">')[1], "the model's own router", "smooth")


def test_without_a_what_if_the_main_finding_comes_first() -> None:
    stored = stored_audit()
    stored["what_if"] = None
    stored["data"]["source"] = {"name": "python-docs"}
    stored["overall"] = {**stored["overall"], "perplexity": 7.389, "experts_per_token": 2.0}
    found = screen_of(stored)
    assert mentions(
        found.sentence,
        "Severe: 3.1% of predictions change and the loss rises by 0.2500 nats (router",
        "2 more findings below",
    )
    assert (
        found.more
        == "400 tokens of python-docs, 2 MoE layers, 2 experts per token; perplexity of the unperturbed data 7.389."
    )
    assert found.tiles == [] and [row.text for row in found.plots[0].rows] == ["3.1%"]
    assert [len(row.places) for row in found.plots[0].rows] == [1] and not found.other


def test_without_findings_the_largest_change_is_told() -> None:
    stored = with_shares(("words", 0.15, None), ("typos", 0.05, None))
    stored["what_if"], stored["layers"] = None, stored["layers"][:1]
    stored["layers"][0]["load"]["dead"] = []
    for one in stored["perturbations"].values():
        one["overall"]["loss"] = None
    assert screen_of(stored).sentence == "No findings: no perturbation changes more than 15% of the predictions."
    stored["layers"][0]["load"]["cv"] = 1.5
    assert screen_of(stored).sentence == "Only minor findings: no perturbation changes more than 15% of the predictions."
    for one in stored["perturbations"].values():
        one["overall"]["prediction_flips"] = None
    assert screen_of(stored).sentence == "Only minor findings, the first: layer 0: load unevenness (CV) is 1.50."
    stored["status"] = "interrupted"
    assert screen_of(stored).sentence.startswith("The audit was interrupted")


def test_labels_are_a_few_words() -> None:
    settings = report_of(stored_audit()).settings
    names = ("none", "noise.0.05", "routing.bf16", "model.fp32", "batch.alone", "backend", "words", "attack", "my-attack")
    assert [perturbation_label(name, settings) for name in names] == [
        "same forward again", "5% noise", "router in bf16", "model in fp32", "sequence alone", "other kernel",
        "10% words swapped", "attack of 1%", "my-attack",
    ]  # fmt: skip


def test_a_price_is_a_number_without_an_exponent() -> None:
    assert [changed_by(2, after) for after in (2, 2.5, 1.98, 4.8, 30)] == ["the same", "+25%", "-1%", "+140%", "+1,400%"]
