"""How a classifier reads images: its image processor, the size of the images, and folders of test images.

**The image processor** of a checkpoint resizes, crops and scales images as the model was trained. `written_processor` makes
the one that is saved with a trained model, and `image_reading` uses that of any checkpoint: transformers' own class does the
work, in two steps, because attacks and corruptions change pixels between 0 and 1: `prepare` resizes and crops an image file,
and `scaling` is what follows. A processor that does something else is refused. Its file is untrusted: entries that name code
are dropped, and nothing else of the folder is read.

**The size** of images is checked before the first step. A transformer over all patches of an image takes time with the
square of their number, and a folder of small images is scaled up without need if nothing is said: 40 pixels as 224 are
12,544 patches of 2, and minutes a step.

**Test images** of a folder that the user names: all images of a folder without splits, unless the model was trained on this
folder. Then only those that its training left out are.
"""

import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from holdfast.data import ImageSet, PixelScaling
from holdfast.data.datasets import find_dataset
from holdfast.data.images import Images, Prepare
from holdfast.data.labelled_images import SIZE, folder_set
from holdfast.data.shifted_images import (
    ClassIndex,
    published_set,
    read_class_index,
    recognise,
    unsplit_images,
)
from holdfast.files import read_json
from holdfast.hub.folder_files import PROCESSOR, check_files, without_code

KINDS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
BILINEAR = 2  # of Pillow, as in data/images.py
LARGEST = 2**13  # pixels per side
TOLERANCE = 1e-4  # of scaled values, which are between about -3 and 3


@final
@dataclass(frozen=True)
class ImageReading:
    """How a checkpoint reads images: `prepare` an image file, then apply `scaling` to pixels between 0 and 1."""

    scaling: PixelScaling = field(default_factory=PixelScaling)
    prepare: Prepare | None = None  # None: the shorter side is scaled, and the central square is used


def image_reading(folder: Path, model_type: str, size: int) -> ImageReading:
    """Return how the image processor of a checkpoint's folder reads images; the default if the folder has no processor.

    Raise ValueError if it does not make square images of `size` pixels, or if it is not a processor of this kind.
    """
    file = folder / PROCESSOR
    if not file.exists():
        return ImageReading()
    check_files(folder)
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not describe an image processor.")
    processor = _processor(without_code(values), model_type, file)
    factor = float(getattr(processor, "rescale_factor", 1 / 255)) if getattr(processor, "do_rescale", True) else 1.0
    is_normalised = getattr(processor, "do_normalize", True)
    mean, std = (processor.image_mean, processor.image_std) if is_normalised else ([0.0], [1.0])
    try:
        scaling = PixelScaling.from_lists([one / (255 * factor) for one in mean], [one / (255 * factor) for one in std])
    except (TypeError, ValueError, ZeroDivisionError) as problem:
        raise ValueError(f"{file} cannot be used: {problem}") from None

    def prepare(image: Any) -> Any:
        made = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        return np.ascontiguousarray(np.asarray(made).transpose(1, 2, 0)).astype(np.uint8)

    _check(processor, prepare, scaling, size, file)
    return ImageReading(scaling, prepare)


def written_processor(scaling: PixelScaling, shape: tuple[int, int, int]) -> Any:
    """Return transformers' image processor that reads images as training did: (channels, size, size) pixels, scaled."""
    from transformers import CLIPImageProcessorPil

    channels, size, _ = shape
    return CLIPImageProcessorPil(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        resample=BILINEAR,
        image_mean=list(scaling.mean) * (channels // len(scaling.mean)),
        image_std=list(scaling.std) * (channels // len(scaling.std)),
        do_convert_rgb=channels == 3,
    )


def _processor(values: dict[str, Any], model_type: str, file: Path) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as KNOWN

    for name in ("size", "crop_size"):
        sides = values.get(name)
        given = list(sides.values()) if isinstance(sides, dict) else [sides]
        if not all(side is None or (type(side) is int and 0 < side <= LARGEST) for side in given):
            raise ValueError(f"{file}: {name} is {sides}; images have between 1 and {LARGEST:,} pixels per side.")
    if "image_processor_type" not in values and "feature_extractor_type" not in values:
        usual = KNOWN.get(model_type)
        values["image_processor_type"] = usual.get("torchvision") if isinstance(usual, dict) else None
    kind = values.get("image_processor_type") or values.get("feature_extractor_type")
    if not isinstance(kind, str) or not kind.endswith(KINDS):
        raise ValueError(f"{file} does not name an image processor of transformers.")
    logger = logging.getLogger("transformers")
    level = logger.level
    with tempfile.TemporaryDirectory() as place:
        Path(place, PROCESSOR).write_text(json.dumps(values), encoding="utf-8")
        logger.setLevel(logging.ERROR)  # it warns that torchvision is missing
        try:
            return AutoImageProcessor.from_pretrained(place, trust_remote_code=False)
        except (AttributeError, ImportError, OSError, TypeError, ValueError):
            raise ValueError(f"{file}: transformers has no image processor {kind!r} that can be used here.") from None
        finally:
            logger.setLevel(level)


def _check(processor: Any, prepare: Prepare, scaling: PixelScaling, size: int, file: Path) -> None:
    """Raise ValueError unless `scaling` after `prepare` is what the processor does, tried on one image."""
    import torch
    from PIL import Image

    channels = 1 if len(scaling.mean) == 1 and getattr(processor, "do_convert_rgb", None) is False else 3
    values = np.random.default_rng(0).integers(0, 256, (size + 3, size + 10, channels), dtype=np.uint8)
    image = Image.fromarray(values.squeeze(-1) if channels == 1 else values)
    try:
        whole = np.asarray(processor(image, return_tensors="np")["pixel_values"][0], dtype=np.float64)
        made = prepare(image)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{file} cannot be used: {' '.join(str(problem).split())}.") from None
    if made.shape != (size, size, channels):
        shape = " x ".join(map(str, made.shape))
        raise ValueError(f"{file} makes images of {shape}, and the model reads images of {size} x {size} x {channels}.")
    scaled = scaling(torch.from_numpy(made).permute(2, 0, 1)[None].float() / 255)[0].double().numpy()
    if whole.shape != scaled.shape or not np.allclose(whole, scaled, atol=TOLERANCE * max(1.0, float(abs(whole).max()))):
        raise ValueError(f"{file} does more than resize, crop and scale by a mean and a standard deviation.")


# The size of images

MOST_PATCHES = 4096  # of an image, if attention is over all patches
SAMPLED = 8  # images whose size on disk is read
LARGE_SCALE = 2  # images that are scaled up at least so much are warned about


def patch_count(config: Any) -> int | None:
    """Return how many patches an image has, in the first layer if later ones merge them; None if it has no patches."""
    pixels, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    return (pixels // patch) ** 2 if isinstance(pixels, int) and isinstance(patch, int) and patch > 0 else None


def has_windows(config: Any) -> bool:
    """Return whether attention is within windows, as in Swin, so that time grows only with the number of patches."""
    return hasattr(config, "window_size")


def side_on_disk(images: Images) -> int | None:
    """Return the usual shorter side of images in files, in pixels; None for other images, which are not scaled."""
    wanted = min(SAMPLED, len(images))
    sides = images.sides([place * len(images) // wanted for place in range(wanted)])
    return None if sides is None else sorted(sides)[len(sides) // 2]


def require_patches(config: Any, images: Images, *, is_new: bool) -> None:
    """Raise ValueError if the images do not fit the patches of a model, or would take hours.

    is_new   whether the model is new; a checkpoint decides on its own sizes
    """
    patch, pixels, count = getattr(config, "patch_size", None), images.shape[1], patch_count(config)
    if count is None or not isinstance(patch, int):
        return
    can_be_scaled = images.sides([]) is not None
    if is_new and pixels < patch:
        raise ValueError(
            f"images of {pixels} pixels per side are smaller than a patch of {patch}; set model.config.patch_size to less"
            f"{' or data.size to more' if can_be_scaled else ''}."
        )
    if is_new and pixels % patch and not has_windows(config):
        divisors = ", ".join(str(size) for size in range(1, pixels + 1) if pixels % size == 0)
        raise ValueError(
            f"images of {pixels} pixels per side cannot be divided into patches of {patch}, so their edge would be ignored; "
            f"set model.config.patch_size to one of {divisors}"
            f"{f', or data.size to a multiple of {patch}' if can_be_scaled else ''}."
        )
    if is_new and config.model_type == "swin":
        across = -(-pixels // patch)
        for stage in range(len(config.depths)):
            if across < config.window_size:  # transformers' model cannot run
                raise ValueError(
                    f"stage {stage + 1} of this Swin has {across} x {across} patches for images of {pixels} pixels per "
                    f"side, fewer than its window of {config.window_size}; set model.config.window_size to {across}, or "
                    "model.config.patch_size to less, or data.size to more."
                )
            across = -(-across // 2)  # a stage merges 2 x 2 patches
    if count > MOST_PATCHES and not has_windows(config):
        side, most = side_on_disk(images), patch * math.isqrt(MOST_PATCHES)
        found = f"; these images have about {side} pixels per side" if side is not None else ""
        smaller = min(most, side // patch * patch) if side is not None and side >= patch else most
        raise ValueError(
            f"images of {pixels} pixels per side have {count:,} patches of {patch}, more than {MOST_PATCHES:,}{found}: "
            f"set data.size to {smaller}, or model.config.patch_size to more."
        )


def size_line(config: Any) -> str | None:
    """Return what a model makes of an image, in one line; None if it has no patches."""
    count = patch_count(config)
    if count is None:
        return None
    stages = " in the first stage" if has_windows(config) else ""
    return f"{count:,} patches per image{stages}: {config.image_size} pixels per side, {config.patch_size} per patch"


def scale_warning(config: Any, images: Images) -> str | None:
    """Return a warning if images are scaled up a lot, with the number of patches without it; None if they are not."""
    side, count = side_on_disk(images), patch_count(config)
    if side is None or count is None or images.shape[1] < LARGE_SCALE * side:
        return None
    patch = config.patch_size
    fitting = max(1, side // patch)
    return (
        f"the images have about {side} pixels per side and are scaled up to {images.shape[1]}, which shows no more "
        f"detail and makes training slow: an image has {count:,} patches; with --set data.size={fitting * patch}, it would "
        f"have {fitting**2:,}."
    )


# Folders of test images


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
    if source is not None and is_folder(source):
        with suppress(ValueError):  # reported where the images are read
            classes = recognise(f"classes={source}").classes
            return ClassIndex(source, tuple(classes)) if published_set(classes) == "ImageNet" else None
    return None


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
) -> ImageSet:
    """Return the images of a folder as test images for a model with these classes."""
    if (channels := getattr(model.config, "num_channels", 3)) != 3:
        raise ValueError(f"{source} has colour images, and the model reads images with {channels} channels.")
    return unsplit_images(Path(source), classes, image_size(model), prepare, index)
