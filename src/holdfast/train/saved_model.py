"""A trained model with what is needed to try it again: its recipe, its seed, its tokeniser or classes.

A model to be tried, from wherever it is: one that was trained here, or any Hugging Face folder.

What a saved model is audited on: the test data of its own task.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from holdfast.data import Tokenizer, corpora, image_sets, tokenizer_from
from holdfast.data.tokenizers import HubTokenizer
from holdfast.files import LARGE, lies_inside, read_json, write_whole
from holdfast.hub import load, save
from holdfast.hub.install import specs_of
from holdfast.hub.layers import NATIVE
from holdfast.hub.tracing import longest_sequence, require_finite, require_room
from holdfast.replacing import restore
from holdfast.routing.plugins import plugins_of, require_plugins
from holdfast.train.picture_task import PictureTask, normalised, spread
from holdfast.train.recipe import AttackPart, DataPart, ModelPart, Recipe, SparsePart, TrainingPart, typed
from holdfast.train.run_folder import UNWRITTEN, unwritten
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask

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


LENGTH = 512  # tokens of a block, where neither the user nor the model says less


def subject(
    path: str,
    *,
    source: str | None = None,
    data: Path | None = None,
    length: int | None = None,
    attack: AttackPart | None = None,
    loading: Mapping[str, Any] | None = None,
) -> tuple[Any, Task]:
    """The model, in evaluation, and what it is tried on: by default what it was trained for, or the embedded text.

    source      another text or set of pictures
    data        where named sources are looked for
    length      of a block of text
    loading     options of `from_pretrained`: device_map, dtype, ...
    """
    if length is not None and length < 1:
        raise ValueError(f"length is {length}; a block of text has at least 1 token.")
    options = dict(loading or {})
    if is_trained(Path(path)):
        record = read_record(Path(path))
        record.source(source, data)  # may it be read? asked before the weights are
        part = replace(record.recipe.data, length=length or record.recipe.data.length)
        record = replace(record, recipe=replace(record.recipe, data=part, attack=attack or record.recipe.attack))
        model = load(record.home / MODEL, **options)
        trained = Trained(_usable(model, part.length if record.recipe.task == "text" else None), record)
        return trained.model, trained.task(data, source=source)
    _require_model(Path(path))
    model = load(path, **options)
    return _usable(model, length), _task(model, path, source, data, length, attack or AttackPart())


def _require_model(folder: Path) -> None:
    """A folder around models is not one; the sentence names the first inside."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    cells = sorted([*folder.glob("cells/*/task.json"), *folder.glob("*/task.json")])
    inside = folder / MODEL if (folder / MODEL / "config.json").is_file() else cells[0].parent if cells else None
    if inside is not None:
        raise ValueError(f"{folder} holds no model itself, but {inside} does: name that one.")


def _usable(model: Any, length: int | None) -> Any:
    require_finite(model)
    if length is not None:
        require_room(model, length)
    return model.eval()


def _task(
    model: Any, path: str, source: str | None, data: Path | None, length: int | None, attack: AttackPart
) -> TextTask | PictureTask:
    about = f"{Path(path).name}, as it is"
    parts = {"model": ModelPart(family=model.config.model_type), "sparse": SparsePart(experts=1, k=1)}
    fixed: dict[str, Any] = {"about": about, "attack": attack, **parts}
    training, size = TrainingPart(steps=1, batch=1, learning_rate=0.0), getattr(model.config, "image_size", None)
    if type(model).__name__.endswith("ForImageClassification"):
        where = source or "digits"
        pixels = size if Path(where).is_dir() else None
        part = DataPart(source=where, size=pixels)
        return PictureTask(Recipe(**fixed, training=training, task="pictures", data=part), data)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{path} is a {type(model).__name__}; what can be tried here predicts tokens or classifies pictures."
        )
    longest = longest_sequence(model) or LENGTH
    part = DataPart(source=source or "python-docs", tokens=_as_path(path), length=length or min(LENGTH, longest))
    return TextTask(Recipe(**fixed, training=training, data=part), data)


def _as_path(path: str) -> str:
    """So that a folder is never taken for the name of a tokeniser."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


PICTURES, BATCH = 64, 16
LETTERS = 64  # of a token at most, about: so much of a long document is read, and no more


@final
class Material:
    """Texts or batches, to be read as often as wanted, with their tokenizer and where they are from."""

    def __init__(self, task: Task, tokens: int) -> None:
        self.task, self.tokens = task, tokens
        self.tokenizer: Any = task.tokenizer if isinstance(task, TextTask) else None

    @property
    def source(self) -> dict[str, Any]:
        if isinstance(self.task, TextTask):
            return self.task.corpus.describe()
        assert isinstance(self.task, PictureTask)
        return self.task.pictures.describe()

    def __iter__(self) -> Iterator[Any]:
        return self._texts(self.task) if isinstance(self.task, TextTask) else self._pictures(self.task)

    def _texts(self, task: TextTask) -> Iterator[str]:
        left = LETTERS * self.tokens
        for document in task.corpus.documents("test"):
            text = document.text[:left]
            left -= len(text)
            yield text
            if left <= 0:
                return

    def _pictures(self, task: Task) -> Iterator[dict[str, Any]]:
        assert isinstance(task, PictureTask)
        images = task.pictures.images("test")
        numbers = spread(len(images), PICTURES)
        for start in range(0, len(numbers), BATCH):
            some = numbers[start : start + BATCH]
            yield {"pixel_values": normalised(images.pixels(some)), "labels": images.labels[some]}
