"""Clusters of tokens by a 0/1 matrix of memberships: the specification of the kernels, and what runs without them.

T tokens, C clusters, d width
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.fp32_linear import matmul_float32

NEWTON_STEPS = 8  # five reach float64's precision for spreads that differ by a factor of 1e10


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


@torch.no_grad()
def quartile_ranges(
    tokens: Tensor, real: Tensor | None, clusters_of: Tensor, clusters: int, over_ranks: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return (C,d), the interquartile range of each feature over each cluster's real `tokens (T,d)`, and their numbers (C,).

    The quartiles of n tokens are the ceil(n/4)-th smallest and the ceil(n/4)-th largest value, over all ranks: exact order
    statistics, the same on every rank. They are found by bisection on the bits of the values, 32 rounds in which each rank
    contributes two counts for each cluster and feature.
    """
    over_ranks = over_ranks or (lambda value: value)
    real = torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device) if real is None else real
    bits = (tokens.float().where(real.unsqueeze(1), 0.0) + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the values
    member = members(clusters_of, clusters) * real.unsqueeze(1)
    counts = over_ranks(member.sum(0))
    quarter = (counts / 4).ceil()
    wanted = torch.stack([quarter, counts - quarter + 1]).unsqueeze(2)  # the ranks of the two quartiles, from 1
    low = torch.full((2, clusters, tokens.shape[1]), -(2**31), dtype=torch.int64, device=tokens.device)
    high = torch.full_like(low, 2**31 - 1)
    own = clusters_of.clamp_max(clusters - 1)
    for _ in range(32):
        middle = (low + high) >> 1
        below = [matmul_float32(member.t(), (keys <= bound.int()[own]).float()) for bound in middle]
        enough = over_ranks(torch.stack(below)) >= wanted
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    bits = high.int()
    first, last = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
    return (last - first).where(counts.unsqueeze(1) > 0, 0.0), counts


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    """Return m (C,d): 1 / max(spreads, `smallest` times their mean), scaled to mean 1 over the features of a cluster."""
    spreads = spreads.where(spreads.mean(1, keepdim=True) > 0, 1.0)  # a cluster of one token has no spread
    floor = smallest * spreads.mean(1, keepdim=True)
    inverse = 1 / torch.maximum(spreads, floor)
    return inverse / inverse.mean(1, keepdim=True)


def optimal_scales(spreads: Tensor) -> Tensor:
    """Return m (C,d): lambda / (spreads + alpha) of each cluster, lambda its mean spread and alpha such that the mean is 1.

    These are the optimal weights of theorem 1 of ACMoE, times d. The harmonic mean of spreads + alpha must be lambda. It is
    concave and increasing in alpha, so Newton's method from the left neither overshoots nor stops early: alpha lies above
    lambda / d - min(spreads), and is not negative, because a harmonic mean is at most the mean.
    """
    wide = spreads.double()
    wide = wide.where(wide.mean(1, keepdim=True) > 0, 1.0)  # a cluster of one token has no spread
    level = wide.mean(1, keepdim=True)
    alpha = (level / wide.shape[1] - wide.amin(1, keepdim=True)).clamp_min(0)
    for _ in range(NEWTON_STEPS):
        inverse = 1 / (wide + alpha)
        harmonic = 1 / inverse.mean(1, keepdim=True)
        slope = inverse.square().mean(1, keepdim=True) * harmonic.square()
        alpha = alpha + (level - harmonic) / slope
    scales = level / (wide + alpha)
    return (scales / scales.mean(1, keepdim=True)).float()


def moved_spreads(spreads: Tensor, deviations: Tensor, counts: Tensor, *, memory: float, fewest: int) -> Tensor:
    """Return memory * spreads + (1 - memory) * deviations / counts; the old spreads of clusters with too few tokens."""
    counts = counts.unsqueeze(1)
    mean = deviations / counts.clamp_min(1)
    return torch.lerp(mean, spreads, memory).where(counts >= fewest, spreads)
