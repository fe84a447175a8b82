"""A trained model with what is needed to try it again: its recipe, its seed, its tokeniser or classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from holdfast.data import Tokenizer, tokenizer_from
from holdfast.hub import load, save
from holdfast.replacing import restore
from holdfast.train.checkpoints import UNWRITTEN, unwritten
from holdfast.train.picture_task import PictureTask
from holdfast.train.recipe import Recipe
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask
from holdfast.train.typed import typed
from holdfast.writing import write_whole

MODEL, TASK = "model", "task.json"


def make_task(recipe: Recipe, data: Path | None = None) -> Task:
    """The task of a recipe; `data` is where its named source is looked for."""
    return TextTask(recipe, data) if recipe.task == "text" else PictureTask(recipe, data)


@final
@dataclass(frozen=True)
class Trained:
    model: Any
    recipe: Recipe
    state: dict[str, Any]  # of its task

    def task(self, data: Path | None = None) -> Task:
        """What it was trained for, with its own tokeniser."""
        if self.recipe.task == "text":
            return TextTask(self.recipe, data, known=self._tokenizer())
        task = PictureTask(self.recipe, data)
        if list(task.pictures.classes) != self.state.get("classes"):
            raise ValueError(f"the classes of {task.pictures.name} are not those that this model was trained on.")
        return task

    def _tokenizer(self) -> Tokenizer:
        try:
            return tokenizer_from(self.state["tokenizer"])
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"the {TASK} of this model is damaged: it describes no tokeniser ({problem}).") from None


def save_trained(model: Any, task: Task, folder: Path) -> None:
    try:
        save(model, folder / MODEL, force=True)
    except UNWRITTEN as problem:
        raise unwritten(folder / MODEL, problem) from problem
    write_whole(folder / TASK, json.dumps({"recipe": task.recipe.describe(), **task.state()}) + "\n")


def is_trained(folder: Path) -> bool:
    return _home(folder) is not None


def load_trained(folder: Path, **options: Any) -> Trained:
    """From the folder of a cell or of `holdfast train`, or the folder of the model inside it; `options` are `load`'s."""
    home = _home(folder)
    if home is None:
        raise ValueError(f"{folder} holds no trained model: there is no {TASK} with a folder {MODEL} beside it.")
    try:
        stored = json.loads((home / TASK).read_text(encoding="utf-8"))
        recipe = typed(Recipe, stored.pop("recipe"))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{home / TASK} is damaged: {problem}") from None
    return Trained(load(home / MODEL, **options), recipe, stored)


def _home(folder: Path) -> Path | None:
    places = (folder, folder.resolve().parent)
    return next((place for place in places if (place / TASK).is_file() and restore(place / MODEL)), None)
