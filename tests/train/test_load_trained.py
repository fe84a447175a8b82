"""A trained model is evaluated again to the same scores, from the folder of its cell or of its model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train.conftest import MakeRecipe
from wording import assert_refused

from holdfast.stored import without_nan
from holdfast.train import Comparison, load_trained, parse_routers
from holdfast.train.task_record import is_trained


@pytest.fixture(scope="module")
def cells(tiny: MakeRecipe, digits: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    few = {"training.steps": 6, "training.save_every": 3}
    text = tiny({**few, "data.tokens": "words"})
    by_bytes = tiny({**few, "data.tokens": "bytes", "data.test_bytes": 1500})
    images = digits({**few, "attack.examples": 8, "attack.steps": 1})
    for name, recipe in (("text", text), ("bytes", by_bytes), ("images", images)):
        Comparison(recipe, parse_routers("symphony+smooth[beta=0.5]"), 1, folder / name).run()
    return {name: folder / name / "cells" / "symphony+smooth[beta=0.5]-seed0" for name in ("text", "bytes", "images")}


@pytest.mark.parametrize("kind", ["text", "bytes", "images"])
def test_stored_scores_are_reproduced_exactly(kind: str, cells: dict[str, Path], text: Path) -> None:
    stored = json.loads((cells[kind] / "result.json").read_text())
    for folder in (cells[kind], cells[kind] / "model"):
        assert is_trained(folder)
        trained = load_trained(folder)
        task = trained.task(source=None if kind == "images" else str(text))
        scores = json.loads(json.dumps(without_nan(task.score(trained.model))))
        assert scores == {key: stored[key] for key in ("clean", "attacked", "trials")}


def test_a_model_is_found_from_inside_its_folder(cells: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (cells["text"], cells["text"] / "model"):
        monkeypatch.chdir(place)
        assert load_trained(Path(".")).recipe.task == "text"


def test_the_tokeniser_is_the_models_own_even_if_the_text_has_changed(tiny: MakeRecipe, tmp_path: Path, text: Path) -> None:
    """The words of a source may change; their numbers in the model must not."""
    source = tmp_path / "text.txt"
    source.write_text(text.read_text())
    recipe = tiny({"data.source": str(source), "training.steps": 1})
    Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run()
    before = load_trained(tmp_path / "run" / "cells" / "smoe-seed0").task(source=str(source)).state()
    source.write_text("Other words altogether.\n\n" * 900)
    trained = load_trained(tmp_path / "run" / "cells" / "smoe-seed0")
    assert trained.task(source=str(source)).state() == before
    assert trained.task(source=str(source)).score(trained.model)["clean"]["tokens"] > 0


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "cut short": (lambda stored: json.dumps(stored)[:200], "is damaged"),
    "no JSON": (lambda stored: "nothing", "is damaged"),
    "not UTF-8": (lambda stored: b"\xff\xfe", "is damaged"),
    "a list": (lambda stored: [stored], "is damaged"),
    "a number": (lambda stored: 3, "is damaged"),
    "no recipe": (lambda stored: {"tokenizer": stored["tokenizer"]}, "is damaged"),
    "another recipe": (lambda stored: {**stored, "recipe": {"about": "x"}}, "is damaged"),
    "a typo": (lambda stored: {**stored, "recipe": {**stored["recipe"], "taks": "text"}}, "'task'"),
    "no tokeniser": (lambda stored: {"recipe": stored["recipe"]}, "damaged.*tokeniser"),
    "half a tokeniser": (lambda stored: {**stored, "tokenizer": {"kind": "words"}}, "damaged.*tokeniser"),
    "no words": (lambda stored: {**stored, "tokenizer": {"kind": "words", "words": 3}}, "damaged.*tokeniser"),
    "a text for a tokeniser": (lambda stored: {**stored, "tokenizer": "words"}, "damaged.*tokeniser"),
    "a strange tokeniser": (lambda stored: {**stored, "tokenizer": {"kind": "wrds"}}, "'words'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_raises_a_one_line_error(damage: str, cells: dict[str, Path], tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "cell"
    folder.mkdir()
    shutil.copytree(cells["text"] / "model", folder / "model")
    change, sentence = DAMAGED[damage]
    written = change(json.loads((cells["text"] / "task.json").read_text()))
    content = (
        written if isinstance(written, bytes) else (written if isinstance(written, str) else json.dumps(written)).encode()
    )
    (folder / "task.json").write_bytes(content)
    assert_refused(sentence, lambda: load_trained(folder).task(source=str(text)))


def test_a_folder_without_a_trained_model_says_so(tmp_path: Path, cells: dict[str, Path]) -> None:
    assert not is_trained(tmp_path) and not is_trained(tmp_path / "none")
    for folder in (tmp_path, tmp_path / "none", cells["text"].parent):
        assert_refused(r"task\.json", load_trained, folder)
    (tmp_path / "task.json").write_bytes((cells["text"] / "task.json").read_bytes())
    assert not is_trained(tmp_path)
