"""Blurs: out of focus, through frosted glass, in motion, while zooming."""

from random import Random

import torch
from torch import Tensor

from holdfast.attacks.corruptions.filters import blur, convolve, disc, smear, zoom
from holdfast.attacks.corruptions.noise import Sources
from holdfast.attacks.seeds import draw


def defocus_blur(images: Tensor, sources: Sources, radius: float, smooth: float) -> Tensor:
    """A disc for each point."""
    return convolve(images, disc(radius, smooth))


def glass_blur(images: Tensor, sources: Sources, sigma: float, reach: int, rounds: int) -> Tensor:
    """Blur, swap each pixel with one at most `reach` away, `rounds` times over, blur again.

    The published code means to swap and copies instead, because two views of one array cannot be exchanged that way;
    this swaps.
    """
    height, width = images.shape[-2:]
    orders = torch.stack([torch.tensor(_shuffled(height, width, reach, rounds, source)) for source in sources])
    shuffled = blur(images, sigma).flatten(2)
    shuffled = shuffled.gather(2, orders.to(images.device).unsqueeze(1).expand_as(shuffled))
    return blur(shuffled.view_as(images), sigma)


def _shuffled(height: int, width: int, reach: int, rounds: int, source: torch.Generator) -> list[int]:
    """Which pixel ends up where, as positions in a flat image. One swap after the other: a pixel can travel far."""
    random = Random(int(torch.randint(2**62, (), generator=source))).random
    order = list(range(height * width))
    choices = 2 * reach + 1
    for _ in range(rounds):
        for row in range(height - reach - 1, reach - 1, -1):
            for column in range(width - reach - 1, reach - 1, -1):
                here = row * width + column
                there = here + (int(random() * choices) - reach) * width + int(random() * choices) - reach
                order[here], order[there] = order[there], order[here]
    return order


def motion_blur(images: Tensor, sources: Sources, radius: float, sigma: float) -> Tensor:
    """A trail in a direction between -45 and 45 degrees."""
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 45, sources, images)
    return smear(images, radius, sigma, angles)


def zoom_blur(images: Tensor, sources: Sources, most: float, step: float) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1 + step, ... up to `most`."""
    factors = [1 + step * number for number in range(round((most - 1) / step) + 1)]
    return (images + sum(zoom(images, factor) for factor in factors)) / (len(factors) + 1)
