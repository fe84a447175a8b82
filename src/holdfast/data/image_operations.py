"""The operations of RandAugment, on batches of images, each with a strength of its own for every image.

Images are (B,C,H,W) uint8, in colour (C = 3) or grey (C = 1). An operation is that of Pillow (`ImageOps`, `ImageEnhance`,
`Image.transform` with bilinear interpolation), to the bit for tables of values, and to one step of 255 where numbers are
interpolated. What a geometric operation moves into the image from outside is grey (128).

`OPERATIONS` has the 15 operations and the strengths of the "increasing" set that Swin is trained with (timm's
`rand-m9-mstd0.5-inc1`): a larger magnitude, from 0 to 10, always changes an image more. Cubuk et al. 2020.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

GREY = 128
LARGEST_MAGNITUDE = 10.0


@final
@dataclass(frozen=True)
class Operation:
    """One operation on images.

    apply      from (B,C,H,W) uint8 images and (B,) float64 strengths to images of the same shape
    strength   from a magnitude, 0 to 10, to the strength
    signed     whether the opposite direction is as likely; then `apply` is called with -strength in half of the cases
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    strength: Callable[[float], float] = lambda magnitude: 0.0
    signed: bool = False


def affine(images: Tensor, matrices: Tensor) -> Tensor:
    """Return, at pixel (x, y), the image at (a x + b y + c, d x + e y + f), with pixel centres at halves.

    matrices   (B,6) float64: a, b, c, d, e, f of each image
    """
    count, channels, height, width = images.shape
    x, y = torch.arange(width).double() + 0.5, torch.arange(height).double()[:, None] + 0.5
    a, b, c, d, e, f = (matrices[:, place, None, None] for place in range(6))
    there_x, there_y = a * x + b * y + c, d * x + e * y + f  # (B,H,W)
    inside = (there_x >= 0) & (there_x < width) & (there_y >= 0) & (there_y < height)
    left, upper = (there_x - 0.5).floor(), (there_y - 0.5).floor()
    share_x, share_y = there_x - 0.5 - left, there_y - 0.5 - upper
    flat = images.flatten(2).double()

    def at(row: Tensor, column: Tensor) -> Tensor:
        index = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        return flat.gather(2, index.flatten(1)[:, None].expand(-1, channels, -1)).view(count, channels, height, width)

    def row(number: Tensor) -> Tensor:
        first, second = at(number, left), at(number, left + 1)
        return first + (second - first) * share_x[:, None]

    first, second = row(upper), row(upper + 1)
    found = (first + (second - first) * share_y[:, None]).to(torch.uint8)
    return found.where(inside[:, None], torch.tensor(GREY, dtype=torch.uint8))


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turn images about their centre, against the clock."""
    height, width = images.shape[-2:]
    cos, sin = torch.cos(torch.deg2rad(-degrees)), torch.sin(torch.deg2rad(-degrees))
    x, y = width / 2, height / 2
    return affine(images, torch.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], 1))


def _affine_entry(place: int, side: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an operation that puts the strength into one place of the map that changes nothing.

    side   the side of the images that the strength is a share of; None: it is the entry itself
    """

    def apply(images: Tensor, strength: Tensor) -> Tensor:
        matrices = torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float64).repeat(len(strength), 1)
        matrices[:, place] = strength if side is None else strength * images.shape[side]
        return affine(images, matrices)

    return apply


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace every value by that of a table, (B,1,256) for an image or (B,C,256) for each of its channels."""
    count, channels = images.shape[:2]
    found = tables.expand(count, channels, 256).gather(2, images.flatten(2).long())
    return found.clamp(0, 255).to(torch.uint8).view_as(images)


def histograms(images: Tensor) -> Tensor:
    """Return (B,C,256) int64: how often each value occurs."""
    values = images.flatten(2).long()
    return torch.zeros(*values.shape[:2], 256, dtype=torch.int64).scatter_add_(2, values, torch.ones_like(values))


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Spread the values of each channel over 0 to 255."""
    low, high = (edge(images.flatten(2).long(), 2, keepdim=True).double() for edge in (torch.amin, torch.amax))
    values = torch.arange(256).double()
    scale = torch.full_like(low, 255.0) / (high - low)  # `255.0 / tensor` would multiply by a rounded reciprocal
    tables = (values * scale - low * scale).where(high > low, values)
    return look_up(images, tables.trunc().long())


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Make the values of each channel about equally frequent."""
    found = histograms(images)
    last = found.gather(2, images.flatten(2).amax(2, keepdim=True).long())  # how often the largest value occurs
    step = (found.sum(2, keepdim=True) - last) // 255
    before = found.cumsum(2) - found
    tables = (step // 2 + before) // step.clamp_min(1)
    return look_up(images, tables.where(step > 0, torch.arange(256)))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep this many of the highest bits of every value."""
    kept = (256 - 2 ** (8 - bits.long())).view(-1, 1, 1, 1)
    return (images.long() & kept).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values of at least `threshold`."""
    return (255 - images).where(images.double() >= threshold.view(-1, 1, 1, 1), images)


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Add to the values below 128."""
    added = (images.long() + amount.long().view(-1, 1, 1, 1)).clamp_max(255).to(torch.uint8)
    return added.where(images < 128, images)


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Return degenerate + factor (images - degenerate), as `Image.blend`: in float32, cut to whole numbers."""
    start = degenerate.float()
    mixed = start + factor.float().view(-1, 1, 1, 1) * (images.float() - start)
    return mixed.clamp(0, 255).to(torch.uint8)


def lightness(images: Tensor) -> Tensor:
    """Return (B,1,H,W): the images in grey, by Pillow's weights of red, green and blue."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)
    return (((images.long() * weights).sum(1, keepdim=True) + 0x8000) >> 16).to(torch.uint8)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    grey = lightness(images).long()
    mean = (grey.sum((1, 2, 3), keepdim=True).double() / grey[0].numel() + 0.5).floor()
    return blend(mean, images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: 5/13 of a pixel and 1/13 of each neighbour; the outermost pixels stay."""
    smooth = images.clone()
    if min(images.shape[-2:]) > 2:
        values = images.long()
        total = 4 * values[..., 1:-1, 1:-1]
        for row in range(3):
            for column in range(3):
                total = total + values[..., row : values.shape[2] - 2 + row, column : values.shape[3] - 2 + column]
        smooth[..., 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)
    return blend(smooth, images, factor)


def _share_of(largest: float) -> Callable[[float], float]:
    return lambda magnitude: largest * magnitude / LARGEST_MAGNITUDE


def _factor(operation: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """Return an operation of `ImageEnhance` whose factor is 1 plus or minus up to 0.9, and at least 0.1."""

    def apply(images: Tensor, change: Tensor) -> Tensor:
        return operation(images, (1 + change).clamp_min(0.1))

    return Operation(apply, _share_of(0.9), signed=True)


OPERATIONS: dict[str, Operation] = {
    "autocontrast": Operation(autocontrast),
    "equalize": Operation(equalize),
    "invert": Operation(lambda images, _: 255 - images),
    "rotate": Operation(rotate, _share_of(30.0), signed=True),
    "posterize": Operation(posterize, lambda magnitude: 4 - math.floor(_share_of(4.0)(magnitude))),
    "solarize": Operation(solarize, lambda magnitude: 256 - math.floor(_share_of(256.0)(magnitude))),
    "solarize_add": Operation(solarize_add, lambda magnitude: math.floor(_share_of(110.0)(magnitude))),
    "color": _factor(lambda images, factor: blend(lightness(images), images, factor)),
    "contrast": _factor(contrast),
    "brightness": _factor(lambda images, factor: blend(torch.zeros_like(images), images, factor)),
    "sharpness": _factor(sharpness),
    "shear_x": Operation(_affine_entry(1), _share_of(0.3), signed=True),
    "shear_y": Operation(_affine_entry(3), _share_of(0.3), signed=True),
    "translate_x": Operation(_affine_entry(2, -1), _share_of(0.45), signed=True),
    "translate_y": Operation(_affine_entry(5, -2), _share_of(0.45), signed=True),
}
