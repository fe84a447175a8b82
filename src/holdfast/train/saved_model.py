"""Trained models on disk: save one with its task, load it again, or load any Hugging Face model with a default task.

`task_record` reads the `task.json` that is saved next to a model.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from holdfast.data import text_set, text_sets
from holdfast.data.question_files import tested_set
from holdfast.data.shifted_images import read_class_index
from holdfast.files import write_atomically
from holdfast.hub import load, save
from holdfast.hub.checkpoint import local_folder
from holdfast.hub.install import specs_of
from holdfast.hub.specs import NATIVE
from holdfast.hub.tracing import longest_sequence, require_finite, require_positions
from holdfast.plugins import plugins_of
from holdfast.routing.presets import preset_names
from holdfast.train.image_reading import image_reading, image_size, index_for, is_folder, named_images, was_trained_on
from holdfast.train.image_task import DomainTask, ImageTask
from holdfast.train.label_task import LabelTask
from holdfast.train.recipe import AttackPart, DataPart, ModelPart, Recipe, SparsePart, TrainingPart
from holdfast.train.run_folder import WRITE_ERRORS, write_error
from holdfast.train.start import scaling_from
from holdfast.train.task import Task
from holdfast.train.task_record import MODEL, PLUGINS, TASK, TaskRecord, is_trained, read_record
from holdfast.train.text_task import TextTask
from holdfast.train.vision_language_task import VisionLanguageTask

BLOCK_LENGTH = 512  # tokens of a block, if the user gives no length and the model's longest sequence is not shorter


TASKS: dict[str, Callable[[Recipe, Path | None], Task]] = {
    "text": TextTask,
    "labels": LabelTask,
    "images": ImageTask,
    "domains": DomainTask,
    "vision-language": VisionLanguageTask,
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
        if recipe.task == "labels":
            return self._label_task(recipe, data)
        if recipe.task == "vision-language":
            return self._vision_language_task(recipe, data)
        classes, scaling, tested = self.classes, scaling_from(self.record.state), None
        recipe = replace(recipe, data=replace(part, shifts=[]))  # what a record names is not read
        if recipe.task == "domains":
            task: ImageTask = DomainTask(recipe, data, scaling=scaling)
        else:
            if is_folder(part.source) and not was_trained_on(part.source, self.record.state, self.recipe.data.source):
                tested = named_images(self.model, classes, part.source, index_for(part.source, class_index))
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

    def _vision_language_task(self, recipe: Recipe, data: Path | None) -> VisionLanguageTask:
        """Return the task of a vision-language model, on its own source or on one set of questions, LAYOUT=PATH."""
        part, tested = recipe.data, None
        if "=" in part.source:
            tested = tested_set(part.source, self.model.config.vision_config.image_size)
        recipe = replace(recipe, data=replace(part, tests=[]))  # what a record names is not read
        known, scaling = self.record.tokenizer(), scaling_from(self.record.state)
        return VisionLanguageTask(recipe, data, known=known, scaling=scaling, tested=tested, model=self.model)

    def _label_task(self, recipe: Recipe, data: Path | None) -> LabelTask:
        """Return the task of a classifier of texts, on its own source or on all rows of another one."""
        part, classes, stored = recipe.data, self.classes, self.record.state.get("checksum")
        if part.source in text_sets():  # it has columns of its own
            part = replace(part, text=None, pair=None, label=None)
        # Of the texts that the model was trained on, only the test split may be scored.
        was_trained_on = part.source == self.recipe.data.source
        if part.source not in text_sets() and stored is not None:
            try:
                was_trained_on = text_set(part.source, folder=data, classes=classes, **part.columns()).checksum == stored
            except ValueError:  # such as one that cannot be split
                was_trained_on = False
        how: dict[str, Any] = {"known": self.record.tokenizer(), "classes": classes, "test_only": not was_trained_on}
        return LabelTask(replace(recipe, data=part), data, **how)


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
    _require_model(Path(path))
    folder = read_record(Path(path)).home / MODEL if is_trained(Path(path)) else path
    return _checked(load(folder, **(loading or {})), None)


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
    _checked(model, None if is_image_classifier(model) else length)
    return model, _default_task(model, path, source, data, length, attack or AttackPart(), class_index)


def _require_model(folder: Path) -> None:
    """Raise ValueError if the folder only contains folders of models; the error names the first of them."""
    if not folder.is_dir() or (folder / "config.json").exists() or is_trained(folder):
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
    model: Any,
    path: str,
    source: str | None,
    data: Path | None,
    length: int | None,
    attack: AttackPart,
    class_index: Path | None,
) -> Task:
    """Return the task of a model that Holdfast has not trained: all rows of a file, all images of a folder, a named set."""
    config = model.config
    fixed: dict[str, Any] = {
        "about": f"{Path(path).name}, as it is",
        "attack": attack,
        "model": ModelPart(family=config.model_type),
        "sparse": SparsePart(experts=1, k=1),
        "training": TrainingPart(steps=1, batch=1, learning_rate=0.0),
    }
    if is_image_classifier(model):
        place, tested = source or "digits", None
        reading = image_reading(local_folder(path), config.model_type, image_size(model))
        if is_folder(place):
            tested = named_images(model, classes_of(model), place, index_for(place, class_index), reading.prepare)
        recipe = Recipe(**fixed, task="images", data=DataPart(source=place))
        return ImageTask(recipe, data, scaling=reading.scaling, tested=tested)
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
    if config.problem_type == "multi_label_classification":
        raise ValueError(f"{path} gives a text several labels; only classifiers with one label for each text are supported.")
    classes = classes_of(model) if config.num_labels > 1 else []
    task = LabelTask(Recipe(**fixed, task="labels", data=part), data, classes=classes, test_only=True)
    inner = config.get_text_config()
    if inner.pad_token_id is None:  # a model that reads from left to right finds the end of a text by it
        inner.pad_token_id = config.pad_token_id = task.encoder.pad
    return task


def is_image_classifier(model: Any) -> bool:
    return type(model).__name__.endswith("ForImageClassification")


def classes_of(model: Any) -> list[str]:
    """Return the names of a model's classes, in the order of its outputs."""
    return [str(model.config.id2label[number]) for number in range(model.config.num_labels)]


@final
class AuditData:
    """The test texts or image batches of a task, for audits and certificates. They can be iterated over several times."""

    def __init__(self, task: Task, tokens: int) -> None:
        self.task, self.tokens, self.tokenizer, self.source = task, tokens, task.audit_tokenizer, task.source.describe()

    def __iter__(self) -> Iterator[Any]:
        return self.task.audit_inputs(self.tokens)
