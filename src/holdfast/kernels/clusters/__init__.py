"""Statistics of clusters of tokens, and products of tokens with features scaled by their cluster.

    T tokens, C clusters, d width; a token without a cluster has a cluster index of C or more

On a GPU tokens are sorted by cluster: with the tokens of a cluster side by side, a tile of them needs the numbers of one
cluster instead of a row for each token. Elsewhere, and for operands that the kernels do not take, memberships are a 0/1
matrix (naive.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import fp32_linear
from holdfast.kernels.clusters import naive
from holdfast.kernels.operators import cdiv, has_kernels, on_gpu, operator

TILE = 64  # tokens
MOST_CLUSTERS = 512  # with more, the counts of a program become too large


class TokenTiles(NamedTuple):
    """Tokens sorted by cluster, in G tiles of one cluster each; the last tile of a cluster is filled up with padding."""

    order: Tensor  # (G * TILE,) int32: which token; T for padding
    owners: Tensor  # (G,) int32: the cluster of each tile; C for tokens without a cluster, -1 for an unused tile
    bounds: Tensor  # (C+1,) int32: where the tiles of each cluster end
    totals: Tensor  # (C,) float32: how many real tokens each cluster has


Groups = TokenTiles | Tensor  # or the memberships (T,C), 0 or 1, where the kernels do not run


def group(clusters_of: Tensor, real: Tensor | None, clusters: int, *, tokens: Tensor, weight: Tensor) -> Groups:
    """Group tokens by `clusters_of (T,)`, their cluster indices; `real (T,)` bool says which of them count.

    `tokens` and `weight` are what `clustered_linear` will multiply: they decide whether the kernels can be used.
    """
    if clusters < MOST_CLUSTERS and fp32_linear.has_linear_kernel(tokens, weight):
        return TokenTiles(*_group(clusters_of, real, clusters))
    return naive.members(clusters_of, clusters)


def deviations(
    tokens: Tensor,
    real: Tensor | None,
    groups: Groups,
    *,
    squared: bool,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (C,d), sums over each cluster's real `tokens (T,d)` of |x - mean| or its square, and their numbers (C,).

    `over_ranks` returns the sum of a tensor over all processes; None means that each counts for itself.
    """
    if isinstance(groups, Tensor):
        return naive.deviations(tokens, real, groups, squared=squared, over_ranks=over_ranks)
    tokens = tokens.contiguous()
    where = tokens, real, groups.order, groups.bounds
    if over_ranks is None:
        return _sums(*where, None, groups.totals, squared), groups.totals
    counts, around = over_ranks(groups.totals), over_ranks(_sums(*where, None, None, False))
    return over_ranks(_sums(*where, around, counts, squared)), counts


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    """Return what each cluster's features are multiplied with, from its `spreads (C,d)`, as naive.py states it.

    (C+1,d) where a kernel makes them, with a row of ones for tokens without a cluster; (C,d) elsewhere.
    """
    return (_feature_scales if has_kernels(spreads) else naive.feature_scales)(spreads, smallest)


def padded_scales(scales: Tensor, groups: Groups) -> Tensor:
    """Return `scales (C,d)` for `clustered_linear`: sorted tokens need a row of ones for those without a cluster."""
    return scales if isinstance(groups, Tensor) else torch.cat([scales, torch.ones_like(scales[:1])])


def clustered_linear(tokens: Tensor, weight: Tensor, groups: Groups, scales: Tensor) -> Tensor:
    """Return (x * m_c) weight^T, (T,n) float32, with m_c a row of `scales` from `feature_scales`.

    Features of tokens without a cluster stay as they are. No gradient flows through the scales.
    """
    if isinstance(groups, Tensor):
        return fp32_linear.scaled_linear_float32(tokens, groups, scales[: groups.shape[1]], weight)
    return fp32_linear.scaled_tiles_linear(tokens, weight, groups.order, groups.owners, groups.bounds, scales)


@torch.no_grad()
def update_spreads(spreads: Tensor, deviations: Tensor, counts: Tensor, due: Tensor, *, memory: float, fewest: int) -> None:
    """Move the running `spreads (C,d)` towards a batch's mean deviations, in place, if `due`.

    `deviations (C,d)` are sums over `counts (C,)` tokens. A cluster with fewer than `fewest` keeps its spread.
    """
    if not torch.compiler.is_compiling() and has_kernels(spreads):  # a compiler fuses the formula by itself
        _update_spreads(spreads, deviations, counts, due, memory, fewest)
        return
    moved = naive.moved_spreads(spreads, deviations, counts, memory=memory, fewest=fewest)
    # Not where(..., out=spreads): under torch.compile a backward that computes it again would then read the new state.
    spreads.copy_(torch.where(due, moved, spreads))


def empty_tiles(clusters_of: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the fields of `TokenTiles`."""
    tiles = cdiv(clusters_of.shape[0], TILE) + clusters + 1
    return (
        clusters_of.new_empty(tiles * TILE, dtype=torch.int32),
        clusters_of.new_empty(tiles, dtype=torch.int32),
        clusters_of.new_empty(clusters + 1, dtype=torch.int32),
        clusters_of.new_empty(clusters, dtype=torch.float32),
    )


_group = operator(
    "group_by_cluster(Tensor clusters_of, Tensor? real, int clusters) -> (Tensor, Tensor, Tensor, Tensor)",
    on_gpu(__name__, "group"),
    empty_tiles,
)
_sums = operator(
    "cluster_sums(Tensor tokens, Tensor? real, Tensor order, Tensor bounds, Tensor? around, Tensor? counts, bool squared)"
    " -> Tensor",
    on_gpu(__name__, "sums"),
    lambda tokens, real, order, bounds, *_: tokens.new_empty(bounds.shape[0] - 1, tokens.shape[1], dtype=torch.float32),
)
_feature_scales = operator(
    "feature_scales(Tensor spreads, float smallest) -> Tensor",
    on_gpu(__name__, "feature_scales"),
    lambda spreads, smallest: spreads.new_empty(spreads.shape[0] + 1, spreads.shape[1]),
)
_update_spreads = on_gpu(__name__, "update_spreads")
