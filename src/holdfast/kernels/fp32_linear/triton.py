"""Triton kernels for true float32 products on bfloat16 tensor cores, and the functions that launch them.

    T tokens, d width, n outputs (experts); G tiles of tokens of one cluster each (`clusters.TokenTiles`)

Numbers are split into up to three bfloat16 parts (kernels/float32_parts.py): weights and gradients of logits, which are
small, before the product, tokens and scaled weights on the way into it.

Every output is a sum in an order that depends on d (of a weight's gradient, on T) and on nothing else: a token's logits are
the same to the bit in any batch.
"""

# mypy: ignore-errors
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from holdfast.kernels.float32_parts import BF16_PART, bf16_parts, bf16_product, load_bf16_parts
from holdfast.kernels.operators import cdiv, kernel

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
TILE = 64  # tokens, where they are not sorted by cluster
DEPTH = 64  # features of tokens and weights that are multiplied at a time
WIDE = 512  # with this many features or more, a float32 sum may be off by 2^-15 of its terms


@kernel
def _split(values, out, size, width, stride_height, stride_width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(values + place // width * stride_height + place % width * stride_width, mask=inside, other=0.0)
    first, second, third = bf16_parts(value, COUNT)
    tl.store(out + place, first, mask=inside)
    tl.store(out + size + place, second, mask=inside)
    if COUNT > 2:
        tl.store(out + 2 * size + place, third, mask=inside)


@kernel
def _linear(
    tokens,
    weight,
    order,
    owners,
    scales,
    out,
    count,
    inner,
    width,
    weight_size,
    one,
    TOKEN_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write out = tokens weight^T with the weight in parts, or tokens (weight * scales of the tile's cluster)^T.

    The weight is the left operand, because tensor cores can read a left operand, scaled and split here, from registers. They
    truncate where float32 rounds, so their sums are kept short and added up outside. `one` is 1; it keeps the compiler from
    leaving the whole sum to the tensor cores.
    """
    tile = tl.program_id(0)
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        own, used = (row < count)[:, None], (column < width)[:, None]
        total = tl.zeros((WIDTH, TILE), dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            if EVEN:
                wanted, known = own, used
            else:
                wanted, known = own & (depth < inner)[None, :], used & (depth < inner)[None, :]
            x = tl.load(tokens + row[:, None] * inner + depth[None, :], mask=wanted, other=0.0)
            x = bf16_parts(tl.trans(x), TOKEN_PARTS)
            places = column[:, None] * inner + depth[None, :]
            if CLUSTERED:
                scale = tl.load(scales + cluster * inner + depth, mask=depth < inner, other=0.0)
                w = tl.load(weight + places, mask=known, other=0.0).to(tl.float32) * scale[None, :]
                if WEIGHT_PARTS == 2:  # rounded rather than cut off, so that two parts hold 17 bits
                    rounded = w.to(tl.bfloat16).to(BF16_PART)
                    rest = (w - rounded.to(tl.float32)).to(BF16_PART)
                    w = rounded, rest, rest
                else:
                    w = bf16_parts(w, WEIGHT_PARTS)
            else:
                w = load_bf16_parts(weight, weight_size, places, known, WEIGHT_PARTS)
            total += bf16_product(w, x, WIDTH, TILE, WEIGHT_PARTS, TOKEN_PARTS, 3) * one
        tl.store(out + row[None, :] * width + column[:, None], total, mask=(row < count)[None, :] & used)


@kernel
def _grad_tokens(
    grad,
    weight,
    order,
    owners,
    scales,
    out,
    count,
    inner,
    width,
    share,
    grad_size,
    weight_size,
    one,
    GRAD_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    NARROW: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write grad weight (times the scales); from two parts each where the result is rounded to half precision.

    A program computes a share of the features of its tokens, its neighbours the others. NARROW: there are at most DEPTH
    outputs, so the tokens' gradients are read once.
    """
    shares = tl.cdiv(inner, share)
    tile = tl.program_id(0) // shares
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        own = (row < count)[:, None]
        column = tl.arange(0, DEPTH).to(tl.int64)
        known = own & (column < width)[None, :]
        g = load_bf16_parts(grad, grad_size, row[:, None] * width + column[None, :], known, GRAD_PARTS)
        first = tl.program_id(0) % shares * share
        for start in range(first, min(first + share, inner), WIDTH):
            feature = (start + tl.arange(0, WIDTH)).to(tl.int64)
            used = (feature < inner)[None, :]
            places = column[:, None] * inner + feature[None, :]
            w = load_bf16_parts(weight, weight_size, places, (column < width)[:, None] & used, WEIGHT_PARTS)
            total = bf16_product(g, w, TILE, WIDTH, GRAD_PARTS, WEIGHT_PARTS, GRAD_PARTS)
            if not NARROW:
                for begin in range(DEPTH, width, DEPTH):
                    more = begin + column
                    known = own & (more < width)[None, :]
                    h = load_bf16_parts(grad, grad_size, row[:, None] * width + more[None, :], known, GRAD_PARTS)
                    places = more[:, None] * inner + feature[None, :]
                    v = load_bf16_parts(weight, weight_size, places, (more < width)[:, None] & used, WEIGHT_PARTS)
                    total += bf16_product(h, v, TILE, WIDTH, GRAD_PARTS, WEIGHT_PARTS, GRAD_PARTS) * one
            if CLUSTERED:
                total = total * tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
            tl.store(out + row[:, None] * inner + feature[None, :], total, mask=own & used)


@kernel
def _grad_weight(
    grad,
    tokens,
    order,
    owners,
    bounds,
    scales,
    out,
    count,
    clusters,
    inner,
    width,
    grad_size,
    one,
    GRAD_PARTS: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    TILE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write out[s] = grad^T tokens (times the scales) over the s-th share of the tokens, in short sums as in `linear`."""
    feature = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    column = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    split = tl.program_id(2)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    tiles = tl.load(bounds + clusters) if CLUSTERED else tl.cdiv(count, TILE)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(split * share, min(tiles, (split + 1) * share)):
        row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        if CLUSTERED:
            row = tl.load(order + row).to(tl.int64)
            cluster = tl.load(owners + tile).to(tl.int64)
            factor = tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
        else:
            factor = one
        own = (row < count)[:, None]
        known = own & (column < width)[None, :]
        g = load_bf16_parts(grad, grad_size, row[:, None] * width + column[None, :], known, GRAD_PARTS)
        x = tl.load(tokens + row[:, None] * inner + feature[None, :], mask=own & (feature < inner)[None, :], other=0.0)
        g, x = (tl.trans(g[0]), tl.trans(g[1]), tl.trans(g[2])), bf16_parts(x, TOKEN_PARTS)
        total += bf16_product(g, x, HEIGHT, WIDTH, GRAD_PARTS, TOKEN_PARTS, GRAD_PARTS) * factor
    place = (split * width + column[:, None]) * inner + feature[None, :]
    tl.store(out + place, total, mask=(column < width)[:, None] & (feature < inner)[None, :])


@kernel
def _fold(parts, out, splits, size, BLOCK: tl.constexpr):
    """Write the sum over the first axis, added in its order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total, mask=place < size)


class Clusters(NamedTuple):
    """Tokens in tiles of one cluster each (`clusters.TokenTiles`), and every cluster's scales."""

    order: Tensor
    owners: Tensor
    bounds: Tensor
    scales: Tensor


def _clusters(*fields: Tensor | None) -> Clusters | None:
    return None if fields[0] is None else Clusters(*fields)


def _tiles(count: int, clusters: Clusters | None) -> tuple[int, int]:
    """Return how many tiles of tokens there are, and how many tokens each has."""
    if clusters is None:
        return cdiv(count, TILE), TILE
    tiles = clusters.owners.shape[0]
    return tiles, clusters.order.shape[0] // tiles


def in_bf16_parts(values: Tensor, count: int) -> Tensor:
    """Return (count, m, n) bfloat16: the first parts of `values (m,n)`; if `count` is 1, the values themselves."""
    if count == 1:
        return values.contiguous()
    height, width = values.shape
    out = torch.empty(count, height, width, dtype=torch.bfloat16, device=values.device)
    grid = (cdiv(height * width, 1024),)
    _split[grid](values, out, height * width, width, *values.stride(), COUNT=count, BLOCK=1024)
    return out


def linear(tokens: Tensor, weight: Tensor, *tiles_and_scales: Tensor | None) -> Tensor:
    """Return `tokens (T,d)` times `weight (n,d)` transposed: (T,n), float32.

    tiles_and_scales   the fields of `Clusters`, or None for each
    """
    clusters = _clusters(*tiles_and_scales)
    (count, inner), width = tokens.shape, weight.shape[0]
    out = torch.empty(count, width, dtype=torch.float32, device=tokens.device)
    parts = {"TOKEN_PARTS": PARTS[tokens.dtype], "WEIGHT_PARTS": PARTS[weight.dtype]}
    if clusters is None:
        weight = in_bf16_parts(weight, parts["WEIGHT_PARTS"])
        grouping, registers = (tokens,) * 3, None
    else:
        # Two parts of a weight times scales have 17 bits. That is enough for a bfloat16 weight, itself rounded to 2^-9, if
        # the sum is no more exact.
        parts["WEIGHT_PARTS"] = 2 if weight.dtype == torch.bfloat16 and inner >= WIDE else 3
        weight, grouping, registers = weight.contiguous(), (clusters.order, clusters.owners, clusters.scales), 168
    light = all(count == 1 for count in parts.values())
    outputs = 128 if light and width > 64 else 64  # computed by one program, which reads the tokens once
    tiles, tile = _tiles(count, clusters)
    # With so few stages and registers, the programs of 16384 tokens all fit on a large GPU at a time.
    how = {"num_warps": 4, "num_stages": 4 if light else 2 if tokens.dtype == torch.float32 else 3, "maxnreg": registers}
    kinds = {**parts, "CLUSTERED": clusters is not None, "EVEN": inner % DEPTH == 0}
    sizes = count, inner, width, width * inner
    _linear[(tiles, cdiv(width, outputs))](
        tokens, weight, *grouping, out, *sizes, 1.0, **kinds, TILE=tile, WIDTH=outputs, DEPTH=DEPTH, **how
    )
    return out


def linear_backward(
    grad: Tensor, tokens: Tensor, weight: Tensor, *tiles_and_scales_and_wants: Tensor | Sequence[bool] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens and weight; an empty tensor for one that is not wanted."""
    *tiles_and_scales, (want_tokens, want_weight) = tiles_and_scales_and_wants
    clusters, parts = _clusters(*tiles_and_scales), split_gradient(grad, tokens, weight)
    return (
        grad_tokens(parts, tokens, weight, clusters) if want_tokens else grad.new_empty(0),
        grad_weight(parts, tokens, weight, clusters) if want_weight else grad.new_empty(0),
    )


def grad_tokens(
    grad_parts: Tensor,
    like: Tensor,
    weight: Tensor,
    clusters: Clusters | None,
    features: int | None = None,
    share: int = 512,
) -> Tensor:
    """Return the gradient of the logits, (T,n) in parts, times `weight (n,d)`, in the dtype of `like (T,d)`."""
    (count, inner), width = like.shape, weight.shape[0]
    out = torch.empty_like(like)
    wide = like.dtype != torch.float32
    features = features or (128 if wide else 64)
    grad_count = gradient_count(like.dtype)
    parts = min(PARTS[weight.dtype], grad_count)
    tiles, tile = _tiles(count, clusters)
    grouping = (out,) * 3 if clusters is None else (clusters.order, clusters.owners, clusters.scales)
    kinds = {"GRAD_PARTS": grad_count, "WEIGHT_PARTS": parts, "CLUSTERED": clusters is not None, "NARROW": width <= 64}
    how = {"num_warps": 4, "num_stages": 3 if clusters is not None and wide else 2}
    weight, sizes = in_bf16_parts(weight, parts), (count, inner, width, share, count * width, width * inner)
    _grad_tokens[(tiles * cdiv(inner, share),)](
        grad_parts, weight, *grouping, out, *sizes, 1.0, **kinds, TILE=tile, WIDTH=features, DEPTH=64, **how
    )
    return out


def grad_weight(grad_parts: Tensor, tokens: Tensor, like: Tensor, clusters: Clusters | None) -> Tensor:
    """Return the gradient of the logits, (T,n) in parts, transposed times `tokens (T,d)`, in the dtype of `like (n,d)`."""
    (count, inner), width = tokens.shape, like.shape[0]
    _, tile = _tiles(count, clusters)
    wide = clusters is None and tokens.dtype != torch.float32
    features, programs = (128, 256) if wide else (64, 512)
    across, up = cdiv(inner, features), cdiv(width, 64)
    splits = max(1, min(programs // (across * up), cdiv(count, 4 * tile)))
    out = torch.empty(splits, width, inner, dtype=torch.float32, device=tokens.device)
    grouping = (out,) * 4 if clusters is None else clusters
    sizes = count, 0 if clusters is None else clusters.bounds.shape[0] - 1, inner, width, count * width
    parts = {"GRAD_PARTS": gradient_count(like.dtype), "TOKEN_PARTS": PARTS[tokens.dtype]}
    kinds = {**parts, "CLUSTERED": clusters is not None}
    how = {"num_warps": 4, "num_stages": 2 if tokens.dtype == torch.float32 else 3}
    _grad_weight[(across, up, splits)](
        grad_parts, tokens, *grouping, out, *sizes, 1.0, **kinds, TILE=tile, HEIGHT=64, WIDTH=features, **how
    )
    total = torch.empty(width, inner, dtype=like.dtype, device=tokens.device)
    _fold[(cdiv(width * inner, 1024),)](out, total, splits, width * inner, BLOCK=1024)
    return total


def gradient_count(out: torch.dtype) -> int:
    """Return how many parts of the gradient of the logits a gradient of dtype `out` needs."""
    return 3 if out == torch.float32 else 2


def split_gradient(grad: Tensor, *likes: Tensor) -> Tensor:
    """Return `grad (T,n)` in as many parts as gradients of tensors like these need."""
    return in_bf16_parts(grad, max(gradient_count(like.dtype) for like in likes))
