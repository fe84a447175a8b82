"""The image processor of a checkpoint, which resizes, crops and scales images as the model was trained.

`written_processor` makes the one that is saved with a trained model, and `image_reading` uses that of any checkpoint:
transformers' own class does the work, in two steps, because attacks and corruptions change pixels between 0 and 1: `prepare`
resizes and crops an image file, and `scaling` is what follows. A processor that does something else is refused. Its file is
untrusted: entries that name code are dropped, and nothing else of the folder is read.
"""

import json
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from holdfast.data import PixelScaling
from holdfast.data.images import Prepare
from holdfast.files import read_json
from holdfast.hub.folder_files import PROCESSOR, check_files, without_code

KINDS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
BILINEAR = 2  # of Pillow, as in data/labelled_images.py
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
    mean, std, factor = _normalisation(processor)
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


def _normalisation(processor: Any) -> tuple[list[float], list[float], float]:
    """Return mean and standard deviation of each channel, and the factor that bytes are multiplied by before."""
    factor = float(getattr(processor, "rescale_factor", 1 / 255)) if getattr(processor, "do_rescale", True) else 1.0
    if not getattr(processor, "do_normalize", True):
        return [0.0], [1.0], factor
    return list(processor.image_mean), list(processor.image_std), factor


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
