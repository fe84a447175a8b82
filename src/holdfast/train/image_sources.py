"""The test images that a trained image classifier is evaluated on, when the user names a folder of them.

All images of a folder without splits are test images, unless the model was trained on this folder: then only those that its
training left out are.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.data.datasets import find_dataset
from holdfast.data.images import Prepare
from holdfast.data.labelled_images import SIZE, folder_set
from holdfast.data.shifted_images import (
    ClassIndex,
    UnsplitImages,
    published_set,
    read_class_index,
    recognise,
    unsplit_images,
)


def image_size(model: Any) -> int:
    """Return the pixels per side of the square images that a model reads."""
    size = getattr(model.config, "image_size", None)
    if isinstance(size, list | tuple) and len(set(size)) == 1:
        size = size[0]
    return size if isinstance(size, int) else SIZE


def is_folder(source: str) -> bool:
    """Return whether a source of images is a folder, and not the name of a dataset."""
    is_name = os.sep not in source and find_dataset(source, "images") is not None
    return not is_name and Path(source).is_dir()


def index_for(source: str | None, given: Path | None) -> ClassIndex | None:
    """Return the class index that the user has given; else the class folders of `source` if they are those of ImageNet."""
    if given is not None:
        return read_class_index(given)
    if source is None or not is_folder(source):
        return None
    try:
        classes = recognise(f"classes={source}").classes
    except ValueError:  # reported where the images are read
        return None
    return ClassIndex(source, tuple(classes)) if published_set(classes) == "ImageNet" else None


def was_trained_on(source: str, state: Mapping[str, Any], trained_on: str) -> bool:
    """Return whether a folder has the images that a model was trained on; `state` is what its record says of its task."""
    stored = state.get("checksum")
    if stored is None:
        return os.path.realpath(source) == os.path.realpath(trained_on)
    try:
        return folder_set(Path(source)).checksum == stored
    except ValueError:  # such as one that cannot be split
        return False


def named_images(
    model: Any, classes: list[str], source: str, index: ClassIndex | None = None, prepare: Prepare | None = None
) -> UnsplitImages:
    """Return the images of a folder as test images for a model with these classes."""
    if (channels := getattr(model.config, "num_channels", 3)) != 3:
        raise ValueError(f"{source} has colour images, and the model reads images with {channels} channels.")
    return unsplit_images(Path(source), classes, size=image_size(model), prepare=prepare, index=index)
