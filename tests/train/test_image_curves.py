"""Curves of errors against budgets in comparisons, sample sizes for each attack, severities, and intervals over seeds."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report.stored import by_column
from train.conftest import MakeRecipe

from holdfast.attacks import CORRUPTIONS, corrupt, find_attack
from holdfast.comparing import Chosen, run_comparison
from holdfast.metrics import Difference, difference_of, level_of
from holdfast.report import render
from holdfast.report.comparison_tables import accuracy_table
from holdfast.report.plots import attack_curves, clean_and_attacked
from holdfast.train import Comparison, build_model, make_task, parse_routers
from holdfast.train.image_attack_table import attack_images
from holdfast.train.image_attacks import BATCH, Classifier, Corrupted, curve_of, error_of, wrong_of
from holdfast.train.image_task import ImageTask
from holdfast.train.results import Results

pytestmark = pytest.mark.slow  # two routers are trained with two seeds; tests/attacks/test_curves.py is quick

CURVES: dict[str, Any] = {
    "attack.budgets": ["5/255", 0.3, "0.1"],
    "attack.examples": 32,
    "attack.spsa_examples": 8,
    "attack.corrupted_examples": 12,
    "attack.severities": [5, 2],
    "attack.samples": 1,
}


@pytest.fixture(scope="module")
def folder(digits: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curves") / "run"
    routers = parse_routers("smoe,symphony")
    run_comparison(Chosen(digits(CURVES), routers, 2), path, data=None, match_compute=False)
    return path


@pytest.fixture(scope="module")
def results(digits: MakeRecipe, folder: Path) -> list[dict[str, Any]]:
    return Comparison(digits(CURVES), parse_routers("smoe,symphony"), 2, folder).run()


def test_every_attack_has_a_curve_from_the_clean_error_on(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert list(result["curves"]) == ["FGSM", "PGD", "SPSA"]
        for name, curve in result["curves"].items():
            trial = result["trials"][name]
            assert curve["budgets"] == pytest.approx([0, 5 / 255, 0.1, 0.3])
            assert curve["examples"] == trial["examples"] == (8 if name == "SPSA" else 32)
            for key in ("figure", "top5"):
                assert curve[key] == sorted(curve[key]) and curve[key][2] == trial[key]  # 0.1 is attack.budget
            assert curve["figure"][0] == pytest.approx(100 * (1 - trial["clean_accuracy"]))
            assert all(five <= one for one, five in zip(curve["figure"], curve["top5"], strict=True))
        assert result["curves"]["PGD"]["figure"][-1] > result["curves"]["PGD"]["figure"][0]


def test_corruptions_have_their_own_images_and_severities(results: list[dict[str, Any]]) -> None:
    for result in results:
        trial = result["trials"]["corruptions"]
        assert trial["examples"] == 12 and list(trial["severities"]) == ["2", "5"]
        assert trial["figure"] == pytest.approx(statistics.fmean(trial["severities"].values()))
        assert trial["figure"] == pytest.approx(statistics.fmean(trial["each"].values()))


def test_corrupted_errors_equal_a_naive_loop_and_images_are_made_once(
    digits: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(digits())
    assert isinstance(task, ImageTask)
    classify = Classifier(build_model(task, "smoe", {}, seed=0).eval(), task.scaling)
    pixels, labels = task.test_images(20, torch.device("cpu"))
    images, made = Corrupted(pixels), list[str]()

    def noting(images: Any, name: str, **options: Any) -> Any:
        made.append(name)
        return corrupt(images, name, **options)

    monkeypatch.setattr("holdfast.train.image_attacks.corrupt", noting)
    found = images.score(classify, labels, [1, 4])
    naive = {
        name: [
            error_of(wrong_of(classify, corrupt(pixels, name, severity=severity, seed=0).images, labels))
            for severity in (1, 4)
        ]
        for name in CORRUPTIONS
    }
    assert found["each"] == pytest.approx({name: statistics.fmean(errors) for name, errors in naive.items()})
    assert images.score(classify, labels, [1, 4]) == found and len(made) == 2 * len(CORRUPTIONS)
    monkeypatch.setattr("holdfast.train.image_attacks.LARGEST_CACHE", 0)
    large = Corrupted(pixels)
    assert large.score(classify, labels, [4])["severity"] == 4 and not large._kept


def test_rows_have_intervals_and_paired_differences_of_every_attack(folder: Path, results: list[dict[str, Any]]) -> None:
    stored = Results.load(folder)
    mine = [result for result in results if result["router"] == "symphony"]
    theirs = [result for result in results if result["router"] == "smoe"]
    row = stored.rows[1]
    assert list(row.scores) == ["clean", "FGSM", "PGD", "SPSA", "corruptions"]
    for name, score in row.scores.items():
        scored = [[one["clean"] if name == "clean" else one["trials"][name] for one in all_] for all_ in (theirs, mine)]
        over, difference = level_of(scored[1]), difference_of(*scored)
        assert over is not None and difference is not None and over.low is not None and over.high is not None
        assert (score.level, score.difference) == (over, difference) and over.over == "these models only"
        assert 0 <= over.low < over.mean < over.high <= 100
        if name != "clean":  # beside an attack stands the clean error of the same images
            assert score.clean == pytest.approx(statistics.fmean(one["clean"] for one in scored[1]))
            assert all(one["clean"] <= one["figure"] or name == "corruptions" for one in scored[1])
    assert row.attacks_some and row.examples == {"clean": 180, "attacked": 32}
    assert row.clean_beside_attacked == row.scores["PGD"].clean != row.clean
    for points in (row.curves["PGD"].figure, row.curves["PGD"].top5):
        assert all(point and 0 <= (point.low or 0) <= (point.high or 100) <= 100 and point.over for point in points)
    assert "per_example" not in (folder / "results.json").read_text()


def test_the_page_shows_curves_and_accuracies_with_intervals(folder: Path) -> None:
    stored = Results.load(folder)
    plots = list(attack_curves(stored))
    assert [plot.title for plot in plots][:3] == [
        "FGSM, error against budget",
        "FGSM, error against budget, top 5",
        "PGD, error against budget",
    ]
    for plot in plots:
        assert [trace["meta"]["router"] for trace in plot.data] == [0, 1]
        for trace in plot.data:
            assert trace["x"] == pytest.approx([0, 5, 25.5, 76.5]) and len(trace["error_y"]["array"]) == 4
    smoe, symphony = by_column(accuracy_table(stored))
    clean = stored.rows[1].scores["clean"].level
    assert clean is not None and clean.low is not None and clean.high is not None
    assert symphony["clean"] == f"{100 - clean.mean:.2f} ({100 - clean.high:.2f} to {100 - clean.low:.2f})"
    assert smoe["PGD, difference"] == "baseline" and "these models only" in symphony["PGD, difference"]
    same = stored.rows[1].scores["PGD"].clean
    assert same is not None and symphony["clean, images of PGD"] == f"{100 - same:.2f}"
    (large,) = [trace for trace in clean_and_attacked(stored).data if "clean" in trace.get("hovertemplate", "")][1:]
    assert large["x"] == [same]
    page = render(stored)
    assert "Accuracy, clean and attacked" in page and symphony["corruptions"] in page and "PGD, error against budget" in page
    counts = {"clean": stored.cells[0].clean.examples, "FGSM": 32, "PGD": 32, "SPSA": 8, "corruptions": 12}
    assert f"Test images: {', '.join(f'{name} {count}' for name, count in counts.items())}." in page
    assert page.count("<h2>Every attack</h2>") == 0  # the table of accuracies has all of it


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Difference(2.0, 1.0, 3.0, 3, "seeds and examples"), "-2 (95% interval -3 to -1, 3 seeds)"),
        (Difference(0.0, None, None, 1), "+0, no interval"),  # not -0
    ],
)
def test_a_gain_in_error_is_a_loss_in_accuracy(error: Difference, told: str, folder: Path) -> None:
    stored = Results.load(folder)
    score = replace(stored.rows[1].scores["clean"], difference=error)
    row = replace(stored.rows[1], scores={"clean": score})
    assert by_column(accuracy_table(replace(stored, rows=[stored.rows[0], row])))[1]["clean, difference"] == told


def test_a_top_5_error_of_zero_everywhere_has_no_plot(folder: Path) -> None:
    stored = Results.load(folder)
    zero = Difference(0.0, 0.0, 0.0, 2)
    curves = {name: replace(one, top5=[zero] * 4) for name, one in stored.rows[0].curves.items()}
    rows = [replace(row, curves=curves) for row in stored.rows]
    titles = [plot.title for plot in attack_curves(replace(stored, rows=rows))]
    assert titles[:2] == ["FGSM, error against budget", "PGD, error against budget"] and len(titles) == 3


def test_the_curve_of_python_equals_single_attacks_where_those_are_monotone(digits: MakeRecipe) -> None:
    task = make_task(digits())
    assert isinstance(task, ImageTask)
    model = build_model(task, "smoe", {}, seed=0).eval()
    budgets = [0.3, 0.02]
    found = attack_images(model, task, "pgd", budget=budgets, steps=3, examples=30, restarts=2, random_start=False)
    pixels, labels = task.test_images(30, torch.device("cpu"))
    classify = Classifier(model, task.scaling)
    one = find_attack("pgd").run(
        classify, pixels, labels, budget=0.02, steps=3, restarts=2, random_start=False, batch=BATCH, top=5
    )
    assert found["curves"]["PGD"]["figure"][1] == pytest.approx(100 * (1 - one.accuracy))
    points = curve_of(find_attack("pgd"), classify, pixels, labels, budgets, steps=3, restarts=2, random_start=False)
    assert found["rows"][-1][2] == pytest.approx(100 * (1 - points[-1].accuracy))
    assert points[0].restarts == 2 and points[0].seed is None and points[0].options["random_start"] is False


def test_options_of_the_recipe_reach_the_attacks(digits: MakeRecipe, tmp_path: Path) -> None:
    changes = {"attack.step": "0.5/255", "attack.restarts": 2, "attack.random_start": False, "attack.samples": 3}
    recipe = digits({**changes, "training.steps": 2, "attack.examples": 8})
    (result,) = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run()
    strong, blind = result["trials"]["PGD"], result["trials"]["SPSA"]
    assert strong["restarts"] == 2 and strong["options"]["step"] == 0.5 / 255 and strong["options"]["random_start"] is False
    assert blind["options"]["samples"] == 3 and blind["options"]["step"] == 0.5 / 255
    assert "curves" not in result
    described = make_task(recipe).describe()["attack"]
    assert described["step"] == 0.5 / 255 and described["restarts"] == 2 and described["samples"] == 3


def test_the_named_attack_may_be_one_of_those_that_every_recipe_runs(digits: MakeRecipe, tmp_path: Path) -> None:
    recipe = digits({"attack.name": "spsa", "attack.spsa_examples": 6, "attack.examples": 9, "training.steps": 2})
    (result,) = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run()
    assert set(result["trials"]) == {"FGSM", "PGD", "SPSA", "corruptions"}
    assert result["attacked"]["figure"] == result["trials"]["SPSA"]["figure"] and result["attacked"]["examples"] == 6
