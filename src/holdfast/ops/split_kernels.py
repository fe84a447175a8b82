"""Triton kernels for true float32 products on bfloat16 tensor cores. Imported only where Triton can run.

    T tokens, d width, n outputs (experts); G tiles of tokens of one cluster each, see ops/clusters.py

A float32 number is the exact sum of three bfloat16 numbers (8 + 8 + 8 bits), a float16 number of two, and the product of
two bfloat16 numbers is exact in float32, in which tensor cores add. So numbers are split into `parts` on the way into the
product. A product of parts i and j is about 2^-8(i+j) of the whole; those that round away are left out.

Every output is a sum in an order that depends on d (of a weight's gradient, on T) and on nothing else: a token's logits are
the same to the bit in any batch.
"""

# mypy: ignore-errors
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.ops.clusters import TILE

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# numpy, and so the interpreter, has no bfloat16 product: there the parts are held in float32, with the same values.
PART = tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16


@triton.jit
def _leading(x):
    """The first 8 bits of a float32, cut off rather than rounded, so that the largest number does not become infinite."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(x, PARTS: tl.constexpr, PART: tl.constexpr):
    """Its parts, the largest first; as many as there are, and the last again in place of those that there are not."""
    if PARTS == 1:
        return x.to(PART), x.to(PART), x.to(PART)
    rest = x.to(tl.float32)
    first = _leading(rest)
    rest = tl.where(first - first == 0, rest - first, 0.0)  # beside an infinity there is no rest
    if PARTS == 2:
        return first.to(PART), rest.to(PART), rest.to(PART)
    second = _leading(rest)
    return first.to(PART), second.to(PART), (rest - second).to(PART)


@triton.jit
def _pick(first, second, third, INDEX: tl.constexpr):
    if INDEX == 0:
        return first
    elif INDEX == 1:
        return second
    else:
        return third


@triton.jit
def _add_product(
    total, left, right, one, LEFT: tl.constexpr, RIGHT: tl.constexpr, BYTES: tl.constexpr, PART: tl.constexpr
):
    """total + left right, in LEFT and RIGHT parts, with the products of parts that reach into the first BYTES.

    Tensor cores cut off where float32 rounds, so their sums are kept short, from the small products to the large, and added
    up outside. `one` is 1, or another factor of the product; the compiler must not know it, or it would let the tensor
    cores do all of the sum.
    """
    left_0, left_1, left_2 = _split(left, LEFT, PART)
    right_0, right_1, right_2 = _split(right, RIGHT, PART)
    product = tl.zeros_like(total)
    for down in tl.static_range(BYTES):
        for i in tl.static_range(LEFT):
            if BYTES - 1 - down - i >= 0 and BYTES - 1 - down - i < RIGHT:
                product = tl.dot(
                    _pick(left_0, left_1, left_2, i),
                    _pick(right_0, right_1, right_2, BYTES - 1 - down - i),
                    product,
                    input_precision="ieee",
                )
    return total + product * one


@triton.jit
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
    stride_width,
    stride_inner,
    one,
    TOKEN_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    EVEN: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out = tokens weight^T, or tokens (weight * scales of the tile's cluster)^T.

    The weight is the left operand, because the tensor cores take a left operand, split or scaled, from registers.
    """
    tile = tl.program_id(0)
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        mine, used = (row < count)[:, None], (column < width)[:, None]
        total = tl.zeros((WIDTH, TILE), dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            if EVEN:
                x = tl.load(tokens + row[:, None] * inner + depth[None, :], mask=mine, other=0.0)
                w = tl.load(weight + column[:, None] * stride_width + depth[None, :] * stride_inner, mask=used, other=0.0)
            else:
                left = (depth < inner)[None, :]
                x = tl.load(tokens + row[:, None] * inner + depth[None, :], mask=mine & left, other=0.0)
                w = tl.load(
                    weight + column[:, None] * stride_width + depth[None, :] * stride_inner, mask=used & left, other=0.0
                )
            if CLUSTERED:
                w = w.to(tl.float32) * tl.load(scales + cluster * inner + depth, mask=depth < inner, other=0.0)[None, :]
            total = _add_product(total, w, tl.trans(x), one, WEIGHT_PARTS, TOKEN_PARTS, 3, PART)
        tl.store(out + row[None, :] * width + column[:, None], total, mask=(row < count)[None, :] & used)


@triton.jit
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
    stride_width,
    stride_inner,
    one,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """grad weight (times the scales). It is rounded to half precision, for which two parts are plenty."""
    tile = tl.program_id(0)
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        feature = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        mine, used = (row < count)[:, None], (feature < inner)[None, :]
        total = tl.zeros((TILE, WIDTH), dtype=tl.float32)
        for start in range(0, width, DEPTH):
            column = (start + tl.arange(0, DEPTH)).to(tl.int64)
            g = tl.load(grad + row[:, None] * width + column[None, :], mask=mine & (column < width)[None, :], other=0.0)
            w = tl.load(
                weight + column[:, None] * stride_width + feature[None, :] * stride_inner,
                mask=(column < width)[:, None] & used,
                other=0.0,
            )
            total = _add_product(total, g, w, one, 2, WEIGHT_PARTS, 2, PART)
        if CLUSTERED:
            total = total * tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
        tl.store(out + row[:, None] * inner + feature[None, :], total, mask=mine & used)


@triton.jit
def _grad_weight(
    grad,
    tokens,
    order,
    owners,
    scales,
    out,
    count,
    rows,
    share,
    inner,
    width,
    one,
    GRAD_PARTS: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[s] = grad^T tokens (times the scales) over the s-th share of the tokens."""
    feature = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    column = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    split = tl.program_id(2)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for start in range(split * share, min(rows, (split + 1) * share), TILE):
        row = (start + tl.arange(0, TILE)).to(tl.int64)
        if CLUSTERED:
            row = tl.load(order + row).to(tl.int64)
        mine = (row < count)[:, None]
        g = tl.load(grad + row[:, None] * width + column[None, :], mask=mine & (column < width)[None, :], other=0.0)
        x = tl.load(tokens + row[:, None] * inner + feature[None, :], mask=mine & (feature < inner)[None, :], other=0.0)
        if CLUSTERED:
            cluster = tl.maximum(tl.load(owners + start // TILE), 0).to(tl.int64)
            factor = tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
        else:
            factor = one
        total = _add_product(total, tl.trans(g), x, factor, GRAD_PARTS, TOKEN_PARTS, GRAD_PARTS, PART)
    place = (split * width + column[:, None]) * inner + feature[None, :]
    tl.store(out + place, total, mask=(column < width)[:, None] & (feature < inner)[None, :])


@triton.jit
def _fold(parts, out, splits, size, BLOCK: tl.constexpr):
    """The sum over the first axis, in its order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total, mask=place < size)


Clusters = tuple[Tensor, Tensor, Tensor]  # the order of the tokens, whose each tile is, and every cluster's scales


def _tiles(count: int, clusters: Clusters | None, tile: int) -> int:
    return triton.cdiv(count, tile) if clusters is None else clusters[1].shape[0]


def linear(
    tokens: Tensor,
    weight: Tensor,
    clusters: Clusters | None,
    tile: int = TILE,
    depth: int = 64,
    num_warps: int = 4,
    num_stages: int = 4,
) -> Tensor:
    """`tokens (T,d)` times `weight (n,d)` transposed: (T,n), float32."""
    (count, inner), width = tokens.shape, weight.shape[0]
    out = torch.empty(count, width, dtype=torch.float32, device=tokens.device)
    _linear[(_tiles(count, clusters, tile), triton.cdiv(width, 64))](
        tokens,
        weight,
        *(clusters or (tokens, tokens, tokens)),
        out,
        count,
        inner,
        width,
        *weight.stride(),
        1.0,
        TOKEN_PARTS=PARTS[tokens.dtype],
        WEIGHT_PARTS=PARTS[weight.dtype] if clusters is None else 3,
        CLUSTERED=clusters is not None,
        EVEN=inner % depth == 0,
        PART=PART,
        TILE=tile,
        WIDTH=64,
        DEPTH=depth,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def grad_tokens(
    grad: Tensor,
    like: Tensor,
    weight: Tensor,
    clusters: Clusters | None,
    tile: int = TILE,
    features: int = 128,
    num_warps: int = 4,
) -> Tensor:
    """`grad (T,n)` times `weight (n,d)`, in the dtype of `like (T,d)`."""
    (count, inner), width = like.shape, weight.shape[0]
    out = torch.empty_like(like)
    _grad_tokens[(_tiles(count, clusters, tile), triton.cdiv(inner, features))](
        grad,
        weight,
        *(clusters or (grad, grad, grad)),
        out,
        count,
        inner,
        width,
        *weight.stride(),
        1.0,
        WEIGHT_PARTS=min(PARTS[weight.dtype], 2),
        CLUSTERED=clusters is not None,
        PART=PART,
        TILE=tile,
        WIDTH=features,
        DEPTH=64,
        num_warps=num_warps,
        num_stages=2,
    )
    return out


def grad_weight(
    grad: Tensor,
    tokens: Tensor,
    like: Tensor,
    clusters: Clusters | None,
    features: int = 128,
    programs: int = 256,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """`grad (T,n)` transposed times `tokens (T,d)`, in the dtype of `like (n,d)`."""
    (count, inner), width = tokens.shape, grad.shape[1]
    rows = count if clusters is None else clusters[0].shape[0]
    across, up = triton.cdiv(inner, features), triton.cdiv(width, 64)
    splits = max(1, min(programs // (across * up), triton.cdiv(rows, 4 * TILE)))
    share = triton.cdiv(triton.cdiv(rows, splits), TILE) * TILE
    out = torch.empty(splits, width, inner, dtype=torch.float32, device=grad.device)
    _grad_weight[(across, up, splits)](
        grad,
        tokens,
        *(clusters or (grad, grad, grad)),
        out,
        count,
        rows,
        share,
        inner,
        width,
        1.0,
        GRAD_PARTS=3 if like.dtype == torch.float32 else 2,
        TOKEN_PARTS=PARTS[tokens.dtype],
        CLUSTERED=clusters is not None,
        PART=PART,
        TILE=TILE,
        HEIGHT=64,
        WIDTH=features,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    total = torch.empty(width, inner, dtype=like.dtype, device=grad.device)
    _fold[(triton.cdiv(width * inner, 1024),)](out, total, splits, width * inner, BLOCK=1024)
    return total
