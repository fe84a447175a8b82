"""Numbers as sums of two 16-bit parts, for products of float32 quality on tensor cores. Imported only where Triton can run.

Tensor cores multiply 16-bit numbers exactly and add in float32. A float32 is taken apart into a first part, what it rounds
to, and a second, what is then left, and a product of two such sums is four products, of which the last may be left out.

halves      float16 parts of 11 bits each: 2^-23 is lost, which is float32's own rounding. Their range is narrow, so each row
            is first divided by a power of 2, its factor, that brings its largest number below 2^15
brains      bfloat16 parts of 8 bits each: 2^-17 is lost. They have the range of float32, and need no factors

The two parts lie side by side in a row.
"""

# mypy: ignore-errors
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.sizes import cdiv, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256  # columns of a part
BLOCK = 32  # rows taken apart by one program
HIGHEST = tl.constexpr(14)  # halves stay below 2^15


class Kinds(NamedTuple):
    """The dtypes of parts. Triton's interpreter has no product of bfloat16 and is given float16 for both."""

    half: torch.dtype = torch.float16
    brain: torch.dtype = torch.bfloat16


NATIVE = Kinds()


class Apart(NamedTuple):
    """Rows (G,M,width) as halves and as brains (G,M, parts * width), and the factors (G,M) of the halves.

    Without elements where they were not asked for; brains also where the rows are brains as they are.
    """

    halves: Tensor
    factors: Tensor
    brains: Tensor


class Operand(NamedTuple):
    """Rows (G,M, parts * width), how far apart groups and rows lie, and the factors (G,M) they are to be multiplied with."""

    at: Tensor
    group: int
    row: int
    factors: Tensor


@triton.jit
def parts_apart(
    operand, group, start, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ASK: tl.constexpr = True
):
    """The two parts of a tile from row `start`, the first again if there is but one; ASK: not all its rows need exist."""
    row = tl.arange(0, HEIGHT)[:, None]
    # Only what is the same for the whole tile needs 64 bits.
    place = operand.at + (group * operand.group + tl.cast(start, tl.int64) * operand.row)
    place += row * operand.row + tl.arange(0, WIDTH)[None, :]
    inside = None
    other = None
    if ASK:
        inside = start + row < rows
        other = 0.0
    first = tl.load(place, mask=inside, other=other)
    second = first
    if PARTS > 1:
        second = tl.load(place + WIDTH, mask=inside, other=other)
    return first, second


@triton.jit
def row_values(values, group, start, rows, HEIGHT: tl.constexpr, other, ASK: tl.constexpr = True):
    """Those of a tile's rows of `values (G, rows)`, and `other` past the last."""
    place = values + (group * rows + start) + tl.arange(0, HEIGHT)
    if ASK:
        return tl.load(place, mask=start + tl.arange(0, HEIGHT) < rows, other=other)
    else:  # noqa: RET505 - Triton wants one return on each way through
        return tl.load(place)


@triton.jit
def exponent(power):
    """The logarithm of powers of 2, exactly."""
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def inverse(power):
    """1 over powers of 2, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def product(total, left, other, LEFT: tl.constexpr, RIGHT: tl.constexpr, TURN: tl.constexpr):
    """total + left other (transposed if TURN) without the product of the second parts, the small ones first."""
    first = other[0]
    if TURN:
        first = tl.trans(first)
    if RIGHT > 1:
        second = other[1]
        if TURN:
            second = tl.trans(second)
        total = tl.dot(left[0], second, total)
    if LEFT > 1:
        total = tl.dot(left[1], first, total)
    return tl.dot(left[0], first, total)


@triton.jit
def in_two(numbers, KIND: tl.constexpr):
    first = numbers.to(KIND)
    return first, (numbers - first.to(tl.float32)).to(KIND)


@triton.jit
def _power_of_2(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_parts(numbers, out, place, inside, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        rounded = numbers.to(out.dtype.element_ty)
        tl.store(out + place + part * WIDTH, rounded, mask=inside)
        numbers -= rounded.to(tl.float32)


class Job(NamedTuple):
    """Rows (G,M,width) to take apart, and where to put what."""

    rows: Tensor
    real: Tensor
    halves: Tensor
    factors: Tensor
    brains: Tensor
    other: Tensor
    dots: Tensor
    count: int
    width: int
    group: int
    row: int
    column: int


@triton.jit
def _take_one_apart(
    job,
    HAS_REAL: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    BRAINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    own = row < job.count
    taken = own
    if HAS_REAL:
        taken = taken & (tl.load(job.real + group * job.count + row, mask=own, other=0) != 0)
    inside = taken[:, None] & (column < job.width)[None, :]
    place = group * job.group + row[:, None].to(tl.int64) * job.row + column[None, :] * job.column
    numbers = tl.load(job.rows + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_OTHER:
        place = (group * job.count + row[:, None]) * job.width + column[None, :]
        dots = tl.sum(numbers * tl.load(job.other + place, mask=inside, other=0.0), 1)
        tl.store(job.dots + group * job.count + row, dots, mask=own)
    row_start = (group * job.count + row[:, None]).to(tl.int64) * WIDTH
    if BRAINS > 0:
        _store_parts(numbers, job.brains, row_start * BRAINS + column[None, :], own[:, None], WIDTH, BRAINS)
    if HALVES > 0:
        # NaN and inf, which only their own row may suffer from, do not count; a row of zeros is left as it is.
        sizes = tl.abs(numbers)
        size = tl.max(tl.where(sizes < float("inf"), sizes, 0.0), 1)
        exponent = ((size.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        exponent = tl.where(size > 0, tl.minimum(tl.maximum(exponent, -60), 60), 0) - HIGHEST
        tl.store(job.factors + group * job.count + row, _power_of_2(exponent), mask=own)
        numbers *= _power_of_2(-exponent)[:, None]
        _store_parts(numbers, job.halves, row_start * HALVES + column[None, :], own[:, None], WIDTH, HALVES)


@triton.jit
def _take_apart(jobs, HOW: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    for index in tl.static_range(COUNT):
        if tl.program_id(2) == index:
            _take_one_apart(jobs[index], HOW[index][0], HOW[index][1], HOW[index][2], HOW[index][3], HOW[index][4], BLOCK)


def tile_width(width: int) -> int:
    """The least power of 2, which tiles are made of, and 16, which tensor cores take."""
    return max(16, next_power_of_2(width))


def as_halves(apart: Apart) -> Operand:
    return Operand(apart.halves, apart.halves.stride(0), apart.halves.stride(1), apart.factors)


def as_brains(apart: Apart, rows: Tensor) -> Operand:
    """Those of `rows`, or `rows` themselves where they need not be taken apart."""
    brains = apart.brains if apart.brains.numel() else rows
    return Operand(brains, brains.stride(0), brains.stride(1), apart.factors)


class Order(NamedTuple):
    """Parts that are yet to be made."""

    apart: Apart
    sums: Tensor
    job: Job
    how: tuple[bool, bool, int, int, int]  # of `_take_one_apart`


def order_apart(
    rows: Tensor,  # (G,M,width)
    real: Tensor | None = None,  # (G,M), contiguous; other rows become 0, whatever they hold, since 0 times NaN is NaN
    *,
    halves: int = 0,
    brains: int = 0,
    kinds: Kinds = NATIVE,
    other: Tensor | None = None,  # (G,M,width), contiguous: also give the sum over the width of rows * other
) -> Order:
    """Room for `rows` as so many halves and brains, and for the sums."""
    groups, count, width = rows.shape
    padded = tile_width(width)
    if brains == 1 and rows.dtype == kinds.brain and real is None and width == padded and rows.stride(2) == 1:
        brains = 0

    def room(parts: int, dtype: torch.dtype) -> Tensor:
        shape = (groups, count, parts * padded) if parts else (0, 0, 0)
        return torch.empty(shape, dtype=dtype, device=rows.device)

    sums = torch.empty((groups, count) if other is not None else (0, 0), dtype=torch.float32, device=rows.device)
    factors = torch.empty((groups, count) if halves else (0, 0), dtype=torch.float32, device=rows.device)
    apart = Apart(room(halves, kinds.half), factors, room(brains, kinds.brain))
    mask, beside = rows if real is None else real.view(torch.uint8), rows if other is None else other
    job = Job(rows, mask, *apart, beside, sums, count, width, *rows.stride())
    return Order(apart, sums, job, (real is not None, other is not None, padded, halves, brains))


def fill_orders(orders: Sequence[Order]) -> None:
    """All of them, of as many groups, in one launch."""
    due = [order for order in orders if any(order.how[index] for index in (1, 3, 4))]
    if due:
        groups = due[0].job.rows.shape[0]
        blocks = cdiv(max(order.job.count for order in due), BLOCK)
        how = tuple(order.how for order in due)
        _take_apart[groups, blocks, len(due)](tuple(order.job for order in due), HOW=how, COUNT=len(due), BLOCK=BLOCK)


def take_apart(rows: Tensor, real: Tensor | None = None, **how: Any) -> tuple[Apart, Tensor]:
    """`rows` as so many halves and brains, and the sums, as `order_apart` has them."""
    order = order_apart(rows, real, **how)
    fill_orders([order])
    return order.apart, order.sums
