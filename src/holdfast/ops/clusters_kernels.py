"""Triton kernels for statistics of clusters of tokens. Imported only where Triton can run.

    T tokens, C clusters and one more for tokens without, d width; G tiles of TILE places in the order, see ops/clusters.py

Sums are taken tile by tile and then over a cluster's tiles, in their order: they repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # tokens that are counted and placed together
WIDTH = 128  # features at a time


@triton.jit
def _cluster_of(clusters_of, token, tokens, stride, clusters):
    """A cluster's number; `clusters` for a token without one."""
    cluster = tl.load(clusters_of + token.to(tl.int64) * stride, mask=token < tokens, other=0)
    return tl.minimum(cluster, clusters).to(tl.int32)


@triton.jit
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
    BLOCK: tl.constexpr,
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
    """Over all blocks, and over those before `block`."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    earlier = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, blocks, 32):
        other = start + tl.arange(0, 32)
        part = tl.load(counts + other[:, None] * BINS + bins[None, :], mask=(other < blocks)[:, None], other=0)
        total += tl.sum(part, axis=0)
        earlier += tl.sum(tl.where((other < block)[:, None], part, 0), axis=0)
    return total, earlier


@triton.jit
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
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """A counting sort: where a token goes is how many of its cluster, and of those before it, come earlier."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total, earlier = _sum_counts(counts, block, blocks, BINS)
    own_tiles = (total + TILE - 1) // TILE
    last = tl.cumsum(own_tiles, axis=0)
    if block < blocks:
        begin = (last - own_tiles) * TILE + earlier
        token = block * BLOCK + tl.arange(0, BLOCK)
        cluster = _cluster_of(clusters_of, token, tokens, stride, clusters)
        position = tl.arange(0, BLOCK)
        before = (cluster[:, None] == cluster[None, :]) & (position[None, :] < position[:, None])
        place = tl.sum(before.to(tl.int32), axis=1) + tl.sum(
            tl.where(cluster[:, None] == bins[None, :], begin[None, :], 0), axis=1
        )
        tl.store(order + place, token, mask=token < tokens)
    else:  # one program more, for what there is one of
        tl.store(bounds + bins, last, mask=bins <= clusters)
        for start in range(0, tiles, 128):
            tile = start + tl.arange(0, 128)
            owner = tl.sum(((bins <= clusters)[None, :] & (tile[:, None] >= last[None, :])).to(tl.int32), axis=1)
            tl.store(owners + tile, tl.where(owner > clusters, -1, owner), mask=tile < tiles)
        real_total, _ = _sum_counts(real_counts, block, blocks, BINS)
        tl.store(totals + bins, real_total.to(tl.float32), mask=bins < clusters)


@triton.jit
def _tile_sums(
    values,
    real,
    order,
    owners,
    sums,
    totals,
    out,
    tokens,
    clusters,
    width,
    PADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    SQUARED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """For each tile the sum of the values, or of their distances to the cluster's mean.

    Programs side by side read the features of the same tokens: whole rows of memory.
    """
    across = tl.cdiv(width, WIDTH)
    tile = tl.program_id(0) // across
    cluster = tl.load(owners + tile).to(tl.int64)
    if (cluster >= 0) & (cluster < clusters):
        feature = (tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        token = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        counted = token < tokens
        if PADDED:
            counted = counted & (tl.load(real + token, mask=counted, other=0) != 0)
        used = counted[:, None] & (feature < width)[None, :]
        x = tl.load(values + token[:, None] * width + feature[None, :], mask=used, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.load(sums + cluster * width + feature, mask=feature < width, other=0.0)
            x = x - (mean / tl.maximum(tl.load(totals + cluster), 1.0))[None, :]
            x = tl.where(used, x * x if SQUARED else tl.abs(x), 0.0)
        tl.store(out + tile * width + feature, tl.sum(x, axis=0), mask=feature < width)


@triton.jit
def _cluster_sums(parts, bounds, out, width, WIDTH: tl.constexpr):
    cluster = tl.program_id(0)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(bounds + cluster - 1, mask=cluster > 0, other=0)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for tile in range(first, tl.load(bounds + cluster)):
        total += tl.load(parts + tile * width + feature, mask=feature < width, other=0.0)
    tl.store(out + cluster.to(tl.int64) * width + feature, total, mask=feature < width)


@triton.jit
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


def group(clusters_of: Tensor, real: Tensor | None, clusters: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order (G * tile,), owners (G,), bounds (C+1,) and totals (C,), as ops/clusters.py has them."""
    tokens, device = clusters_of.shape[0], clusters_of.device
    blocks, bins = triton.cdiv(tokens, BLOCK), triton.next_power_of_2(clusters + 1)
    tiles = triton.cdiv(tokens, tile) + clusters + 1
    counts = torch.empty(2, blocks, bins, dtype=torch.int32, device=device)
    order = torch.full((tiles * tile,), tokens, dtype=torch.int32, device=device)
    owners = torch.empty(tiles, dtype=torch.int32, device=device)
    bounds = torch.empty(clusters + 1, dtype=torch.int32, device=device)
    totals = torch.empty(clusters, dtype=torch.float32, device=device)
    stride = clusters_of.stride(0)
    _count[(blocks,)](
        clusters_of,
        clusters_of if real is None else real,
        counts[0],
        counts[1],
        tokens,
        stride,
        clusters,
        PADDED=real is not None,
        BINS=bins,
        BLOCK=BLOCK,
    )
    _place[(blocks + 1,)](
        clusters_of,
        counts[0],
        counts[1],
        order,
        owners,
        bounds,
        totals,
        tokens,
        stride,
        clusters,
        blocks,
        tiles,
        BINS=bins,
        BLOCK=BLOCK,
        TILE=tile,
    )
    return order, owners, bounds, totals


def sums(
    values: Tensor,
    real: Tensor | None,
    order: Tensor,
    owners: Tensor,
    bounds: Tensor,
    about: tuple[Tensor, Tensor] | None,
    squared: bool,
) -> Tensor:
    """(C,d): of each cluster's real tokens the sum, or that of distances to the mean, `about` giving sums and numbers."""
    tokens, width = values.shape
    tiles, clusters = owners.shape[0], bounds.shape[0] - 1
    across = triton.cdiv(width, WIDTH)
    parts = torch.empty(tiles, width, dtype=torch.float32, device=values.device)
    _tile_sums[(tiles * across,)](
        values,
        values if real is None else real,
        order,
        owners,
        *(about or (parts, parts)),
        parts,
        tokens,
        clusters,
        width,
        PADDED=real is not None,
        CENTRED=about is not None,
        SQUARED=squared,
        TILE=order.shape[0] // tiles,
        WIDTH=WIDTH,
    )
    out = torch.empty(clusters, width, dtype=torch.float32, device=values.device)
    _cluster_sums[(clusters, across)](parts, bounds, out, width, WIDTH=WIDTH, num_warps=1)
    return out


def feature_scales(spreads: Tensor, smallest: float) -> Tensor:
    clusters, width = spreads.shape
    out = torch.empty(clusters + 1, width, dtype=torch.float32, device=spreads.device)
    block = triton.next_power_of_2(width)
    _feature_scales[(clusters + 1,)](spreads, out, clusters, width, SMALLEST=smallest, BLOCK=block, num_warps=8)
    return out
