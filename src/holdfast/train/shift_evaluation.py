"""A saved image classifier with the shifted test sets that a user has named: `holdfast evaluate MODEL --shift FOLDER`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from holdfast.data.shifted_images import ShiftedFolder
from holdfast.hub import load
from holdfast.hub.checkpoint import local_folder
from holdfast.hub.tracing import require_finite
from holdfast.train.image_attacks import classifier
from holdfast.train.image_reading import ImageReading, image_reading, image_size, index_for
from holdfast.train.image_task import ImageTask, evenly_spaced
from holdfast.train.saved_model import TrainedModel, classes_of, is_image_classifier, load_model_and_task
from holdfast.train.shifted_tests import CleanImages, ShiftedTests, recognise_all, require_no_clean_images
from holdfast.train.start import scaling_from
from holdfast.train.task_record import MODEL, TaskRecord, is_trained, read_record

EXAMPLES = 512  # test images that corruptions are applied to


@final
@dataclass(frozen=True)
class ShiftEvaluation:
    """A model, and what it is scored on."""

    model: Any
    reading: ImageReading
    found: list[ShiftedFolder | None]
    tests: ShiftedTests
    no_clean: str | None  # why the model's own test images are not scored too

    def inputs_to_score(self) -> int:
        return self.tests.inputs_to_score(with_clean=True)

    def score(self) -> dict[str, dict[str, Any]]:
        """Return the results by the names of the tests; the model's own test images are "clean"."""
        return self.tests.score(classifier(self.model, self.reading.scaling), self.model.device, with_clean=True)


def load_with_shifts(
    path: str,
    written: Sequence[str],
    *,
    source: str | None = None,
    data: Path | None = None,
    class_index: Path | None = None,
    loading: Mapping[str, Any] | None = None,
) -> ShiftEvaluation:
    """Return a saved image classifier, in evaluation mode, with shifted test sets; check these before loading weights.

    written         folders, and "corruptions"; see `shifted_tests`
    source, data    the model's own test images, if they may not be read without being named
    class_index     for folders that are named by WordNet id: see `data.shifted_images`
    """
    found = recognise_all(written)
    record = read_record(Path(path)) if is_trained(Path(path)) else None
    if record is not None and record.recipe.task not in ("images", "domains"):
        raise ValueError(f"{path} is trained for the task {record.recipe.task}; --shift is for models that classify images.")
    no_clean = _why_no_clean_images(record, source, data)
    if no_clean is not None:
        require_no_clean_images(found)
    index = index_for(source, class_index)
    options: dict[str, Any] = {"source": source, "data": data, "class_index": class_index, "loading": loading}
    task = None
    if no_clean is None:
        model, task = load_model_and_task(path, **options)
    else:
        model = load(path if record is None else record.home / MODEL, **dict(loading or {}))
        require_finite(model)
        model.eval()
    if not is_image_classifier(model) or not (task is None or isinstance(task, ImageTask)):
        raise ValueError(f"{path} is a {type(model).__name__}; --shift is for models that classify images.")
    if record is not None:
        classes, reading = TrainedModel(model, record).classes, ImageReading(scaling_from(record.state))
    else:
        classes = classes_of(model)
        reading = image_reading(local_folder(path), model.config.model_type, image_size(model))
    clean = None if task is None else _clean_images(task)
    made = [] if clean is None else evenly_spaced(len(clean.images), EXAMPLES)
    shape = clean.images.shape if clean is not None else (model.config.num_channels, image_size(model), image_size(model))
    how: dict[str, Any] = {"clean": clean, "prepare": reading.prepare, "index": index, "made": made}
    return ShiftEvaluation(model, reading, found, ShiftedTests(found, classes, shape, **how), no_clean)


def _why_no_clean_images(record: TaskRecord | None, source: str | None, data: Path | None) -> str | None:
    """Return why the model's own test images are not known, or None if they are."""
    if source is not None:
        return None
    if record is None:
        return "its own test images are not known; add --source with a folder of them to score these too."
    try:
        record.source(None, data)
    except ValueError as problem:
        return str(problem)
    return None


def _clean_images(task: ImageTask) -> CleanImages:
    images = task.image_set.images("test")
    outputs = images.labels if task.outputs is None else torch.tensor(task.outputs)[images.labels]
    return CleanImages(images, outputs)
