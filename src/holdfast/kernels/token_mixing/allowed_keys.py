"""Which keys a query may attend to, in tiles of scores (Triton)."""

# mypy: ignore-errors
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Mask(NamedTuple):
    """A mask (B,H,N,M) with its strides, 0 where it repeats."""

    at: Tensor
    batch: int
    head: int
    row: int
    column: int


@triton.jit
def limit(row, queries, keys, CAUSAL: tl.constexpr):
    """Return the key before which each row has to stop, so that causality and length take one comparison a score."""
    end = keys
    if CAUSAL:
        end = tl.minimum(row + keys - queries + 1, keys)
    return tl.where(row < queries, end, 0)


@triton.jit
def allowed_only(
    scores,
    limits,
    row,
    column,
    group,
    start,
    queries,
    keys,
    real,
    mask,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return `scores`, in units of log 2, plus what a mask adds, and -inf where a query may not attend; in any orientation.

    `real` is indexed by `group`; the mask of the group starts at `start`.
    """
    allowed = column < limits
    if HAS_REAL:
        allowed = allowed & (tl.load(real + group * keys + column, mask=column < keys, other=0) != 0)
    if MASK != 0:
        place = mask.at + start + row.to(tl.int64) * mask.row + column.to(tl.int64) * mask.column
        given = tl.load(place, mask=(column < keys) & (row < queries), other=0)
        if MASK == 1:
            allowed = allowed & (given != 0)
        else:
            # The least float32 times log2(e) would be -inf, and a row of nothing else would not be uniform.
            given = given.to(tl.float32)
            scores += tl.where(given > -float("inf"), tl.maximum(given, -2e38), given) * LOG2_E
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def key_spans(first, queries, keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, ALWAYS: tl.constexpr):
    """Return up to which key every row from `first` may attend to all keys, and before which key the last row stops.

    Up to the first of the two, a multiple of COLUMNS, scores need no checks. ALWAYS: it is 0, since all need them.
    """
    plain = keys // COLUMNS * COLUMNS
    last = keys
    if CAUSAL:
        seen = keys - queries + first
        plain = tl.maximum(tl.minimum(plain, (seen + 1) // COLUMNS * COLUMNS), 0)
        last = tl.minimum(keys, seen + ROWS)
    if ALWAYS:
        plain = 0
    return plain, last


def mask_kind(mask: Tensor | None) -> int:
    """Return 0 for no mask, 1 for a bool one, 2 for one that is added to the scores."""
    return 0 if mask is None else 1 if mask.dtype == torch.bool else 2


def mask_operand(mask: Tensor | None, otherwise: Tensor) -> Mask:
    """Return the mask (B,H,N,M), or 1 in place of any of them, for a kernel; without one, `otherwise`, never read."""
    if mask is None:
        return Mask(otherwise, 0, 0, 0, 0)
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, *strides)
