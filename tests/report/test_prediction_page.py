"""The page of certified predictions: its numbers against counting by hand, and what it says of violations."""

import copy
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from report.browsing import drawn, require_fit, require_no_title_cut_off, visit
from report.predicted import report_of, stored_predictions

from holdfast.report import write_predictions
from holdfast.report.prediction_page import accuracy_table, prediction_page, sentences
from holdfast.train.prediction_report import PredictionReport


def stored() -> PredictionReport:
    return report_of(stored_predictions())


def shown(report: PredictionReport, router: str) -> dict[str, str]:
    table = accuracy_table(report)
    (row,) = (row for row in table.rows if str(row[0]) == router)
    return dict(zip(table.columns, map(str, row), strict=True))


def test_accuracies_are_those_that_are_counted_by_hand() -> None:
    smoe, smooth = shown(stored(), "smoe"), shown(stored(), "smooth")
    assert smoe["seeds"] == "2" and smoe["abstains"] == "37.5%"  # 2 of 4, then 1 of 4
    found = {name: value.split(" ")[0] for name, value in smoe.items()}
    assert (found["certified at 0"], found["certified at 0.1"], found["certified at 0.2"]) == ("50.0", "50.0", "25.0")
    assert (found["under attack at 0.1"], found["under attack at 0.2"]) == ("50.0", "37.5")
    assert smoe["violations"] == "0 of 5" and smooth["violations"] == "0 of 4"
    assert smooth["certified at 0.2"].startswith("100.0 (")


def test_the_curve_and_its_band_are_the_accuracies_of_the_table() -> None:
    report = stored()
    (plot,) = prediction_page(report).plots
    line = next(one for one in plot.data if one["meta"]["router"] == 0 and one["mode"] == "lines")
    assert line["x"][0] == 0 and line["x"][-1] == 0.35
    assert line["y"] == [report.accuracy("smoe", radius).mean for radius in line["x"]]
    assert all(later <= earlier for earlier, later in zip(line["y"], line["y"][1:], strict=False))
    marks = next(one for one in plot.data if one["meta"]["router"] == 0 and one["mode"] == "markers")
    assert marks["x"] == [0.0, 0.1, 0.2] and marks["y"] == [62.5, 50.0, 37.5]
    band = next(one for one in plot.data if one["meta"]["router"] == 0 and one.get("fill"))
    assert max(band["y"]) <= 100 and min(band["y"]) >= 0 and len(band["x"]) == 2 * len(line["x"])


def broken(count: int) -> PredictionReport:
    """Return the report with votes that left their class inside the certified radii of so many examples."""
    content: Any = copy.deepcopy(stored_predictions())
    for one in content["models"][2]["examples"][:count]:
        one["attacked"][0] |= {"hits": 300, "stays": False}
    return report_of(content)


def test_more_violations_than_chance_allows_are_the_first_sentence() -> None:
    fine, few, many = sentences(stored()), sentences(broken(1)), sentences(broken(4))
    assert fine[-1].startswith("0 violations in 9 certified examples; by chance at most 0.18 expected")
    assert few[-1].startswith("1 violation in 9 certified examples") and "do not contradict" in few[-1]
    assert many[0].startswith("Do not trust these certificates: 4 violations in 9 certified examples")
    assert "Do not trust" in prediction_page(broken(4)).html()


def test_a_vote_outside_the_radius_or_one_that_chance_explains_is_no_violation() -> None:
    content: Any = stored_predictions()
    content["models"][0]["examples"][1]["attacked"][1] |= {"hits": 0, "stays": False}  # at 0.2, certified to 0.15
    content["models"][2]["examples"][0]["attacked"][0] |= {"hits": 490, "stays": False}  # of 1000: it may be a half
    assert report_of(content).violations().count == 0
    content["models"][2]["examples"][0]["attacked"][0]["hits"] = 440
    assert report_of(content).violations().count == 1


def test_without_an_attack_the_page_says_so() -> None:
    content: Any = stored_predictions()
    content["settings"] |= {"steps": 0, "radii": []}
    for one in content["models"]:
        one["examples"] = [example | {"attacked": []} for example in one["examples"]]
    report = report_of(content)
    assert sentences(report)[-1] == "The votes were not attacked." and "violations" not in accuracy_table(report).columns
    assert "Under attack" not in prediction_page(report).html().replace("under attack", "")


def test_report_renders_the_page_again_and_exports_its_numbers(tmp_path: Path, command: Command) -> None:
    stored().save(tmp_path / "predictions.json")
    command.printed("report", tmp_path)
    html = (tmp_path / "predictions.html").read_text(encoding="utf-8")
    assert html == write_predictions(tmp_path, tmp_path / "again.html").read_text(encoding="utf-8")
    command.printed("report", tmp_path, "--csv", "--latex")
    assert "Certified accuracy,1,smoe,violations,0,,,0 of 5" in (tmp_path / "predictions.csv").read_text()


@pytest.mark.slow
def test_the_page_fits_and_draws(screen: Any, tmp_path: Path) -> None:
    visit(screen, write_predictions(stored(), tmp_path / "page.html"))
    assert drawn(screen)["certified"] > 0
    require_fit(screen)
    require_no_title_cut_off(screen)
