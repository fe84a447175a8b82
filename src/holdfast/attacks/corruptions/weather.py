"""Weather: snow, frost, fog, bright sun."""

import torch
from torch import Tensor

from holdfast.attacks.corruptions.filters import smear, zoom
from holdfast.attacks.corruptions.noise import Sources
from holdfast.attacks.seeds import draw

GREY = (0.299, 0.587, 0.114)  # what red, green and blue contribute to brightness
NO_FROST = (
    "frost needs photographs of frost, which are not ours to ship: frost1.png to frost6.jpg, in the folder "
    "ImageNet-C/create_c of the GitHub repository hendrycks/robustness. Load them as a tensor (photographs, channels, "
    "height, width) with values from 0 to 1, at least as large as the images, and pass it as frost=..."
)


def snow(
    images: Tensor,
    sources: Sources,
    mean: float,
    spread: float,
    size: float,
    least: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """Flakes are enlarged noise above `least`, driven by wind; the scene behind them whitens."""
    height, width = images.shape[-2:]
    noise = draw(lambda source: torch.randn((1, height, width), generator=source), sources, images)
    flakes = zoom(mean + spread * noise, size)
    flakes = flakes.masked_fill(flakes < least, 0.0).clamp(0, 1)
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 135, sources, images)
    flakes = smear(flakes, radius, sigma, angles)
    whitened = keep * images + (1 - keep) * torch.maximum(images, grey(images) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip((-2, -1))


def frost(images: Tensor, sources: Sources, keep: float, cover: float, photographs: Tensor | None) -> Tensor:
    """keep x + cover f, f a random part of a random photograph of frost."""
    if photographs is None:
        raise ValueError(NO_FROST)
    height, width = images.shape[-2:]
    if photographs.dim() != 4 or photographs.shape[-2] < height or photographs.shape[-1] < width:
        got = tuple(photographs.shape)
        raise ValueError(f"frost has shape {got}; expected (photographs, channels, at least {height}, at least {width}).")
    photographs = photographs.to(images)
    if photographs.shape[1] != images.shape[1]:
        photographs = grey(photographs)
    parts = []
    for source in sources:
        which, top, left = torch.rand(3, generator=source).tolist()
        photograph = photographs[int(which * photographs.shape[0])]
        top, left = int(top * (photograph.shape[-2] - height + 1)), int(left * (photograph.shape[-1] - width + 1))
        parts.append(photograph[:, top : top + height, left : left + width])
    return keep * images + cover * torch.stack(parts)


def fog(images: Tensor, sources: Sources, thickness: float, decay: float) -> Tensor:
    """(x + thickness plasma) max / (max + thickness), max the image's largest value: clouds added, brightness kept."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    clouds = plasma(max(images.shape[-2:]), decay, sources, images)[..., : images.shape[-2], : images.shape[-1]]
    return (images + thickness * clouds) * brightest / (brightest + thickness)


def plasma(least: int, decay: float, sources: Sources, like: Tensor) -> Tensor:
    """(B,1,S,S) between 0 and 1, S the next power of two: clouds by diamond-square midpoint displacement on a torus.

    Points halfway between known ones are their mean plus noise, whose amplitude falls by decay^2 from scale to scale.
    """
    size = 1 << max(least - 1, 1).bit_length()
    field = torch.zeros(len(sources), size, size, dtype=torch.float64)
    step, amplitude = size, 1.0
    while step >= 2:
        half, points = step // 2, size // step
        corners = field[:, ::step, ::step]
        sideways, downwards = corners.roll(-1, 2), corners.roll(-1, 1)
        middles = (corners + sideways + downwards + downwards.roll(-1, 2)) / 4 + amplitude * _noise(points, sources)
        field[:, half::step, half::step] = middles
        tops = (corners + sideways + middles + middles.roll(1, 1)) / 4 + amplitude * _noise(points, sources)
        lefts = (corners + downwards + middles + middles.roll(1, 2)) / 4 + amplitude * _noise(points, sources)
        field[:, ::step, half::step], field[:, half::step, ::step] = tops, lefts
        step, amplitude = half, amplitude / decay**2
    field = field - field.amin((1, 2), keepdim=True)
    return (field / field.amax((1, 2), keepdim=True)).unsqueeze(1).to(like)


def _noise(points: int, sources: Sources) -> Tensor:
    return torch.stack([torch.rand((points, points), generator=source, dtype=torch.float64) * 2 - 1 for source in sources])


def brightness(images: Tensor, sources: Sources, more: float) -> Tensor:
    """The V of HSV raised by `more`, hue and saturation kept: all channels are scaled by V' / V, and black becomes grey."""
    value = images.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, images * (raised / value.clamp_min(1e-8)), raised)


def grey(images: Tensor) -> Tensor:
    """(B,1,H,W)"""
    if images.shape[1] == 1:
        return images
    return (images * torch.tensor(GREY).to(images).view(1, 3, 1, 1)).sum(1, keepdim=True)
