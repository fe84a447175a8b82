"""Triton functions for mixing by vectors that are too wide for a tile: see triton.py for the others.

    G groups, N queries, M keys; the queries are the last N of the M positions
    slope_ij is the gradient of the score of query i and key j

A score is summed over chunks of the width. Each chunk's sum is one of tensor cores, and is added up outside of them, because
they truncate where float32 rounds.

A program has no room for the gradient of a block of wide rows. So the kernel over keys (`triton.key_gradient`) writes the
slopes as bfloat16 parts (parts, G, keys, queries), keys down, for as many keys at a time as `launch.SLOPES_HELD` allows, and
`slope_product` multiplies them with the vectors:

    gradient of query i = scale sum_j slope_ij key_j         gradient of key j = scale sum_i slope_ij query_i

With `causal`, tiles in which no query may attend to a key are neither computed nor read. Both kernels have tiles of their
own sizes, and `slope_product` reads up to `reach` queries before the first that may attend to a key: there slopes are set
to 0.
"""

# mypy: ignore-errors
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.float32_parts import load_chunk, product, row_values, two_parts


class Slopes(NamedTuple):
    """The slopes of some keys, for a kernel."""

    at: Tensor  # (parts, G, span, length); not read where the kernel writes no slopes
    part: int  # numbers of a part, the product of the other three
    span: int  # keys, with padding
    length: int  # queries, with padding
    origin: int  # the first of the keys
    reach: int  # see above


@triton.jit
def _chunked_product(
    left,
    right,
    group,
    left_start,
    left_rows,
    start,
    rows,
    scale,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT_PARTS: tl.constexpr,
    RIGHT_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ASK: tl.constexpr,
):
    """Return scale left right^T (LEFT, RIGHT)."""
    # Multiplying each chunk by the scale keeps the compiler from leaving the whole sum to the tensor cores.
    total = tl.zeros((LEFT, RIGHT), tl.float32)
    for column in range(0, WIDTH, CHUNK):
        a = load_chunk(left, group, left_start, left_rows, column, LEFT, CHUNK, WIDTH, LEFT_PARTS, True)
        b = load_chunk(right, group, start, rows, column, RIGHT, CHUNK, WIDTH, RIGHT_PARTS, ASK)
        total += product(tl.zeros((LEFT, RIGHT), tl.float32), a, b, LEFT_PARTS, RIGHT_PARTS, True) * scale
    return total


@triton.jit
def chunked_scores(
    left,
    right,
    group,
    left_start,
    left_rows,
    start,
    rows,
    scale,
    left_factors,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT_PARTS: tl.constexpr,
    RIGHT_PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
    ASK: tl.constexpr,
):
    """Return scale times the product (LEFT, RIGHT) of two tiles of wide rows; SCALED: times the factors of both sides.

    ASK: some rows of the right tile may lie past the last.
    """
    scores = _chunked_product(
        left, right, group, left_start, left_rows, start, rows, scale,
        LEFT, RIGHT, WIDTH, LEFT_PARTS, RIGHT_PARTS, CHUNK, ASK,
    )  # fmt: skip
    if SCALED:
        scores = scores * left_factors * row_values(right.factors, group, start, rows, RIGHT, 1.0, ASK)[None, :]
    return scores


@triton.jit
def store_slopes(numbers, slopes, group, column, row, PARTS: tl.constexpr):
    """Write a tile of slopes, keys `column` down and queries `row` across, as parts."""
    place = slopes.at + group * slopes.span * slopes.length
    place += (column - slopes.origin)[:, None] * slopes.length + row[None, :]
    first, second = two_parts(numbers, slopes.at.dtype.element_ty)
    tl.store(place, first)
    if PARTS > 1:
        tl.store(place + slopes.part, second)


@triton.jit
def clear_slopes(slopes, group, column, sees, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Set the slopes of up to `reach` queries before row `first` to 0. `sees`: the first row that may attend to a key."""
    for start in range(tl.maximum(sees - slopes.reach, 0) // ROWS * ROWS, first, ROWS):
        nothing = tl.zeros((COLUMNS, ROWS), tl.float32)
        store_slopes(nothing, slopes, group, column, start + tl.arange(0, ROWS), PARTS)


@triton.jit
def _load_slopes(slopes, group, inside, place, PARTS: tl.constexpr, ASK: tl.constexpr):
    """Load both parts of a tile at `place`, the first twice if PARTS is 1; ASK: 0 where not `inside`."""
    place = slopes.at + group * slopes.span * slopes.length + place
    mask = None
    other = None
    if ASK:
        mask = inside
        other = 0.0
    first = tl.load(place, mask=mask, other=other)
    second = first
    if PARTS > 1:
        second = tl.load(place + slopes.part, mask=mask, other=other)
    return first, second


@triton.jit
def slope_product(
    slopes,
    query,
    key,
    out,
    held,
    queries,
    keys,
    width,
    scale,
    WIDTH: tl.constexpr,
    SLOPES: tl.constexpr,  # parts
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    OF_QUERIES: tl.constexpr,  # write the gradient of queries
    OF_KEYS: tl.constexpr,  # of the `held` keys whose slopes are given; with both, the sum, for keys that equal queries
    ADD: tl.constexpr,  # to what is there
    ASK_QUERIES: tl.constexpr,  # the last step over queries is not a full one
    ASK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write a tile of the gradient of queries or keys: all columns of a block of rows, then the next block."""
    total_rows = queries
    count = queries
    origin = 0
    if not OF_QUERIES:
        total_rows = keys
        count = held
        origin = slopes.origin
    blocks = tl.cdiv(count, ROWS)
    index = tl.program_id(0)
    across = index % (WIDTH // COLUMNS) * COLUMNS
    index = index // (WIDTH // COLUMNS)
    first = index % blocks * ROWS
    group = (index // blocks).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    step = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if OF_KEYS:
        start = 0
        if CAUSAL:
            start = tl.maximum(slopes.origin + first - (keys - queries), 0) // INNER * INNER
        for inner in range(start, queries, INNER):
            right = load_chunk(query, group, inner, queries, across, INNER, COLUMNS, WIDTH, QUERY_PARTS, ASK_QUERIES)
            place = row[:, None] * slopes.length + (inner + step)[None, :]
            left = _load_slopes(slopes, group, (inner + step < queries)[None, :], place, SLOPES, ASK_QUERIES)
            total = product(total, left, right, SLOPES, QUERY_PARTS, False)
    if OF_QUERIES:
        end = held
        if CAUSAL:
            end = tl.minimum(held, keys - queries + first + ROWS - slopes.origin)
        for inner in range(0, end, INNER):
            right = load_chunk(key, group, slopes.origin + inner, keys, across, INNER, COLUMNS, WIDTH, KEY_PARTS, ASK_KEYS)
            place = (inner + step)[:, None] * slopes.length + row[None, :]
            left = _load_slopes(slopes, group, (inner + step < held)[:, None], place, SLOPES, ASK_KEYS)
            turned = tl.trans(left[0]), tl.trans(left[1])
            total = product(total, turned, right, SLOPES, KEY_PARTS, False)
    column = across + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    place = out + (group * total_rows + origin + row[:, None]) * width + column[None, :]
    total *= scale
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)
