"""Trained models on disk: save one with its task, load it again, or load any Hugging Face model with a default task.

`task_record` reads the `task.json` that is saved next to a model.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from holdfast.data import text_set, text_sets
from holdfast.data.shifted_images import read_class_index
from holdfast.files import write_atomically
from holdfast.hub import load, save
from holdfast.hub.checkpoint import local_folder
from holdfast.hub.install import specs_of
from holdfast.hub.specs import NATIVE
from holdfast.hub.tracing import longest_sequence, require_finite, require_positions
from holdfast.plugins import plugins_of
from holdfast.routing.layer_names import preset_names
from holdfast.train.image_reading import image_reading, image_size, index_for, is_folder, named_images, was_trained_on
from holdfast.train.image_task import DomainTask, ImageTask
from holdfast.train.label_task import LabelTask
from holdfast.train.recipe import AttackPart, DataPart, ModelPart, Recipe, SparsePart, TrainingPart
from holdfast.train.run_folder import WRITE_ERRORS, write_error
from holdfast.train.start import scaling_from
from holdfast.train.task import Task
from holdfast.train.task_record import MODEL, PLUGINS, TASK, TaskRecord, is_trained, read_record
from holdfast.train.text_task import TextTask

BLOCK_LENGTH = 512  # tokens of a block, if the user gives no length and the model's longest sequence is not shorter


TASKS: dict[str, Callable[[Recipe, Path | None], Task]] = {
    "text": TextTask,
    "labels": LabelTask,
    "images": ImageTask,
    "domains": DomainTask,
}


def make_task(recipe: Recipe, data: Path | None = None) -> Task:
    """Return the task of a recipe; named sources are searched for in `data`."""
    return TASKS[recipe.task](recipe, data)


@final
@dataclass(frozen=True)
class TrainedModel:
    """A model with the record of its task."""

    model: Any
    record: TaskRecord

    @property
    def recipe(self) -> Recipe:
        return self.record.recipe

    def task(self, data: Path | None = None, *, source: str | None = None, class_index: Path | None = None) -> Task:
        """Return the task it was trained for, with its own tokeniser, on the data that `TaskRecord.source` allows.

        class_index     for images in folders that are named by WordNet id: see `data.shifted_images`
        """
        part = replace(self.recipe.data, source=self.record.source(source, data))
        recipe = replace(self.recipe, data=part)
        if recipe.task == "text":
            return TextTask(recipe, data, known=self.record.tokenizer())
        return self._label_task(recipe, data) if recipe.task == "labels" else self._image_task(recipe, data, class_index)

    def _image_task(self, recipe: Recipe, data: Path | None, class_index: Path | None) -> ImageTask:
        """Return the task of an image classifier, on its own source or on all images of another folder."""
        classes, scaling, state = self.classes, scaling_from(self.record.state), self.record.state
        recipe = replace(recipe, data=replace(recipe.data, shifts=[]))  # what a record names is not read
        source, tested = recipe.data.source, None
        if recipe.task == "domains":
            task: ImageTask = DomainTask(recipe, data, scaling=scaling)
        else:
            if is_folder(source) and not was_trained_on(source, state, self.recipe.data.source):
                tested = named_images(self.model, classes, source, index_for(source, class_index))
            task = ImageTask(recipe, data, scaling=scaling, tested=tested)
        if tested is None and list(task.image_set.classes) != classes:
            raise ValueError(f"the classes of {task.image_set.name} are not those that this model was trained on.")
        return task

    @property
    def classes(self) -> list[str]:
        """The classes of a classifier, in the order of its outputs."""
        found = self.record.state.get("classes")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ValueError(f"the {TASK} of this model is damaged: it names no classes.")
        return found

    def _label_task(self, recipe: Recipe, data: Path | None) -> LabelTask:
        """Return the task of a classifier of texts, on its own source or on all rows of another one."""
        classes, source = self.classes, recipe.data.source
        if source in text_sets():  # it has columns of its own
            recipe = replace(recipe, data=replace(recipe.data, text=None, pair=None, label=None))
        how: dict[str, Any] = {"known": self.record.tokenizer(), "classes": classes}
        return LabelTask(recipe, data, **how, test_only=not self._was_trained_on(recipe, data, classes))

    def _was_trained_on(self, recipe: Recipe, data: Path | None, classes: list[str]) -> bool:
        """Return whether these are the texts that the model was trained on: then only their test split may be scored."""
        part, stored = recipe.data, self.record.state.get("checksum")
        if part.source in text_sets() or stored is None:
            return part.source == self.recipe.data.source
        try:
            found = text_set(part.source, folder=data, text=part.text, pair=part.pair, label=part.label, classes=classes)
        except ValueError:  # such as one that cannot be split
            return False
        return found.checksum == stored


def save_trained(model: Any, task: Task, folder: Path) -> None:
    """Save the model and its task into the folder."""
    try:
        save(model, folder / MODEL, force=True, tokenizer=task.preprocessor())
    except WRITE_ERRORS as problem:
        raise write_error(folder / MODEL, problem) from problem
    routers = sorted({spec.router for spec in specs_of(model).values()})
    plugins = plugins_of(routers=[name for router in routers if router != NATIVE for name in preset_names(router)])
    plugins += task.recipe.plugins()
    stored = {"recipe": task.recipe.describe(), **task.state(), **({PLUGINS: plugins} if plugins else {})}
    write_atomically(folder / TASK, json.dumps(stored) + "\n")


def load_trained(folder: Path, **options: Any) -> TrainedModel:
    """Load the folder of a cell or of `holdfast train`, or the model's folder inside it; `options` are those of `load`."""
    record = read_record(folder)
    return TrainedModel(load(record.home / MODEL, **options), record)


def load_model(path: str, loading: Mapping[str, Any] | None = None) -> Any:
    """Return a model in evaluation mode, of `holdfast train`, `compare` or Hugging Face, without the data of its task."""
    if is_trained(Path(path)):
        return _checked(load(read_record(Path(path)).home / MODEL, **(loading or {})), None)
    _require_model(Path(path))
    return _checked(load(path, **(loading or {})), None)


def load_model_and_task(
    path: str,
    *,
    source: str | None = None,
    data: Path | None = None,
    length: int | None = None,
    attack: AttackPart | None = None,
    loading: Mapping[str, Any] | None = None,
    class_index: Path | None = None,
) -> tuple[Any, Task]:
    """Return a model in evaluation mode, and the task to evaluate it on.

    The task is the one that the model was trained for, if it was trained by Holdfast, else one on embedded data.

    source      another text or set of images
    data        where named sources are searched for
    length      tokens of a block of text
    loading     options of `from_pretrained`: device_map, dtype, ...
    class_index for folders of images that are named by WordNet id: see `data.shifted_images`
    """
    if length is not None and length < 1:
        raise ValueError(f"length is {length}; a block of text has at least 1 token.")
    if class_index is not None:
        read_class_index(class_index)  # raises if it cannot be read; checked before the weights are loaded
    options = dict(loading or {})
    if is_trained(Path(path)):
        record = read_record(Path(path))
        record.source(source, data)  # raises if the data may not be read; checked before the weights are loaded
        part = replace(record.recipe.data, length=length or record.recipe.data.length)
        record = replace(record, recipe=replace(record.recipe, data=part, attack=attack or record.recipe.attack))
        model = load(record.home / MODEL, **options)
        longest = {"text": part.length, "labels": length}.get(record.recipe.task)  # texts with labels may be shorter
        trained = TrainedModel(_checked(model, longest), record)
        return trained.model, trained.task(data, source=source, class_index=class_index)
    _require_model(Path(path))
    model = load(path, **options)
    if is_image_classifier(model):
        return _checked(model, None), _default_image_task(model, path, source, data, attack or AttackPart(), class_index)
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
) -> Task:
    """Return the task of a model of texts that Holdfast has not trained."""
    fixed = _fixed(model, path, attack)
    is_classifier = "ForSequenceClassification" in type(model).__name__
    if model.get_output_embeddings() is None and not is_classifier:
        raise ValueError(
            f"{path} is a {type(model).__name__}; only models that predict tokens or classify texts or images are supported."
        )
    tokens = str(Path(path).resolve()) if Path(path).is_dir() else path  # a folder is never the name of a tokeniser
    longest = longest_sequence(model) or BLOCK_LENGTH
    part = DataPart(source=source or "python-docs", tokens=tokens, length=length or min(BLOCK_LENGTH, longest))
    if not is_classifier:
        return TextTask(Recipe(**fixed, data=part), data)
    if source is None:
        raise ValueError(
            f"{path} classifies texts; add --source with labelled texts: a .csv, .tsv or .jsonl file, a folder, or one of "
            f"{', '.join(text_sets())} with --data."
        )
    return _classifier_task(model, path, Recipe(**fixed, task="labels", data=part), data)


def _fixed(model: Any, path: str, attack: AttackPart) -> dict[str, Any]:
    """Return the parts of the recipe of a model that is not trained."""
    return {
        "about": f"{Path(path).name}, as it is",
        "attack": attack,
        "model": ModelPart(family=model.config.model_type),
        "sparse": SparsePart(experts=1, k=1),
        "training": TrainingPart(steps=1, batch=1, learning_rate=0.0),
    }


def is_image_classifier(model: Any) -> bool:
    return type(model).__name__.endswith("ForImageClassification")


def classes_of(model: Any) -> list[str]:
    """Return the names of a model's classes, in the order of its outputs."""
    return [str(model.config.id2label[number]) for number in range(model.config.num_labels)]


def _default_image_task(
    model: Any, path: str, source: str | None, data: Path | None, attack: AttackPart, class_index: Path | None
) -> ImageTask:
    """Return the task of an image classifier that Holdfast has not trained, on all images of a folder or on a named set."""
    where = source or "digits"
    reading = image_reading(local_folder(path), model.config.model_type, image_size(model))
    recipe = Recipe(**_fixed(model, path, attack), task="images", data=DataPart(source=where))
    tested = None
    if is_folder(where):
        tested = named_images(model, classes_of(model), where, index_for(where, class_index), reading.prepare)
    return ImageTask(recipe, data, scaling=reading.scaling, tested=tested)


def _classifier_task(model: Any, path: str, recipe: Recipe, data: Path | None) -> LabelTask:
    """Return the task of a classifier of texts that Holdfast has not trained, on all rows of a file."""
    config = model.config
    if config.problem_type == "multi_label_classification":
        raise ValueError(f"{path} gives a text several labels; only classifiers with one label for each text are supported.")
    classes = [config.id2label[number] for number in range(config.num_labels)] if config.num_labels > 1 else []
    task = LabelTask(recipe, data, classes=classes, test_only=True)
    inner = config.get_text_config()
    if inner.pad_token_id is None:  # a model that reads from left to right finds the end of a text by it
        inner.pad_token_id = config.pad_token_id = task.encoder.pad
    return task


@final
class AuditData:
    """The test texts or image batches of a task, for audits and certificates. They can be iterated over several times."""

    def __init__(self, task: Task, tokens: int) -> None:
        self.task, self.tokens, self.tokenizer, self.source = task, tokens, task.audit_tokenizer, task.source.describe()

    def __iter__(self) -> Iterator[Any]:
        return self.task.audit_inputs(self.tokens)
