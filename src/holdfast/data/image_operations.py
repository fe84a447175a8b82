"""RandAugment: random operations on an image, by Pillow.

Images are in colour or grey. What a geometric operation moves into an image from outside is grey (128).

`OPERATIONS` has the 15 operations and the strengths of the "increasing" set that Swin is trained with (timm's
`rand-m9-mstd0.5-inc1`): a larger magnitude, from 0 to 10, always changes an image more. Cubuk et al. 2020.

This module imports Pillow: import it where images are changed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from PIL import Image, ImageEnhance, ImageOps

from holdfast.data.draws import Draws

GREY = 128
LARGEST_MAGNITUDE = 10.0
MAGNITUDE_STD = 0.5  # as for Swin

Apply = Callable[[Image.Image, float], Image.Image]


@final
@dataclass(frozen=True)
class Operation:
    """One operation on images.

    apply      from an image and a strength to an image of the same size
    strength   from a magnitude, 0 to 10, to the strength
    signed     whether the opposite direction is as likely; then `apply` is called with -strength in half of the cases
    """

    apply: Apply
    strength: Callable[[float], float] = lambda magnitude: 0.0
    signed: bool = False


def _outside(image: Image.Image) -> dict[str, Any]:
    """Return the options of a geometric operation: how it interpolates, and the colour outside of the image."""
    return {"resample": Image.Resampling.BILINEAR, "fillcolor": (GREY,) * len(image.getbands())}


def _affine_entry(place: int, axis: int | None = None) -> Operation:
    """Return an operation that puts the strength into one place of the map that changes nothing.

    axis   of the size of the image that the strength is a share of; None: it is the entry itself
    """

    def apply(image: Image.Image, strength: float) -> Image.Image:
        entries = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        entries[place] = strength if axis is None else strength * image.size[axis]
        return image.transform(image.size, Image.Transform.AFFINE, entries, **_outside(image))

    return Operation(apply, _share_of(0.3 if axis is None else 0.45), signed=True)


def _of_values(change: Callable[[int, int], int]) -> Apply:
    """Return an operation that changes each value of 0 to 255 alone; `change` is from a value and the strength."""

    def apply(image: Image.Image, strength: float) -> Image.Image:
        return image.point([change(value, int(strength)) for value in range(256)] * len(image.getbands()))

    return apply


def _enhance(kind: Callable[[Image.Image], Any]) -> Operation:
    """Return an operation of `ImageEnhance` whose factor is 1 plus or minus up to 0.9, and at least 0.1."""
    return Operation(lambda image, change: kind(image).enhance(max(0.1, 1 + change)), _share_of(0.9), signed=True)


def _share_of(largest: float) -> Callable[[float], float]:
    return lambda magnitude: largest * magnitude / LARGEST_MAGNITUDE


OPERATIONS: dict[str, Operation] = {
    "autocontrast": Operation(lambda image, _: ImageOps.autocontrast(image)),
    "equalize": Operation(lambda image, _: ImageOps.equalize(image)),
    "invert": Operation(lambda image, _: ImageOps.invert(image)),
    "rotate": Operation(lambda image, degrees: image.rotate(degrees, **_outside(image)), _share_of(30.0), signed=True),
    "posterize": Operation(
        _of_values(lambda value, bits: value & (256 - 2 ** (8 - bits))),
        lambda magnitude: 4 - math.floor(_share_of(4.0)(magnitude)),
    ),
    "solarize": Operation(
        _of_values(lambda value, threshold: value if value < threshold else 255 - value),
        lambda magnitude: 256 - math.floor(_share_of(256.0)(magnitude)),
    ),
    "solarize_add": Operation(
        _of_values(lambda value, amount: min(255, value + amount) if value < 128 else value),
        lambda magnitude: math.floor(_share_of(110.0)(magnitude)),
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": _affine_entry(1),
    "shear_y": _affine_entry(3),
    "translate_x": _affine_entry(2, 0),
    "translate_y": _affine_entry(5, 1),
}


def randaugment(image: Image.Image, magnitude: float, count: int, draws: Draws) -> Image.Image:
    """Return the image under `count` random operations, each of which is applied or left out by chance."""
    names = list(OPERATIONS)
    for _ in range(count):
        operation, is_applied = OPERATIONS[names[draws.below(len(names))]], draws.uniform() < 0.5
        drawn = magnitude + MAGNITUDE_STD * draws.normal()
        strength = operation.strength(min(LARGEST_MAGNITUDE, max(0.0, drawn)))
        sign = -1.0 if draws.uniform() < 0.5 and operation.signed else 1.0
        if is_applied:
            image = operation.apply(image, sign * strength)
    return image
