"""A model to be tried, from wherever it is: one that was trained here, or any Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.hub import load
from holdfast.hub.usable import longest_sequence, require_finite, require_room
from holdfast.train.picture_task import PictureTask
from holdfast.train.recipe import AttackPart, DataPart, ModelPart, Recipe, SparsePart, TrainingPart
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask
from holdfast.train.trained import MODEL, Trained, is_trained, read_record

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
