"""Labelled texts with datasets, attacks and metrics of plugins, and in sweeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wording import assert_refused

import holdfast
from holdfast.attacks import change_words
from holdfast.data import text_set
from holdfast.train import load_recipe, make_task
from holdfast.train.building import build_model
from holdfast.train.text_task import attack_words

SMALL = {"training.steps": 2, "training.batch": 4, "data.length": 16, "data.vocabulary": 50, "data.source": "moods"}
ROWS = [
    (f"the day {number} was {'sunny' if number % 2 else 'grey'}", "good" if number % 2 else "bad") for number in range(40)
]
SPLITS = {"train": ROWS[:20], "valid": ROWS[20:30], "test": ROWS[30:]}


def register(splits: Any) -> None:
    holdfast.register_dataset("moods", task="labels", about="days")(lambda folder: splits)


def test_a_dataset_of_labelled_texts_is_rows_or_rows_with_pairs() -> None:
    register(SPLITS)
    found = text_set("moods")
    assert found.classes == ("bad", "good") and [len(found.texts(split)) for split in SPLITS] == [20, 10, 10]
    assert found.texts("train")[1].text == "the day 1 was sunny" and found.texts("train")[1].label == 1
    holdfast.register_dataset("pairs", task="labels", about="")(
        lambda folder: {
            split: [("a", text, number / 2) for number, (text, _) in enumerate(rows)] for split, rows in SPLITS.items()
        }
    )
    numpy_labels = {
        split: [(text, np.int64(place % 2)) for place, (text, _) in enumerate(rows)] for split, rows in SPLITS.items()
    }
    holdfast.register_dataset("numpy", task="labels", about="")(lambda folder: numpy_labels)
    assert text_set("numpy").classes == ("0", "1")
    pairs = text_set("pairs")
    assert pairs.is_regression and pairs.has_pairs and pairs.texts("test")[1].label == 0.5


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["text"], "row 0 is 'text'; expected"),
        ([("text",)], "expected"),
        ([("", "good")], "expected"),
        ([("text", None)], "has the label None"),
        ([], "has no rows"),
        ("text", "has no rows"),
        ([("a", "b", "good"), ("a", "bad")], "rows with a second text and rows without"),
        ([("a", "new")], "the label 'new'"),
        (None, "test is NoneType; expected"),
    ],
)
def test_a_wrong_split_is_one_sentence(rows: Any, sentence: str) -> None:
    register({**SPLITS, "test": rows})
    assert_refused(sentence, text_set, "moods")


def test_a_text_model_refuses_labelled_texts_by_name() -> None:
    register(SPLITS)
    assert_refused("moods is a set of labelled texts", make_task, load_recipe("tiny", {"data.source": "moods"}))


def test_attacks_and_metrics_of_plugins_score_a_classifier() -> None:
    register(SPLITS)

    @holdfast.register_attack("shout", task="text", about="words in capital letters")
    def shout(texts: Any, *, rate: float, seed: int) -> Any:
        return change_words(texts, "shout", lambda word, random: word.upper(), rate=rate, seed=seed)

    @holdfast.register_metric("margin", of="logits", about="mean difference of the two logits")
    def margin(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0] - logits[:, 1]).abs()

    task = make_task(
        load_recipe("labels-tiny", {**SMALL, "attack.name": "shout", "attack.rate": 1.0, "metrics": ["margin"]})
    )
    model = build_model(task, "smoe", {}, seed=0)
    score = task.score(model)
    assert "shout" in task.measure.attack and "SUNNY" in task.attack.texts[1]  # type: ignore[attr-defined]
    assert score["clean"]["metrics"]["margin"] > 0 and "margin" in score["attacked"]["metrics"]
    assert attack_words(model, task, "shout", [1.0], seed=0)["rows"][1][0] == "shout"


def test_metrics_of_classes_are_refused_for_numbers() -> None:
    numbers = {split: [(text, number / 2) for number, (text, _) in enumerate(rows)] for split, rows in SPLITS.items()}
    register(numbers)
    assert_refused("labels of moods are numbers", make_task, load_recipe("labels-tiny", {**SMALL, "metrics": ["accuracy"]}))
    task = make_task(load_recipe("labels-tiny", SMALL))
    task.recipe = replace(task.recipe, metrics=["accuracy"])  # as `holdfast evaluate --metrics` does
    assert_refused("labels of moods are numbers", task.score, build_model(task, "smoe", {}, seed=0))


@pytest.mark.slow
def test_a_sweep_of_a_classifier_has_one_page_with_predictions_and_metrics(tmp_path: Path) -> None:
    register(SPLITS)
    changes = {**SMALL, "metrics": ["accuracy"]}
    how: dict[str, Any] = {"recipe": "labels-tiny", "changes": changes, "seeds": 1, "match_compute": False}
    rows = holdfast.compare("smoe,symphony", **how, out=tmp_path / "out", sweep={"sparse.k": [1, 2]}).rows
    assert [row.settings for row in rows] == [{"sparse.k": 1}] * 2 + [{"sparse.k": 2}] * 2
    assert all(row.predictions_changed is not None and "accuracy" in row.metrics for row in rows)
    assert (tmp_path / "out" / "report.html").exists()
