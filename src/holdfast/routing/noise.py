"""Noise on the logits before selection, in training only, for every selector.

    GaussianNoise   logits + std z, z standard normal (Shazeer et al. 2017)
    UniformNoise    logits + std z, z uniform with variance 1
    GumbelNoise     (logits + g) / temperature, g Gumbel

It is drawn after the informers: an expert graph counts selections without noise. It comes from torch's own generator, which
activation checkpointing restores, so a recomputation draws the same noise. Evaluation draws none, but a temperature divides
the logits there, too: the router divides what the score returns, before gates and informers, in both modes.
"""

import math
from abc import abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing.parts import TINY, Noise

KINDS = ("gaussian", "uniform", "gumbel")
UNIFORM_WIDTH = math.sqrt(3.0)  # a uniform variable on [-w, w] has variance w^2 / 3


class ScaledNoise(Noise):
    """logits + z * std, with z of mean 0 and variance 1 (abstract).

    `std=None` learns a standard deviation for each token and expert, softplus(x W_noise^T).
    """

    def __init__(self, dim: int, experts: int, *, std: float | None = None) -> None:
        super().__init__()
        if std is not None and not 0 <= std < math.inf:
            raise ValueError(f"noise_std is {std}; a standard deviation must be finite and not negative.")
        self.std = std
        self.weight = nn.Parameter(torch.zeros(experts, dim)) if std is None else None

    @abstractmethod
    def draw(self, logits: Tensor) -> Tensor:
        """Return z, of the shape of `logits`."""

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        if self.weight is not None:
            return logits + self.draw(logits) * F.softplus(linear_float32(tokens, self.weight))
        assert self.std is not None
        return logits + self.draw(logits) * self.std


class GaussianNoise(ScaledNoise):
    """logits + z * std with z standard normal (Shazeer et al. 2017)."""

    def draw(self, logits: Tensor) -> Tensor:
        return torch.randn_like(logits)


class UniformNoise(ScaledNoise):
    """logits + z * std with z uniform on [-sqrt 3, sqrt 3], which has variance 1 (survey, section 3.1)."""

    def draw(self, logits: Tensor) -> Tensor:
        return (2 * torch.rand_like(logits) - 1) * UNIFORM_WIDTH


class GumbelNoise(Noise):
    """(logits + g) / temperature with Gumbel noise g: the top k are a sample without replacement from softmax(logits).

    The router has divided the logits already, so g / temperature is added.
    """

    def __init__(self, *, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"noise_temperature is {temperature}; it divides the logits and must be positive.")
        self.temperature = temperature

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        exponential = torch.empty_like(logits).exponential_().clamp_min(TINY)
        return logits - exponential.log() / self.temperature


def create_noise(
    dim: int,
    experts: int,
    *,
    noise: Literal["gaussian", "uniform", "gumbel"] | None = None,
    noise_std: float | None = None,
    noise_temperature: float = 1.0,
) -> Noise | None:
    """Return the noise that the options of a router describe; None for `noise=None`.

    noise               "gaussian", "uniform" or "gumbel"
    noise_std           the standard deviation of Gaussian or uniform noise; None learns it
    noise_temperature   divides logits with Gumbel noise, in evaluation too: softmax(z / temperature)
    """
    if noise is not None:
        require_known("noise", noise, KINDS)
    if noise not in ("gaussian", "uniform") and noise_std is not None:
        raise ValueError(f"noise_std is {noise_std}, but the noise is {noise}; add noise='gaussian' or noise='uniform'.")
    if noise != "gumbel" and noise_temperature != 1.0:
        raise ValueError(f"noise_temperature is {noise_temperature}, but the noise is {noise}; add noise='gumbel'.")
    if noise is None:
        return None
    if noise == "gumbel":
        return GumbelNoise(temperature=noise_temperature)
    kind = GaussianNoise if noise == "gaussian" else UniformNoise
    return kind(dim, experts, std=noise_std)
