"""A trained model with what is needed to try it again: its recipe, its seed, its tokeniser or classes."""

import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from holdfast.data import Tokenizer, corpora, image_sets, tokenizer_from
from holdfast.data.hub_tokenizer import HubTokenizer
from holdfast.hub import load, save
from holdfast.hub.specs import NATIVE
from holdfast.hub.wiring import specs_of
from holdfast.reading import LARGE, lies_inside, read_json
from holdfast.replacing import restore
from holdfast.routing.plugins import plugins_of, require_plugins
from holdfast.train.checkpoints import UNWRITTEN, unwritten
from holdfast.train.picture_task import PictureTask
from holdfast.train.recipe import Recipe
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask
from holdfast.train.typed import typed
from holdfast.writing import write_whole

MODEL, TASK, PLUGINS = "model", "task.json", "plugins"
EMBEDDED = ("python-docs", "digits", "fashion-mnist")  # where these lie, Holdfast knows, not the folder
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def make_task(recipe: Recipe, data: Path | None = None) -> Task:
    """The task of a recipe; `data` is where its named source is looked for."""
    return TextTask(recipe, data) if recipe.task == "text" else PictureTask(recipe, data)


@final
@dataclass(frozen=True)
class Record:
    """What a folder says of its task. It may be hostile: what it names is read only where it lies in the folder."""

    home: Path
    recipe: Recipe
    state: dict[str, Any]  # of its task

    def source(self, named: str | None = None, data: Path | None = None) -> str:
        """Return what the model is tried on: what the user `named`, or the folder's own, if that may be read.

        data        where the user says that named sources lie
        """
        source = self.recipe.data.source
        if named is not None:
            return named
        if source in EMBEDDED or (data is not None and source in (*corpora(), *image_sets())):
            return source
        if source in corpora():
            raise ValueError(
                f"{self.home} was trained on {source}, which would be fetched from a hub; add --source {source} to fetch "
                "it, or --data FOLDER to say where it lies."
            )
        inside = self.home / source
        if inside.exists() and _holds_all_of(self.home, inside):
            return str(inside)
        raise ValueError(
            f"{self.home} was trained on {source!r}, which does not lie in it; add --source {shlex.quote(source)} to use "
            "that, or name another source."
        )

    def tokenizer(self) -> Tokenizer:
        """Return its own tokeniser, from its folder."""
        model = self.home / MODEL
        try:
            described = self.state["tokenizer"]
            if described.get("kind") == "hub" and not any((model / name).exists() for name in TOKENIZER_FILES):
                place = str(described["place"])
                raise ValueError(
                    f"{model} does not hold its tokeniser, which was read from {place!r}; save that one into the folder: "
                    f"AutoTokenizer.from_pretrained({place!r}).save_pretrained({str(model)!r})."
                )
            return tokenizer_from(described, folder=model)
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"the {TASK} of this model is damaged: it describes no tokeniser ({problem}).") from None


@final
@dataclass(frozen=True)
class Trained:
    model: Any
    record: Record

    @property
    def recipe(self) -> Recipe:
        return self.record.recipe

    def task(self, data: Path | None = None, *, source: str | None = None) -> Task:
        """What it was trained for, with its own tokeniser, on the data that `Record.source` allows."""
        part = replace(self.recipe.data, source=self.record.source(source, data))
        recipe = replace(self.recipe, data=part)
        if recipe.task == "text":
            return TextTask(recipe, data, known=self.record.tokenizer())
        task = PictureTask(recipe, data)
        if list(task.pictures.classes) != self.record.state.get("classes"):
            raise ValueError(f"the classes of {task.pictures.name} are not those that this model was trained on.")
        return task


def save_trained(model: Any, task: Task, folder: Path) -> None:
    own = getattr(task, "tokenizer", None)
    try:
        save(model, folder / MODEL, force=True, tokenizer=own.tokenizer if isinstance(own, HubTokenizer) else None)
    except UNWRITTEN as problem:
        raise unwritten(folder / MODEL, problem) from problem
    routers = sorted({spec.router for spec in specs_of(model).values()})
    plugins = [plugin for router in routers if router != NATIVE for plugin in plugins_of(router)]
    stored = {"recipe": task.recipe.describe(), **task.state(), **({PLUGINS: plugins} if plugins else {})}
    write_whole(folder / TASK, json.dumps(stored) + "\n")


def is_trained(folder: Path) -> bool:
    return _home(folder) is not None


def load_trained(folder: Path, **options: Any) -> Trained:
    """From the folder of a cell or of `holdfast train`, or the folder of the model inside it; `options` are `load`'s."""
    record = read_record(folder)
    return Trained(load(record.home / MODEL, **options), record)


def read_record(folder: Path) -> Record:
    """What `save_trained` wrote beside the model."""
    home = _home(folder)
    if home is None:
        raise ValueError(f"{folder} holds no trained model: there is no {TASK} with a folder {MODEL} beside it.")
    if not lies_inside(home / MODEL, home):
        raise ValueError(f"{home / MODEL} is a link to a folder outside of {home}; name that folder instead.")
    try:
        stored = read_json(home / TASK, limit=LARGE)
        recipe, plugins = typed(Recipe, stored.pop("recipe")), stored.pop(PLUGINS, [])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{home / TASK} is damaged: {problem}") from None
    require_plugins(plugins, str(home))
    return Record(home, recipe, stored)


def _home(folder: Path) -> Path | None:
    places = (folder, Path(os.path.realpath(folder)).parent)
    return next((place for place in places if (place / TASK).exists() and restore(place / MODEL)), None)


def _holds_all_of(home: Path, source: Path) -> bool:
    """Whether a file or folder lies in `home`, and no link in it leads out."""
    inside = [source]
    for place, folders, files in os.walk(source):
        inside += [Path(place, name) for name in (*folders, *files)]
    return all(lies_inside(path, home) for path in inside)
