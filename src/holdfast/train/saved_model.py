"""Trained models on disk: save one with its task, load it again, or load any Hugging Face model with a default task.

A folder of `holdfast train`, or of a cell of a comparison, contains `model/` (the Hugging Face model) and `task.json` (the
recipe, and the tokeniser or the classes). Such a folder is untrusted: its `task.json` may refer only to data that are inside
the folder or embedded in Holdfast; other data are read only if the user names them.
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
from holdfast.files import LARGE, is_inside, read_json, write_atomically
from holdfast.hub import load, save
from holdfast.hub.install import specs_of
from holdfast.hub.specs import NATIVE
from holdfast.hub.tracing import longest_sequence, require_finite, require_positions
from holdfast.replacing import recover_folder
from holdfast.routing.plugins import plugins_of, require_plugins
from holdfast.train.image_task import ImageTask, evenly_spaced, normalised
from holdfast.train.recipe import AttackPart, DataPart, ModelPart, Recipe, SparsePart, TrainingPart, from_mapping
from holdfast.train.run_folder import WRITE_ERRORS, write_error
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask

MODEL, TASK, PLUGINS = "model", "task.json", "plugins"
EMBEDDED = ("python-docs", "digits", "fashion-mnist")  # Holdfast finds these itself; a folder cannot redirect them
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
BLOCK_LENGTH = 512  # tokens of a block, if the user gives no length and the model's longest sequence is not shorter
AUDIT_IMAGES, AUDIT_BATCH = 64, 16
LETTERS_PER_TOKEN = 64  # more than a token has: limits how much of a long document is read


def make_task(recipe: Recipe, data: Path | None = None) -> Task:
    """Return the task of a recipe; named sources are searched for in `data`."""
    return TextTask(recipe, data) if recipe.task == "text" else ImageTask(recipe, data)


@final
@dataclass(frozen=True)
class TaskRecord:
    """The `task.json` of a folder. It is untrusted: what it refers to is read only if it is inside the folder."""

    home: Path
    recipe: Recipe
    state: dict[str, Any]  # of its task

    def source(self, named: str | None = None, data: Path | None = None) -> str:
        """Return the data to evaluate the model on: what the user `named`, or the folder's own source if it may be read.

        data        the folder in which the user has named sources
        """
        source = self.recipe.data.source
        if named is not None:
            return named
        if source in EMBEDDED or (data is not None and source in (*corpora(), *image_sets())):
            return source
        if source in corpora():
            raise ValueError(
                f"{self.home} was trained on {source}, which would be fetched from a hub; add --source {source} to fetch "
                "it, or --data FOLDER to say where it is."
            )
        inside = self.home / source
        if inside.exists() and _contains_all_of(self.home, inside):
            return str(inside)
        raise ValueError(
            f"{self.home} was trained on {source!r}, which is not in it; add --source {shlex.quote(source)} to use "
            "that, or name another source."
        )

    def tokenizer(self) -> Tokenizer:
        """Return the model's own tokeniser, from its folder."""
        model = self.home / MODEL
        try:
            described = self.state["tokenizer"]
            if described.get("kind") == "hub" and not any((model / name).exists() for name in TOKENIZER_FILES):
                place = str(described["place"])
                raise ValueError(
                    f"{model} does not contain its tokeniser, which was read from {place!r}; save it into the folder: "
                    f"AutoTokenizer.from_pretrained({place!r}).save_pretrained({str(model)!r})."
                )
            return tokenizer_from(described, folder=model)
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"the {TASK} of this model is damaged: it describes no tokeniser ({problem}).") from None


def _contains_all_of(home: Path, source: Path) -> bool:
    """Return whether a file or folder is inside `home`, and no link in it leads out."""
    inside = [source]
    for place, folders, files in os.walk(source):
        inside += [Path(place, name) for name in (*folders, *files)]
    return all(is_inside(path, home) for path in inside)


@final
@dataclass(frozen=True)
class TrainedModel:
    """A model with the record of its task."""

    model: Any
    record: TaskRecord

    @property
    def recipe(self) -> Recipe:
        return self.record.recipe

    def task(self, data: Path | None = None, *, source: str | None = None) -> Task:
        """Return the task it was trained for, with its own tokeniser, on the data that `TaskRecord.source` allows."""
        part = replace(self.recipe.data, source=self.record.source(source, data))
        recipe = replace(self.recipe, data=part)
        if recipe.task == "text":
            return TextTask(recipe, data, known=self.record.tokenizer())
        task = ImageTask(recipe, data)
        if list(task.image_set.classes) != self.record.state.get("classes"):
            raise ValueError(f"the classes of {task.image_set.name} are not those that this model was trained on.")
        return task


def save_trained(model: Any, task: Task, folder: Path) -> None:
    """Save the model and its task into the folder."""
    own = getattr(task, "tokenizer", None)
    try:
        save(model, folder / MODEL, force=True, tokenizer=own.tokenizer if isinstance(own, HubTokenizer) else None)
    except WRITE_ERRORS as problem:
        raise write_error(folder / MODEL, problem) from problem
    routers = sorted({spec.router for spec in specs_of(model).values()})
    plugins = [plugin for router in routers if router != NATIVE for plugin in plugins_of(router)]
    stored = {"recipe": task.recipe.describe(), **task.state(), **({PLUGINS: plugins} if plugins else {})}
    write_atomically(folder / TASK, json.dumps(stored) + "\n")


def load_trained(folder: Path, **options: Any) -> TrainedModel:
    """Load the folder of a cell or of `holdfast train`, or the model's folder inside it; `options` are those of `load`."""
    record = read_record(folder)
    return TrainedModel(load(record.home / MODEL, **options), record)


def read_record(folder: Path) -> TaskRecord:
    """Return what `save_trained` wrote next to the model."""
    home = _home(folder)
    if home is None:
        raise ValueError(f"{folder} contains no trained model: there is no {TASK} with a folder {MODEL} next to it.")
    if not is_inside(home / MODEL, home):
        raise ValueError(f"{home / MODEL} is a link to a folder outside of {home}; name that folder instead.")
    try:
        stored = read_json(home / TASK, limit=LARGE)
        recipe, plugins = from_mapping(Recipe, stored.pop("recipe")), stored.pop(PLUGINS, [])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{home / TASK} is damaged: {problem}") from None
    require_plugins(plugins, str(home))
    return TaskRecord(home, recipe, stored)


def is_trained(folder: Path) -> bool:
    """Return whether `load_trained` finds a model and its task here."""
    return _home(folder) is not None


def _home(folder: Path) -> Path | None:
    places = (folder, Path(os.path.realpath(folder)).parent)
    return next((place for place in places if (place / TASK).exists() and recover_folder(place / MODEL)), None)


def load_model_and_task(
    path: str,
    *,
    source: str | None = None,
    data: Path | None = None,
    length: int | None = None,
    attack: AttackPart | None = None,
    loading: Mapping[str, Any] | None = None,
) -> tuple[Any, Task]:
    """Return a model in evaluation mode, and the task to evaluate it on.

    The task is the one that the model was trained for, if it was trained by Holdfast, else one on embedded data.

    source      another text or set of images
    data        where named sources are searched for
    length      tokens of a block of text
    loading     options of `from_pretrained`: device_map, dtype, ...
    """
    if length is not None and length < 1:
        raise ValueError(f"length is {length}; a block of text has at least 1 token.")
    options = dict(loading or {})
    if is_trained(Path(path)):
        record = read_record(Path(path))
        record.source(source, data)  # raises if the data may not be read; checked before the weights are loaded
        part = replace(record.recipe.data, length=length or record.recipe.data.length)
        record = replace(record, recipe=replace(record.recipe, data=part, attack=attack or record.recipe.attack))
        model = load(record.home / MODEL, **options)
        trained = TrainedModel(_checked(model, part.length if record.recipe.task == "text" else None), record)
        return trained.model, trained.task(data, source=source)
    _require_model(Path(path))
    model = load(path, **options)
    return _checked(model, length), _default_task(model, path, source, data, length, attack or AttackPart())


def _require_model(folder: Path) -> None:
    """Raise ValueError if the folder only contains folders of models; the error names the first of them."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    cells = sorted([*folder.glob("cells/*/task.json"), *folder.glob("*/task.json")])
    inside = folder / MODEL if (folder / MODEL / "config.json").is_file() else cells[0].parent if cells else None
    if inside is not None:
        raise ValueError(f"{folder} is not the folder of a model, but {inside} is: name that one.")


def _checked(model: Any, length: int | None) -> Any:
    """Return the model in evaluation mode; raise ValueError if its weights are not finite or `length` is too long for it."""
    require_finite(model)
    if length is not None:
        require_positions(model, length)
    return model.eval()


def _default_task(
    model: Any, path: str, source: str | None, data: Path | None, length: int | None, attack: AttackPart
) -> TextTask | ImageTask:
    """Return the task of a model that Holdfast has not trained."""
    fixed: dict[str, Any] = {
        "about": f"{Path(path).name}, as it is",
        "attack": attack,
        "model": ModelPart(family=model.config.model_type),
        "sparse": SparsePart(experts=1, k=1),
        "training": TrainingPart(steps=1, batch=1, learning_rate=0.0),
    }
    if type(model).__name__.endswith("ForImageClassification"):
        where = source or "digits"
        size = getattr(model.config, "image_size", None) if Path(where).is_dir() else None
        return ImageTask(Recipe(**fixed, task="pictures", data=DataPart(source=where, size=size)), data)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{path} is a {type(model).__name__}; only models that predict tokens or classify images are supported."
        )
    tokens = str(Path(path).resolve()) if Path(path).is_dir() else path  # a folder is never the name of a tokeniser
    longest = longest_sequence(model) or BLOCK_LENGTH
    part = DataPart(source=source or "python-docs", tokens=tokens, length=length or min(BLOCK_LENGTH, longest))
    return TextTask(Recipe(**fixed, data=part), data)


@final
class AuditData:
    """The test texts or image batches of a task, for audits and certificates. They can be iterated over several times."""

    def __init__(self, task: Task, tokens: int) -> None:
        self.task, self.tokens = task, tokens
        self.tokenizer: Any = task.tokenizer if isinstance(task, TextTask) else None

    @property
    def source(self) -> dict[str, Any]:
        if isinstance(self.task, TextTask):
            return self.task.corpus.describe()
        assert isinstance(self.task, ImageTask)
        return self.task.image_set.describe()

    def __iter__(self) -> Iterator[Any]:
        return self._texts(self.task) if isinstance(self.task, TextTask) else self._images(self.task)

    def _texts(self, task: TextTask) -> Iterator[str]:
        left = LETTERS_PER_TOKEN * self.tokens
        for document in task.corpus.documents("test"):
            text = document.text[:left]
            left -= len(text)
            yield text
            if left <= 0:
                return

    def _images(self, task: Task) -> Iterator[dict[str, Any]]:
        assert isinstance(task, ImageTask)
        images = task.image_set.images("test")
        numbers = evenly_spaced(len(images), AUDIT_IMAGES)
        for start in range(0, len(numbers), AUDIT_BATCH):
            some = numbers[start : start + AUDIT_BATCH]
            yield {"pixel_values": normalised(images.pixels(some)), "labels": images.labels[some]}
