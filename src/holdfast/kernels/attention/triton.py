"""Triton kernels for entropies of attention weights, for one head of many, and for norms of projected values.

**Entropies**, all heads in one launch. With t the score less the highest so far, total = sum exp(t) and moment = sum
t exp(t), the entropy is log(total) - moment / total: one pass, and no difference of large numbers. Keys that several heads
share are read where they lie.

**Norms**: a program computes a tile of products and adds up their squares, without storing the products.
"""

# mypy: ignore-errors
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.float32_parts import (
    DTYPES,
    WIDEST,
    Operand,
    bf16_operand,
    load_parts,
    product,
    split_rows,
    tile_width,
)
from holdfast.kernels.operators import cdiv, kernel, next_power_of_2
from holdfast.kernels.token_mixing.blocks import SAMPLED_BLOCK, sampled_count
from holdfast.kernels.token_mixing.launch import SMALL, Tiling, first_fitting
from holdfast.kernels.token_mixing.triton import LN_2, LOG2_E, allowed_only, key_spans, limit, mask_kind, mask_operand

ELEMENTS = 4096  # copied by one program
NORM_ROWS, NORM_COLUMNS = 64, 128  # of a tile of projected values
FAINT = tl.constexpr(-200.0)  # 2^-200 is 0 in float32, and 0 times this is 0, where 0 times -inf would be NaN
TILINGS = (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 1), *SMALL)  # at most SAMPLED_BLOCK rows


@triton.jit
def _add_tile(scores, factor, highest, total, moment, CLAMP: tl.constexpr):
    """Add a tile of scores, times a positive factor, to the running sums; CLAMP: some scores are -inf."""
    higher = tl.maximum(highest, tl.max(scores, 1) * factor)
    level = higher
    if CLAMP:
        level = tl.where(higher > -float("inf"), higher, 0.0)
    below = scores * factor - level[:, None]
    if CLAMP:
        below = tl.maximum(below, FAINT)
    weights = tl.exp2(below)
    shift = tl.maximum(highest - level, FAINT)
    fading = tl.exp2(shift)
    moment = fading * (moment + total * shift) + tl.sum(weights * below, 1)
    total = fading * total + tl.sum(weights, 1)
    return higher, total, moment


@kernel
def _entropy(
    query,
    key,
    real,
    mask,
    out,
    heads,
    key_heads,
    queries,
    looked_at,
    step,
    keys,
    query_batch,
    query_head,
    key_batch,
    key_head,
    scale,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the entropies of `looked_at` of the `queries`: of every `step`-th block of them, see `blocks.sampled`."""
    # A head's programs are neighbours, so that its keys are read from the cache; those with the most keys start first.
    blocks = tl.cdiv(looked_at, ROWS)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    of_query = batch * query_batch + head * query_head
    of_key = batch * key_batch + head * key_heads // heads * key_head
    of_mask = batch * mask.batch + head * mask.head
    place = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    first = (place // BLOCK * step + step // 2) * BLOCK + place % BLOCK
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    q = load_parts(query, of_query, first, queries, ROWS, WIDTH, PARTS)
    factor = scale * LOG2_E
    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    plain, last = key_spans(first, queries, keys, ROWS, COLUMNS, CAUSAL, HAS_REAL or MASK != 0)
    if plain > 0:
        # Tensor cores compute the next tile's product while the exponentials of this one are taken.
        k = load_parts(key, of_key, 0, keys, COLUMNS, WIDTH, PARTS, False)
        scores = product(nothing, q, k, PARTS, PARTS, True)
        for start in range(COLUMNS, plain, COLUMNS):
            k = load_parts(key, of_key, start, keys, COLUMNS, WIDTH, PARTS, False)
            following = product(nothing, q, k, PARTS, PARTS, True)
            highest, total, moment = _add_tile(scores, factor, highest, total, moment, False)
            scores = following
        highest, total, moment = _add_tile(scores, factor, highest, total, moment, False)
    for start in range(plain, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_parts(key, of_key, start, keys, COLUMNS, WIDTH, PARTS)
        scores = product(nothing, q, k, PARTS, PARTS, True) * factor
        scores = allowed_only(
            scores, limits, row[:, None], column[None, :], batch, of_mask, queries, keys, real, mask, HAS_REAL, MASK
        )
        highest, total, moment = _add_tile(scores, 1.0, highest, total, moment, True)
    safe = tl.where(total > 0, total, 1.0)
    entropy = (tl.log2(safe) - moment / safe) * LN_2
    tl.store(out + (batch * heads + head) * looked_at + place + tl.arange(0, ROWS), entropy, mask=row < queries)


def _operand(rows: Tensor, as_is: bool) -> tuple[Operand, int, int]:
    """Return rows (B,H,N,D) as an operand, and the strides of batches and heads; the operand counts groups in elements."""
    if as_is:
        return Operand(rows, 1, rows.stride(2), rows), rows.stride(0), rows.stride(1)
    parts, _ = split_rows(rows.flatten(0, 1), bf16=2)
    operand = bf16_operand(parts, rows)
    return operand._replace(group=1), rows.shape[1] * operand.group, operand.group


def supports_entropy(query: Tensor, key: Tensor, scale: float) -> bool:
    """Return whether the kernel takes rows of this width and these dtypes, none of them empty."""
    known = query.dtype in DTYPES and key.dtype == query.dtype and scale > 0
    return known and query.shape[-1] <= WIDEST and query.numel() > 0 and key.numel() > 0


def entropy(
    query: Tensor,  # (B,H,N,D)
    key: Tensor,  # (B,key heads,M,D)
    real: Tensor | None,  # (B,M)
    mask: Tensor | None,  # (B,H,N,M), or 1 in place of any of them
    causal: bool,
    scale: float,
    step: int = 1,
) -> Tensor:
    """Return (B,H,n) float32: the entropies of every `step`-th block of queries."""
    batches, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    narrow = query.dtype in (torch.bfloat16, torch.float16) and width == tile_width(width)
    as_is = narrow and query.stride(3) == key.stride(3) == 1
    q, *query_strides = _operand(query, as_is)
    k, *key_strides = _operand(key, as_is)
    parts = 1 if as_is else 2
    looked_at = sampled_count(queries, step)
    out = torch.empty(batches, heads, looked_at, dtype=torch.float32, device=query.device)
    tile_bytes = 2 * parts * tile_width(width)
    tiling = first_fitting(TILINGS, lambda tiling: tile_bytes * (tiling.rows + tiling.stages * tiling.columns), query.device)
    limits = query if real is None else real.contiguous().view(torch.uint8), mask_operand(mask, query)
    sizes = heads, key_heads, queries, looked_at, step, keys, *query_strides, *key_strides
    limited = {"CAUSAL": causal, "HAS_REAL": real is not None, "MASK": mask_kind(mask), "BLOCK": SAMPLED_BLOCK}
    _entropy[(cdiv(looked_at, tiling.rows) * batches * heads,)](
        q, k, *limits, out, *sizes, scale, WIDTH=tile_width(width), PARTS=parts, **limited, **tiling.options
    )
    return out


class HeadSource(NamedTuple):
    """Rows (B,H,N,D) with their strides, and the memory for one head of them."""

    at: Tensor
    batch: int
    head: int
    row: int
    column: int
    batches: int  # B
    own: int  # H
    count: int  # N
    width: int  # D
    out: Tensor


@kernel
def _take_heads(sources, head, heads, shapes: tl.constexpr):
    """Copy one head of the source that the grid's third axis selects. `shapes`: rows and columns of a tile of each."""
    for index in tl.static_range(len(shapes)):
        if tl.program_id(2) == index:
            source = sources[index]
            batch = tl.program_id(0).to(tl.int64)
            row = (tl.program_id(1) * shapes[index][0] + tl.arange(0, shapes[index][0])).to(tl.int64)[:, None]
            column = tl.arange(0, shapes[index][1])[None, :]
            count = source.count * (batch < source.batches).to(tl.int64)
            inside = (row < count) & (column < source.width)
            place = batch * source.batch + tl.load(head) * source.own // heads * source.head
            values = tl.load(source.at + place + row * source.row + column * source.column, mask=inside)
            tl.store(source.out + (batch * source.count + row) * source.width + column, values, mask=inside)


@kernel
def _put_head(rows, head, out, heads, own, elements, BLOCK: tl.constexpr):
    batch = (tl.program_id(0) // own).to(tl.int64)
    place = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    own_place = place < elements * (tl.program_id(0) % own == tl.load(head) * own // heads).to(tl.int64)
    values = tl.load(rows + batch * elements + place, mask=own_place, other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * elements + place, values, mask=place < elements)


def take_heads(head: Tensor, rows: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return, for each of `rows (B,H,N,D)`, the head that head `head` of `heads` reads: (B,N,D)."""
    outs = [torch.empty(each.shape[0], *each.shape[2:], dtype=each.dtype, device=each.device) for each in rows]
    widths = [next_power_of_2(each.shape[3]) for each in rows]
    shapes = tuple((max(1, ELEMENTS // width), width) for width in widths)
    blocks = [cdiv(each.shape[2], height) for each, (height, _) in zip(rows, shapes, strict=True)]
    sources = tuple(HeadSource(each, *each.stride(), *each.shape, out) for each, out in zip(rows, outs, strict=True))
    _take_heads[max(each.shape[0] for each in rows), max(blocks), len(rows)](sources, head, heads, shapes=shapes)
    return outs


def put_head(rows: Tensor, head: Tensor, heads: int, own: int) -> Tensor:
    """Return (B,own,N,D): contiguous `rows (B,N,D)` as the head that head `head` of `heads` reads, 0 in the others."""
    out = torch.empty(rows.shape[0], own, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    elements = rows[0].numel()
    _put_head[rows.shape[0] * own, cdiv(elements, ELEMENTS)](rows, head, out, heads, own, elements, BLOCK=ELEMENTS)
    return out


@kernel
def _projected_norms(
    value,
    across,
    bias,
    out,
    count,
    width,
    dim,
    heads,
    stride_row,
    stride_column,
    stride_down,
    stride_across,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inner = tl.arange(0, WIDTH)
    own = value + row[:, None] * stride_row + inner[None, :] * stride_column
    v = tl.load(own, mask=(row < count)[:, None] & (inner < width)[None, :], other=0.0)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, dim, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        place = across + inner[:, None] * stride_down + column[None, :] * stride_across
        w = tl.load(place, mask=(inner < width)[:, None] & (column < dim)[None, :], other=0.0)
        projected = tl.dot(v, w) * heads
        if HAS_BIAS:
            projected += tl.load(bias + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(projected * projected, 1)
    tl.store(out + row, total, mask=row < count)


def projected_norms(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Return (T,) float32: |heads across^T v + bias|^2 for `value (T,D)`, `across (D,d)` and `bias (d,)`."""
    (count, width), dim = value.shape, across.shape[1]
    out = torch.empty(count, dtype=torch.float32, device=value.device)
    operands = value, across, value if bias is None else bias, out
    sizes = count, width, dim, float(heads), *value.stride(), *across.stride()
    tile = {"WIDTH": tile_width(width), "ROWS": NORM_ROWS, "COLUMNS": NORM_COLUMNS}
    _projected_norms[(cdiv(count, NORM_ROWS),)](
        *operands, *sizes, HAS_BIAS=bias is not None, **tile, num_warps=4, num_stages=3
    )
    return out
