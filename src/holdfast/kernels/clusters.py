"""Tokens in the order of their clusters, and statistics of each cluster, on a GPU.

    T tokens, C clusters, d width

With the tokens of a cluster side by side, a tile of them needs one cluster's numbers instead of a row for each token. The
plain PyTorch of routing/clustering.py is the specification, and what runs elsewhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import operator
from holdfast.kernels.triton_support import on_device_of

TILE = 64  # tokens; the same as in the products of split_kernels.py
MOST_CLUSTERS = 512  # beyond it, a program's counts are no longer small


class Groups(NamedTuple):
    """The order of the tokens: each cluster's own one after the other, in tiles, the last of them filled up with nobody."""

    order: Tensor  # (G * TILE,) int32: which token, T for nobody
    owners: Tensor  # (G,) int32: whose tile, C for tokens without a cluster, -1 for one that nobody needs
    bounds: Tensor  # (C+1,) int32: where each cluster's tiles end
    totals: Tensor  # (C,) float32: how many real tokens each cluster has


def group(clusters_of: Tensor, real: Tensor | None, clusters: int) -> Groups:
    """`clusters_of (T,)`, a number from 0 to C - 1, more for a token without a cluster; `real (T,)` bool."""
    return Groups(*_group(clusters_of, real, clusters))


def deviations(
    tokens: Tensor, real: Tensor | None, groups: Groups, *, squared: bool, over_ranks: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(C,d): sums over each cluster's real `tokens (T,d)` of |x - mean| or its square, and how many tokens (C,) they are."""
    where = tokens, real, groups.order, groups.bounds
    if over_ranks is None:
        return _sums(*where, None, groups.totals, squared), groups.totals
    counts, around = over_ranks(groups.totals), over_ranks(_sums(*where, None, None, False))
    return over_ranks(_sums(*where, around, counts, squared)), counts


@torch.no_grad()
def absorb(spreads: Tensor, deviations: Tensor, counts: Tensor, due: Tensor, *, memory: float, fewest: int) -> None:
    """What routing/clustering.py lets into its `spreads (C,d)` from a batch where it is `due`, in place."""
    from holdfast.kernels import clusters_kernels

    with on_device_of(spreads):
        clusters_kernels.absorb(spreads, deviations, counts, due, memory, fewest)


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    """(C+1,d): the inverse of each cluster's spreads as routing/clustering.py has it, and a row of ones."""
    out: Tensor = _feature_scales(spreads, smallest)
    return out


def _group_on_gpu(clusters_of: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from holdfast.kernels import clusters_kernels

    with on_device_of(clusters_of):
        return clusters_kernels.group(clusters_of, real, clusters, TILE)


def _group_fake(clusters_of: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = -(-clusters_of.shape[0] // TILE) + clusters + 1
    return (
        clusters_of.new_empty(tiles * TILE, dtype=torch.int32),
        clusters_of.new_empty(tiles, dtype=torch.int32),
        clusters_of.new_empty(clusters + 1, dtype=torch.int32),
        clusters_of.new_empty(clusters, dtype=torch.float32),
    )


def _sums_on_gpu(
    tokens: Tensor,
    real: Tensor | None,
    order: Tensor,
    bounds: Tensor,
    around: Tensor | None,
    counts: Tensor | None,
    squared: bool,
) -> Tensor:
    from holdfast.kernels import clusters_kernels

    with on_device_of(tokens):
        return clusters_kernels.sums(tokens, real, order, bounds, TILE, around=around, counts=counts, squared=squared)


def _feature_scales_on_gpu(spreads: Tensor, smallest: float) -> Tensor:
    from holdfast.kernels import clusters_kernels

    with on_device_of(spreads):
        return clusters_kernels.feature_scales(spreads, smallest)


_group = operator(
    "group_by_cluster(Tensor clusters_of, Tensor? real, int clusters) -> (Tensor, Tensor, Tensor, Tensor)",
    _group_on_gpu,
    _group_fake,
)
_sums = operator(
    "cluster_sums(Tensor tokens, Tensor? real, Tensor order, Tensor bounds, Tensor? around, Tensor? counts, bool squared)"
    " -> Tensor",
    _sums_on_gpu,
    lambda tokens, real, order, bounds, *_: tokens.new_empty(bounds.shape[0] - 1, tokens.shape[1], dtype=torch.float32),
)
_feature_scales = operator(
    "feature_scales(Tensor spreads, float smallest) -> Tensor",
    _feature_scales_on_gpu,
    lambda spreads, smallest: spreads.new_empty(spreads.shape[0] + 1, spreads.shape[1]),
)
