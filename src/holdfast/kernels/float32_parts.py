"""Float32 numbers as sums of 16-bit parts, for products of float32 quality on tensor cores (Triton).

**The problem.** Tensor cores multiply 16-bit numbers exactly and add the products in float32. Their own float32 mode, TF32,
keeps 11 bits of each factor, which moves router scores by more than the gap between two experts.

**The way out.** Write a number as a sum of parts: the first is the number in 16 bits, the next is what is then left, and so
on. A product of two such sums is a sum of products of parts. With b bits a part, the product of parts i and j (from 0) is
about 2^-b(i+j) of the whole, and products that are smaller than float32's own rounding are left out. For example, the
float32 number nearest to 0.1 is 0.10009765625 - 0.00009775161743164 + ... in bfloat16 parts: one part is off by 1e-3 of it,
two parts by 1e-6, three by nothing; two float16 parts are off by 7e-8.

**The choices**, where b counts the leading bit:

    parts             bits        lost        range               used for
    3 bfloat16        8 + 8 + 8   nothing     that of float32     logits and their gradients (fp32_linear); a float16
                                                                  number is two parts, a bfloat16 number one
    2 float16         11 + 11     2^-23       2^-24 to 2^16       scores and outputs (token_mixing)
    2 bfloat16        8 + 8       2^-17       that of float32     gradients (token_mixing), entropies (attention)

2^-23 is float32's own rounding. The range of float16 is narrow: each row is first divided by a power of 2, its factor, so
that its largest number lies just below 2^15. A row has a factor of its own, so that no other row can change its last bit.
Gradients may have any size, and three parts of everything would take six products instead of three.

Three parts are cut off instead of rounded: their sum is the number itself, and the largest float32 does not round to
infinity. Two parts are rounded, which gains a bit. Parts of a row lie side by side in memory (`load_parts`), or parts of
whole matrices one after the other (`load_bf16_parts`).

**Sums.** Tensor cores truncate where float32 rounds, so long sums are added up outside of them. Relative errors of logits
against float64 on an H200 (4096 tokens of width 2048, 64 experts), and of mixed outputs over 2048 keys of one sign:

    logits, three bfloat16 parts      1.0e-7 (bfloat16 weights), 1.1e-7 (float32 weights); IEEE float32: 0.65e-7, 1.2e-7
    logits, one long sum inside       2.1e-6
    mixed outputs, sums outside       5e-7; inside: 8e-6
"""

# mypy: ignore-errors
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256  # columns of a part that fit into a tile
STEP = 64  # wider parts have a multiple of this many columns, for kernels that read them in chunks
BLOCK = 32  # rows split by one program, up to WIDEST columns
WIDE_BLOCK = 4096  # numbers split by one program, of wider rows
HIGHEST = tl.constexpr(14)  # float16 parts stay below 2^15
# Triton's interpreter has no bfloat16 product, because numpy has none. There the parts of numbers in a kernel are float32,
# with the same values, and those that lie in memory are float16.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16_PART = tl.constexpr(tl.float32 if IS_INTERPRETED else tl.bfloat16)
STORED_BF16 = torch.float16 if IS_INTERPRETED else torch.bfloat16


@triton.jit
def _leading(x):
    """Return the first 8 bits of a float32, cut off instead of rounded."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def bf16_parts(x, PARTS: tl.constexpr):
    """Return three bfloat16 parts of x, the largest first; if PARTS is less than 3, the last one is repeated."""
    if PARTS == 1:
        return x.to(BF16_PART), x.to(BF16_PART), x.to(BF16_PART)
    rest = x.to(tl.float32)
    first = _leading(rest)
    rest = rest - first  # NaN if x is infinite, which `require_finite` reports as well
    if PARTS == 2:
        return first.to(BF16_PART), rest.to(BF16_PART), rest.to(BF16_PART)
    second = _leading(rest)
    return first.to(BF16_PART), second.to(BF16_PART), (rest - second).to(BF16_PART)


@triton.jit
def bf16_product(
    left, right, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BYTES: tl.constexpr
):
    """Return left right from LEFT and RIGHT parts; parts i and j are multiplied if i + j < BYTES, the smallest first."""
    product = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for down in tl.static_range(BYTES):
        for i in tl.static_range(LEFT):
            if BYTES - 1 - down - i >= 0 and BYTES - 1 - down - i < RIGHT:
                product = tl.dot(left[i], right[BYTES - 1 - down - i], product, input_precision="ieee")
    return product


@triton.jit
def load_bf16_parts(parts, size, places, mask, COUNT: tl.constexpr):
    """Load three parts that lie `size` elements apart; if COUNT is less than 3, the last one is repeated."""
    first = tl.load(parts + places, mask=mask, other=0.0).to(BF16_PART)
    second, third = first, first
    if COUNT > 1:
        second = tl.load(parts + size + places, mask=mask, other=0.0).to(BF16_PART)
        third = second
    if COUNT > 2:
        third = tl.load(parts + 2 * size + places, mask=mask, other=0.0).to(BF16_PART)
    return first, second, third


class Parts(NamedTuple):
    """Rows (G,M,width) as float16 and as bfloat16 parts (G,M, parts * width), and the factors (G,M) of the float16 parts.

    Tensors that were not asked for are empty. So are bfloat16 parts of rows that can be used as they are.
    """

    fp16: Tensor
    factors: Tensor
    bf16: Tensor


class Operand(NamedTuple):
    """Rows (G,M, parts * width) for a kernel: strides of groups and rows, and the factors (G,M) to multiply them with."""

    at: Tensor
    group: int
    row: int
    factors: Tensor


@triton.jit
def load_parts(
    operand, group, start, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ASK: tl.constexpr = True
):
    """Load the two parts of a tile from row `start`, the first twice if PARTS is 1; ASK: some rows may lie past the last."""
    return load_chunk(operand, group, start, rows, 0, HEIGHT, WIDTH, WIDTH, PARTS, ASK)


@triton.jit
def load_chunk(
    operand,
    group,
    start,
    rows,
    column,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ASK: tl.constexpr,
):
    """Load CHUNK columns, from `column` on, of two parts that are WIDTH wide. Other arguments are those of `load_parts`."""
    row = tl.arange(0, HEIGHT)[:, None]
    # Only what is the same for the whole tile needs 64 bits.
    place = operand.at + (group * operand.group + tl.cast(start, tl.int64) * operand.row + column)
    place += row * operand.row + tl.arange(0, CHUNK)[None, :]
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
    """Load one number for each row of a tile from `values (G, rows)`; `other` for rows past the last."""
    place = values + (group * rows + start) + tl.arange(0, HEIGHT)
    if ASK:
        return tl.load(place, mask=start + tl.arange(0, HEIGHT) < rows, other=other)
    return tl.load(place)


@triton.jit
def exponent(power):
    """Return the base-2 logarithm of powers of 2, exactly."""
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def inverse(power):
    """Return 1 over powers of 2, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def product(total, left, other, LEFT: tl.constexpr, RIGHT: tl.constexpr, TURN: tl.constexpr):
    """Return total + left other (transposed if TURN), without the product of the second parts; small products first."""
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
def two_parts(numbers, KIND: tl.constexpr):
    """Return two rounded parts of dtype KIND."""
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


class SplitJob(NamedTuple):
    """Rows (G,M,width) to split into parts, and where to write them."""

    rows: Tensor
    real: Tensor
    fp16: Tensor
    factors: Tensor
    bf16: Tensor
    other: Tensor
    dots: Tensor
    count: int
    width: int
    group: int
    row: int
    column: int


@triton.jit
def _split_rows_of_job(
    job,
    HAS_REAL: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    WIDTH: tl.constexpr,  # of a part
    SPAN: tl.constexpr,  # the next power of 2
    FP16_PARTS: tl.constexpr,
    BF16_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, SPAN)
    own = row < job.count
    kept = own[:, None]
    if SPAN > WIDTH:
        kept = kept & (column < WIDTH)[None, :]
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
    if BF16_PARTS > 0:
        _store_parts(numbers, job.bf16, row_start * BF16_PARTS + column[None, :], kept, WIDTH, BF16_PARTS)
    if FP16_PARTS > 0:
        # NaN and inf are ignored, so that they spoil only themselves; the factor of a row of zeros is 1 / 2^14.
        sizes = tl.abs(numbers)
        size = tl.max(tl.where(sizes < float("inf"), sizes, 0.0), 1)
        exponent = ((size.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        exponent = tl.where(size > 0, tl.minimum(tl.maximum(exponent, -60), 60), 0) - HIGHEST
        tl.store(job.factors + group * job.count + row, _power_of_2(exponent), mask=own)
        numbers *= _power_of_2(-exponent)[:, None]
        _store_parts(numbers, job.fp16, row_start * FP16_PARTS + column[None, :], kept, WIDTH, FP16_PARTS)


@kernel
def _split_rows(jobs, HOW: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Run one job for each index of the grid's third axis."""
    for index in tl.static_range(COUNT):
        if tl.program_id(2) == index:
            _split_rows_of_job(
                jobs[index], HOW[index][0], HOW[index][1], HOW[index][2], HOW[index][3], HOW[index][4], HOW[index][5], BLOCK
            )


def tile_width(width: int) -> int:
    """Return `width` rounded up to a size that tiles can have: a power of 2, and at least 16 for tensor cores."""
    return max(16, next_power_of_2(width))


def part_width(width: int) -> int:
    """Return how many columns a part of rows of this width has: `tile_width`, or above WIDEST a multiple of STEP."""
    return tile_width(width) if width <= WIDEST else cdiv(width, STEP) * STEP


def fp16_operand(parts: Parts) -> Operand:
    """Return the float16 parts as a kernel's operand."""
    return Operand(parts.fp16, parts.fp16.stride(0), parts.fp16.stride(1), parts.factors)


def bf16_operand(parts: Parts, rows: Tensor) -> Operand:
    """Return the bfloat16 parts of `rows` as a kernel's operand, or `rows` themselves where they need not be split."""
    bf16 = parts.bf16 if parts.bf16.numel() else rows
    return Operand(bf16, bf16.stride(0), bf16.stride(1), parts.factors)


class PlannedSplit(NamedTuple):
    """Rows to split: the memory for their parts, which `run_splits` fills."""

    parts: Parts
    sums: Tensor
    job: SplitJob
    how: tuple[bool, bool, int, int, int, int]  # compile-time arguments of `_split_rows_of_job`


def plan_split(
    rows: Tensor,  # (G,M,width)
    real: Tensor | None = None,  # (G,M), contiguous; other rows become 0, whatever they hold, since 0 times NaN is NaN
    *,
    fp16: int = 0,
    bf16: int = 0,
    other: Tensor | None = None,  # (G,M,width), contiguous: also compute the sum over the width of rows * other
) -> PlannedSplit:
    """Allocate memory for `fp16` float16 parts and `bf16` bfloat16 parts of the rows, and for the sums."""
    groups, count, width = rows.shape
    padded = part_width(width)
    if bf16 == 1 and rows.dtype == STORED_BF16 and real is None and width == padded and rows.stride(2) == 1:
        bf16 = 0

    def empty(parts: int, dtype: torch.dtype) -> Tensor:
        shape = (groups, count, parts * padded) if parts else (0, 0, 0)
        return torch.empty(shape, dtype=dtype, device=rows.device)

    sums = torch.empty((groups, count) if other is not None else (0, 0), dtype=torch.float32, device=rows.device)
    factors = torch.empty((groups, count) if fp16 else (0, 0), dtype=torch.float32, device=rows.device)
    parts = Parts(empty(fp16, torch.float16), factors, empty(bf16, STORED_BF16))
    mask, other_rows = rows if real is None else real.view(torch.uint8), rows if other is None else other
    job = SplitJob(rows, mask, *parts, other_rows, sums, count, width, *rows.stride())
    return PlannedSplit(parts, sums, job, (real is not None, other is not None, padded, next_power_of_2(padded), fp16, bf16))


def run_splits(splits: Sequence[PlannedSplit]) -> None:
    """Fill the memory of all these splits, which have equally many groups, in one launch."""
    due = [split for split in splits if any(split.how[index] for index in (1, 4, 5))]
    if due:
        groups = due[0].job.rows.shape[0]
        span = max(split.how[3] for split in due)
        block = BLOCK if span <= WIDEST else max(1, WIDE_BLOCK // span)
        blocks = cdiv(max(split.job.count for split in due), block)
        how = tuple(split.how for split in due)
        _split_rows[groups, blocks, len(due)](tuple(split.job for split in due), HOW=how, COUNT=len(due), BLOCK=block)


def split_rows(rows: Tensor, real: Tensor | None = None, **how: Any) -> tuple[Parts, Tensor]:
    """Split `rows` into parts; return them and the sums. The arguments are those of `plan_split`."""
    split = plan_split(rows, real, **how)
    run_splits([split])
    return split.parts, split.sums
