"""Clusters of tokens by a 0/1 matrix of memberships: the specification of the kernels, and what runs without them.

T tokens, C clusters, d width
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.fp32_linear import matmul_float32


def members(clusters_of: Tensor, clusters: int) -> Tensor:
    """Return (T,C) 0/1: the cluster of each token; a row of 0 for a token without one."""
    return (clusters_of.unsqueeze(1) == torch.arange(clusters, device=clusters_of.device)).float()


@torch.no_grad()
def deviations(
    tokens: Tensor,
    real: Tensor | None,
    members: Tensor,
    *,
    squared: bool,
    over_ranks: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return (C,d), sums over each cluster's real `tokens (T,d)` of |x - mean| or its square, and their numbers (C,)."""
    over_ranks = over_ranks or (lambda value: value)
    real = torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device) if real is None else real
    inputs = tokens.float().where(real.unsqueeze(1), 0.0)
    members = members * real.unsqueeze(1)
    counts = over_ranks(members.sum(0))
    means = over_ranks(matmul_float32(members.t(), inputs)) / counts.clamp_min(1).unsqueeze(1)
    centred = inputs - matmul_float32(members, means)
    amounts = centred.square() if squared else centred.abs()
    return over_ranks(matmul_float32(members.t(), amounts)), counts


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    """Return m (C,d): 1 / max(spreads, `smallest` times their mean), scaled to mean 1 over the features of a cluster."""
    spreads = spreads.where(spreads.mean(1, keepdim=True) > 0, 1.0)  # a cluster of one token has no spread
    floor = smallest * spreads.mean(1, keepdim=True)
    inverse = 1 / torch.maximum(spreads, floor)
    return inverse / inverse.mean(1, keepdim=True)


def moved_spreads(spreads: Tensor, deviations: Tensor, counts: Tensor, *, memory: float, fewest: int) -> Tensor:
    """Return memory * spreads + (1 - memory) * deviations / counts; the old spreads of clusters with too few tokens."""
    counts = counts.unsqueeze(1)
    mean = deviations / counts.clamp_min(1)
    return torch.lerp(mean, spreads, memory).where(counts >= fewest, spreads)
