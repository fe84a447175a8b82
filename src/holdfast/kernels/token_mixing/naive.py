"""Mixing weights as a whole matrix: the specification of the fast versions."""

from typing import Any

import torch
from torch import Tensor


def mixing_weights(*arguments: Any, **options: Any) -> Tensor:
    """Return (G,N,M): the softmax over the keys that each query may attend to; 0 for a query without any."""
    scores, allowed = scores_and_allowed(*arguments, **options)
    return torch.softmax(scores.masked_fill(~allowed, -1e30), -1) * allowed.any(-1, keepdim=True)


def log_totals(*arguments: Any, **options: Any) -> Tensor:
    """Return (G,N): the logarithm of each query's sum of exp(score); -inf for a query without keys."""
    scores, allowed = scores_and_allowed(*arguments, **options)
    return scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)


def scores_and_allowed(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # broadcasts to (G,N,M): bool, or added
    second: tuple[Tensor, Tensor, float] | None = None,  # another product, and what it is multiplied with
    bias: Tensor | None = None,  # (G,M)
    levels: tuple[Tensor, Tensor] | None = None,  # (G,N) and (G,M)
) -> tuple[Tensor, Tensor]:
    """Return (G,N,M) twice: the scores, and which keys each query may attend to."""
    scores = scale * query @ key.transpose(1, 2)
    if second is not None:
        scores = scores + second[2] * second[0] @ second[1].transpose(1, 2)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        position = torch.arange(query.shape[1]) + key.shape[1] - query.shape[1]
        allowed = allowed & (torch.arange(key.shape[1]) <= position.unsqueeze(1))
    if real is not None:
        allowed = allowed & real.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    if levels is not None:
        allowed = allowed & (levels[1].unsqueeze(1) <= levels[0].unsqueeze(2))
    return scores, allowed
