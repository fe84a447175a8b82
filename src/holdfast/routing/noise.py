"""Noise on logits, in training only: it makes experts that are nearly chosen be tried."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing.parts import TINY


class GaussianNoise(nn.Module):
    """logits + z * std, z standard normal. `std=None` learns it per token, softplus(x W_noise^T) (Shazeer et al. 2017)."""

    def __init__(self, dim: int, experts: int, *, std: float | None = None) -> None:
        super().__init__()
        if std is not None and not std >= 0:
            raise ValueError(f"noise_std is {std}; a standard deviation cannot be negative.")
        self.std = std
        self.weight = nn.Parameter(torch.zeros(experts, dim)) if std is None else None

    @property
    def flops(self) -> float:
        """Of the matrix product for one token."""
        return 0.0 if self.weight is None else 2.0 * self.weight.numel()

    def scale(self, tokens: Tensor) -> Tensor | float:
        if self.weight is not None:
            return F.softplus(linear_float32(tokens, self.weight))
        assert self.std is not None
        return self.std

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return logits + torch.randn_like(logits) * self.scale(tokens)


class GumbelNoise(nn.Module):
    """(logits + Gumbel) / temperature: the top k are then a sample without replacement from softmax(logits)."""

    def __init__(self, *, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it divides the logits and must be positive.")
        self.temperature = temperature

    @property
    def flops(self) -> float:
        """No matrix product is taken."""
        return 0.0

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        exponential = torch.empty_like(logits).exponential_().clamp_min(TINY)
        return (logits - exponential.log()) / self.temperature
