"""Mixing weights as a whole matrix: the specification of the fast versions."""

import torch
from torch import Tensor


def mixing_weights(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # broadcasts to (G,N,M): bool, or added
    second: tuple[Tensor, Tensor, float] | None = None,  # another product, and what it is multiplied with
    bias: Tensor | None = None,  # (G,M)
) -> Tensor:
    """Return (G,N,M): the softmax over the keys that each query may attend to; 0 for a query without any."""
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
    return torch.softmax(scores.masked_fill(~allowed, -1e30), -1) * allowed.any(-1, keepdim=True)
