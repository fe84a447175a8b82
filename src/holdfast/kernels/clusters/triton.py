"""Triton kernels for statistics of clusters of tokens.

    T tokens, C clusters and one more for tokens without, d width; G tiles of TILE places (`TokenTiles`)

Sums are taken over a cluster's tokens in a fixed order: they repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.clusters import TILE, empty_tiles
from holdfast.kernels.operators import cdiv, kernel, next_power_of_2

BLOCK = tl.constexpr(128)  # tokens that are counted and placed together
OWNERS = tl.constexpr(16)  # tiles whose owners are written together
SPAN, WIDTH = tl.constexpr(64), tl.constexpr(64)  # tokens and features that are summed together
STAGES = tl.constexpr(3)  # of the pipeline that loads them
SUMS, AROUND, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _cluster_of(clusters_of, token, tokens, stride, clusters):
    """Return the cluster index of each token; `clusters` for a token without one."""
    cluster = tl.load(clusters_of + token.to(tl.int64) * stride, mask=token < tokens, other=0)
    return tl.minimum(cluster, clusters).to(tl.int32)


@kernel
def _count(
    clusters_of,
    real,
    counts,
    real_counts,
    tokens,
    stride,
    clusters,
    PADDED: tl.constexpr,
    BINS: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    cluster = _cluster_of(clusters_of, token, tokens, stride, clusters)
    counted = token < tokens
    bins = tl.arange(0, BINS)
    tl.store(counts + block * BINS + bins, tl.histogram(cluster, BINS, mask=counted))
    if PADDED:
        counted = counted & (tl.load(real + token, mask=counted, other=0) != 0)
        tl.store(real_counts + block * BINS + bins, tl.histogram(cluster, BINS, mask=counted))


@triton.jit
def _sum_counts(counts, block, blocks, BINS: tl.constexpr):
    """Return the sum of the counts over all blocks, and over those before `block`."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    earlier = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, blocks, 32):
        other = start + tl.arange(0, 32)
        part = tl.load(counts + other[:, None] * BINS + bins[None, :], mask=(other < blocks)[:, None], other=0)
        total += tl.sum(part, axis=0)
        earlier += tl.sum(tl.where((other < block)[:, None], part, 0), axis=0)
    return total, earlier


@kernel
def _place(
    clusters_of,
    counts,
    real_counts,
    order,
    owners,
    bounds,
    totals,
    tokens,
    stride,
    clusters,
    blocks,
    tiles,
    PADDED: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sort by counting: a token's place follows all tiles of earlier clusters and the earlier tokens of its own cluster.

    Each program also writes the owners of some tiles, and fills up the last tile of some clusters with padding.
    """
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total, earlier = _sum_counts(counts, block, blocks, BINS)
    own_tiles = (total + TILE - 1) // TILE
    last = tl.cumsum(own_tiles, axis=0)
    begin = (last - own_tiles) * TILE
    token = block * BLOCK + tl.arange(0, BLOCK)
    cluster = _cluster_of(clusters_of, token, tokens, stride, clusters)
    position = tl.arange(0, BLOCK)
    before = (cluster[:, None] == cluster[None, :]) & (position[None, :] < position[:, None])
    start = tl.sum(tl.where(cluster[:, None] == bins[None, :], (begin + earlier)[None, :], 0), axis=1)
    tl.store(order + start + tl.sum(before.to(tl.int32), axis=1), token, mask=token < tokens)
    for some in range(block * OWNERS, tiles, blocks * OWNERS):
        tile = some + tl.arange(0, OWNERS)
        owner = tl.sum(((bins <= clusters)[None, :] & (tile[:, None] >= last[None, :])).to(tl.int32), axis=1)
        tl.store(owners + tile, tl.where(owner > clusters, -1, owner), mask=tile < tiles)
    for filled in range(block, clusters + 1, blocks):
        place = tl.sum(tl.where(bins == filled, begin + total, 0), axis=0) + tl.arange(0, TILE)
        tl.store(order + place, tokens, mask=place < tl.sum(tl.where(bins == filled, last, 0), axis=0) * TILE)
    if block == 0:
        tl.store(bounds + bins, last, mask=bins <= clusters)
        if PADDED:
            total, _ = _sum_counts(real_counts, block, blocks, BINS)
        tl.store(totals + bins, total.to(tl.float32), mask=bins < clusters)


@triton.jit
def _sum_over(
    values,
    real,
    order,
    first,
    last,
    feature,
    mean,
    tokens,
    width,
    PADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    SQUARED: tl.constexpr,
):
    """Return the sum over the tokens at places `first` to `last`, of their values or of their distances to the mean."""
    total = tl.zeros((SPAN, WIDTH), dtype=tl.float32)
    for start in tl.range(first, last, SPAN, num_stages=STAGES):
        place = start + tl.arange(0, SPAN)
        token = tl.load(order + place, mask=place < last, other=tokens).to(tl.int64)
        counted = token < tokens
        if PADDED:
            counted = counted & (tl.load(real + token, mask=counted, other=0) != 0)
        used = counted[:, None] & (feature < width)[None, :]
        x = tl.load(values + token[:, None] * width + feature[None, :], mask=used, other=0.0).to(tl.float32)
        if CENTRED:
            x = x - mean[None, :]
            x = tl.where(used, x * x if SQUARED else tl.abs(x), 0.0)
        total += x
    return tl.sum(total, axis=0)


@kernel
def _sums(
    values,
    real,
    order,
    bounds,
    sums,
    counts,
    out,
    tokens,
    width,
    WHAT: tl.constexpr,
    PADDED: tl.constexpr,
    SQUARED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum some features of one cluster's tokens: values, distances to a given mean, or distances to their own mean.

    Neighbouring programs read the features of the same tokens, and so whole rows of memory.
    """
    across = tl.cdiv(width, WIDTH)
    cluster = (tl.program_id(0) // across).to(tl.int64)
    feature = (tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    first = tl.load(bounds + cluster - 1, mask=cluster > 0, other=0) * TILE
    last = tl.load(bounds + cluster) * TILE
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    if WHAT == AROUND:
        total = tl.load(sums + cluster * width + feature, mask=feature < width, other=0.0)
    else:
        total = _sum_over(values, real, order, first, last, feature, total, tokens, width, PADDED, False, False)
    if WHAT != SUMS:
        mean = total / tl.maximum(tl.load(counts + cluster), 1.0)
        total = _sum_over(values, real, order, first, last, feature, mean, tokens, width, PADDED, True, SQUARED)
    tl.store(out + cluster * width + feature, total, mask=feature < width)


@kernel
def _update_spreads(
    spreads, deviations, counts, due, width, MEMORY: tl.constexpr, FEWEST: tl.constexpr, BLOCK: tl.constexpr
):
    cluster = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + cluster)
    if (tl.load(due) != 0) & (count >= FEWEST):
        feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place, inside = cluster * width + feature, feature < width
        old = tl.load(spreads + place, mask=inside, other=0.0)
        mean = tl.load(deviations + place, mask=inside, other=0.0) / tl.maximum(count, 1.0)
        tl.store(spreads + place, mean + MEMORY * (old - mean), mask=inside)


@kernel
def _feature_scales(spreads, out, clusters, width, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    cluster = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < width
    scales = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    if cluster < clusters:
        spread = tl.load(spreads + cluster * width + feature, mask=inside, other=0.0)
        mean = tl.sum(spread, axis=0) / width
        spread = tl.where(mean > 0, spread, 1.0)
        inverse = 1 / tl.maximum(spread, SMALLEST * tl.where(mean > 0, mean, 1.0))
        scales = inverse / (tl.sum(tl.where(inside, inverse, 0.0), axis=0) / width)
    tl.store(out + cluster * width + feature, scales, mask=inside)


def group(clusters_of: Tensor, real: Tensor | None, clusters: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `TokenTiles`: order (G * TILE,), owners (G,), bounds (C+1,) and totals (C,)."""
    tokens, device = clusters_of.shape[0], clusters_of.device
    blocks, bins = cdiv(tokens, BLOCK.value), next_power_of_2(clusters + 1)
    padded = real is not None
    counts = torch.empty(2 if padded else 1, blocks, bins, dtype=torch.int32, device=device)
    written = empty_tiles(clusters_of, real, clusters)
    mask, of_all, of_real = real.contiguous() if padded else clusters_of, counts[0], counts[-1]
    sizes = tokens, clusters_of.stride(0), clusters
    _count[(blocks,)](clusters_of, mask, of_all, of_real, *sizes, PADDED=padded, BINS=bins)
    sizes += blocks, written[1].shape[0]
    _place[(blocks,)](clusters_of, of_all, of_real, *written, *sizes, PADDED=padded, BINS=bins, TILE=TILE)
    return written


def sums(
    values: Tensor,
    real: Tensor | None,
    order: Tensor,
    bounds: Tensor,
    around: Tensor | None = None,
    counts: Tensor | None = None,
    squared: bool = False,
) -> Tensor:
    """Return (C,d): sums over each cluster's real tokens; with `counts (C,)`, sums of distances to the mean.

    The mean is that of these tokens or, where other processes have more of them, that of the sums `around (C,d)`.
    """
    (tokens, width), values = values.shape, values.contiguous()
    clusters, padded = bounds.shape[0] - 1, real is not None
    out = torch.empty(clusters, width, dtype=torch.float32, device=values.device)
    what = SUMS if counts is None else BOTH if around is None else AROUND
    # A pointer that is not read may be any.
    mask, around, counts = (out if each is None else each.contiguous() for each in (real, around, counts))
    kinds = {"WHAT": what, "PADDED": padded, "SQUARED": squared, "TILE": TILE}
    _sums[(clusters * cdiv(width, WIDTH.value),)](
        values, mask, order, bounds, around, counts, out, tokens, width, **kinds, num_warps=2
    )
    return out


def update_spreads(spreads: Tensor, deviations: Tensor, counts: Tensor, due: Tensor, memory: float, fewest: int) -> None:
    clusters, width = spreads.shape
    grid = (clusters, cdiv(width, 1024))
    _update_spreads[grid](spreads, deviations, counts, due, width, MEMORY=memory, FEWEST=fewest, BLOCK=1024)


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    clusters, width = spreads.shape
    out = torch.empty(clusters + 1, width, dtype=torch.float32, device=spreads.device)
    block = next_power_of_2(width)
    _feature_scales[(clusters + 1,)](spreads, out, clusters, width, SMALLEST=smallest, BLOCK=block, num_warps=8)
    return out
