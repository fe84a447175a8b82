"""Noise: of electronics, of too little light, of broken pixels."""

import torch
from torch import Tensor

from holdfast.attacks.seeds import draw

Sources = list[torch.Generator]  # one for each image


def gaussian_noise(images: Tensor, sources: Sources, scale: float) -> Tensor:
    """x + scale n, n normal."""
    return images + scale * draw(lambda source: torch.randn(images.shape[1:], generator=source), sources, images)


def shot_noise(images: Tensor, sources: Sources, photons: float) -> Tensor:
    """Poisson(photons x) / photons: light comes in grains."""
    means = (images.float() * photons).cpu()
    counts = [torch.poisson(mean, generator=source) for mean, source in zip(means, sources, strict=True)]
    return torch.stack(counts).to(images) / photons


def impulse_noise(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Each value is 0 or 1, with probability share / 2 each."""
    chance = draw(lambda source: torch.rand(images.shape[1:], generator=source), sources, images)
    salted = images.masked_fill(chance < share / 2, 1.0)
    return salted.masked_fill(chance > 1 - share / 2, 0.0)
