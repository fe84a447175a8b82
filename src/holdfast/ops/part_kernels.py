"""Numbers as sums of bfloat16 parts, for products of float32 quality on tensor cores. Imported only where Triton can run.

Tensor cores multiply bfloat16 exactly and add in float32. A bfloat16 is one part, a float16 two, a float32 three, without a
loss. Of a product of two sums those terms are kept whose parts' places, counted from 0, add up to at most ORDER: 2 leaves
out what float32 would round off, 1 what is below 2^-16.
"""

# mypy: ignore-errors
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
WIDEST = 256  # columns of a tile
BLOCK = 32  # rows taken apart by one program


class Operand(NamedTuple):
    """Parts that add up to rows (G,M,width), and how far apart parts, groups and rows lie; columns lie side by side."""

    at: Tensor
    part: int
    group: int
    row: int


@triton.jit
def _tile(operand, part, group, row, rows, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    start = operand.at + part * operand.part + group * operand.group
    return tl.load(start + row[:, None].to(tl.int64) * operand.row + column[None, :], mask=(row < rows)[:, None], other=0.0)


@triton.jit
def tiles(operand, group, row, rows, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Always three, so that callers have one shape; those past PARTS are never used."""
    first = _tile(operand, 0, group, row, rows, WIDTH)
    second = first
    third = first
    if PARTS > 1:
        second = _tile(operand, 1, group, row, rows, WIDTH)
    if PARTS > 2:
        third = _tile(operand, 2, group, row, rows, WIDTH)
    return first, second, third


@triton.jit
def product(total, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, ORDER: tl.constexpr, TURN: tl.constexpr):
    """total + left right, or right transposed if TURN; the small terms first."""
    for i in tl.static_range(LEFT):
        for j in tl.static_range(RIGHT):
            if LEFT - 1 - i + RIGHT - 1 - j <= ORDER:
                other = right[RIGHT - 1 - j]
                if TURN:
                    other = tl.trans(other)
                total = tl.dot(left[LEFT - 1 - i], other, total)
    return total


@triton.jit
def in_two(numbers, like):
    """The first two parts, twice the last so that callers have one shape."""
    first = numbers.to(like.dtype)
    second = (numbers - first.to(tl.float32)).to(like.dtype)
    return first, second, second


@triton.jit
def _split(
    rows,
    real,
    out,
    count,
    width,
    stride_group,
    stride_row,
    stride_part,
    stride_column,
    HAS_REAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    taken = row < count
    if HAS_REAL:
        taken = taken & (tl.load(real + group * count + row, mask=taken, other=0) != 0)
    place = group * stride_group + row[:, None].to(tl.int64) * stride_row + column[None, :] * stride_column
    rest = tl.load(rows + place, mask=taken[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    place = (group * count + row[:, None]) * WIDTH + column[None, :]
    for part in tl.static_range(PARTS):
        rounded = rest.to(out.dtype.element_ty)
        tl.store(out + part * stride_part + place, rounded, mask=(row < count)[:, None])
        rest -= rounded.to(tl.float32)


@triton.jit
def _split_gradient(grad, mixed, out, centre, count, width, stride_part, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < width)[None, :]
    place = (group * count + row[:, None]) * width + column[None, :]
    rest = tl.load(grad + place, mask=inside, other=0.0)
    dots = tl.sum(rest * tl.load(mixed + place, mask=inside, other=0.0), 1)
    tl.store(centre + group * count + row, dots, mask=row < count)
    place = (group * count + row[:, None]) * WIDTH + column[None, :]
    for part in tl.static_range(2):
        rounded = rest.to(out.dtype.element_ty)
        tl.store(out + part * stride_part + place, rounded, mask=(row < count)[:, None])
        rest -= rounded.to(tl.float32)


def tile_width(width: int) -> int:
    """The least power of 2, which tiles are made of, and 16, which tensor cores take."""
    return max(16, triton.next_power_of_2(width))


def split(rows: Tensor, real: Tensor | None, kind: torch.dtype, most: int = 3) -> Operand:
    """rows (G,M,width) as at most `most` parts; those that are not real as 0, whatever they hold: 0 times NaN is NaN."""
    groups, count, width = rows.shape
    padded = tile_width(width)
    if real is None and rows.dtype == kind and width == padded and rows.stride(2) == 1:
        return Operand(rows, 0, rows.stride(0), rows.stride(1))
    parts = min(most, PARTS[rows.dtype])
    out = torch.empty(parts, groups, count, padded, dtype=kind, device=rows.device)
    grid = (groups, triton.cdiv(count, BLOCK))
    _split[grid](
        rows,
        rows if real is None else real.view(torch.uint8),
        out,
        count,
        width,
        rows.stride(0),
        rows.stride(1),
        out.stride(0),
        rows.stride(2),
        HAS_REAL=real is not None,
        WIDTH=padded,
        PARTS=parts,
        BLOCK=BLOCK,
    )
    return Operand(out, out.stride(0), out.stride(1), out.stride(2))


def split_gradient(grad: Tensor, mixed: Tensor, kind: torch.dtype) -> tuple[Operand, Tensor]:
    """grad (G,N,n), contiguous, as two parts; and the sum over n of grad * mixed."""
    groups, count, width = grad.shape
    padded = tile_width(width)
    out = torch.empty(2, groups, count, padded, dtype=kind, device=grad.device)
    centre = torch.empty(groups, count, dtype=torch.float32, device=grad.device)
    grid = (groups, triton.cdiv(count, BLOCK))
    _split_gradient[grid](grad, mixed, out, centre, count, width, out.stride(0), WIDTH=padded, BLOCK=BLOCK)
    return Operand(out, out.stride(0), out.stride(1), out.stride(2)), centre
