"""A saved image classifier with the shifted test sets that a user has named: `holdfast evaluate MODEL --shift FOLDER`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from holdfast.data.shifted_images import ShiftedFolder
from holdfast.hub.checkpoint import local_folder
from holdfast.train.image_attacks import Classifier
from holdfast.train.image_reading import ImageReading, image_reading, image_size, index_for
from holdfast.train.image_task import ImageTask
from holdfast.train.saved_model import TrainedModel, classes_of, is_image_classifier, load_model, load_model_and_task
from holdfast.train.shifted_tests import ShiftedTests, recognise_all, require_no_clean_images
from holdfast.train.start import scaling_from
from holdfast.train.task import evenly_spaced
from holdfast.train.task_record import is_trained, read_record

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
        return self.tests.score(Classifier(self.model, self.reading.scaling), self.model.device, with_clean=True)


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
    no_clean = None  # why the model's own test images are not known
    if source is None and record is None:
        no_clean = "its own test images are not known; add --source with a folder of them to score these too."
    elif source is None and record is not None:
        try:
            record.source(None, data)
        except ValueError as problem:
            no_clean = str(problem)
    index, task = index_for(source, class_index), None
    if no_clean is None:
        model, task = load_model_and_task(path, source=source, data=data, class_index=class_index, loading=loading)
    else:
        require_no_clean_images(found)
        model = load_model(path, loading)
    if not is_image_classifier(model) or not (task is None or isinstance(task, ImageTask)):
        raise ValueError(f"{path} is a {type(model).__name__}; --shift is for models that classify images.")
    if record is not None:
        classes, reading = TrainedModel(model, record).classes, ImageReading(scaling_from(record.state))
    else:
        classes = classes_of(model)
        reading = image_reading(local_folder(path), model.config.model_type, image_size(model))
    shape, how = (model.config.num_channels, image_size(model), image_size(model)), dict[str, Any]()
    if task is not None:
        images = copy.copy(task.image_set.images("test"))
        if task.image_set.outputs is not None:
            images.labels = torch.tensor(task.image_set.outputs)[images.labels]
        shape, how["clean"], how["made"] = images.shape, images, evenly_spaced(len(images), EXAMPLES)
    how |= {"prepare": reading.prepare, "index": index}
    return ShiftEvaluation(model, reading, found, ShiftedTests(found, classes, shape, **how), no_clean)
