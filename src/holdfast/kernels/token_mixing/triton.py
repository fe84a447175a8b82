"""Triton kernels for mixing: flash attention with narrow values, in float32 quality.

    G groups, N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + second_scale r_i.l_j + bias_j) over the allowed j
    slope_ij is the gradient of the score of query i and key j

Products are of 16-bit parts (kernels/float32_parts.py). Scores and outputs are products of float16 parts, or of bfloat16
where queries and keys are bfloat16; the gradients' own products are of bfloat16 parts. The factor of a value's row is
multiplied into its weight, and divided out of the weights' total again, so that all weights times values are of similar
size.

Every number is written by one program, in a fixed order of additions: no atomics, results repeat to the bit. The backward
has a kernel over queries and one over keys, and each computes the weights again.

**Wide vectors**, too wide for a tile, are read in chunks. A score is summed over chunks of the width. Each chunk's sum is
one of tensor cores, and is added up outside of them, because they truncate where float32 rounds. A program has no room for
the gradient of a block of wide rows. So the kernel over keys (`key_gradient`) writes the slopes as bfloat16 parts (parts, G,
keys, queries), keys down, and `slope_product` multiplies them with the vectors, which are both queries and keys:

    gradient of query i = scale sum_j slope_ij key_j         gradient of key j = scale sum_i slope_ij query_i

With `causal`, tiles in which no query may attend to a key are neither computed nor read. Both kernels have tiles of their
own sizes, and `slope_product` reads up to `reach` queries before the first that may attend to a key: there slopes are set
to 0.
"""

# mypy: ignore-errors
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.float32_parts import exponent, inverse, load_chunk, load_parts, product, row_values, two_parts
from holdfast.kernels.operators import kernel

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LIFT = tl.constexpr(15.0)  # weights are multiplied by 2^15 before they are split, so that small ones keep more digits


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


class Slopes(NamedTuple):
    """The slopes of all pairs of rows, for a kernel."""

    at: Tensor  # (parts, G, length, length); not read where the kernel writes no slopes
    part: int  # numbers of a part
    length: int  # keys, and queries, with padding
    reach: int  # see above


@triton.jit
def _chunked_scores(
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
    # Multiplying each chunk by the scale keeps the compiler from leaving the whole sum to the tensor cores.
    scores = tl.zeros((LEFT, RIGHT), tl.float32)
    for column in range(0, WIDTH, CHUNK):
        a = load_chunk(left, group, left_start, left_rows, column, LEFT, CHUNK, WIDTH, LEFT_PARTS, True)
        b = load_chunk(right, group, start, rows, column, RIGHT, CHUNK, WIDTH, RIGHT_PARTS, ASK)
        scores += product(tl.zeros((LEFT, RIGHT), tl.float32), a, b, LEFT_PARTS, RIGHT_PARTS, True) * scale
    if SCALED:
        scores = scores * left_factors * row_values(right.factors, group, start, rows, RIGHT, 1.0, ASK)[None, :]
    return scores


@triton.jit
def _store_slopes(numbers, slopes, group, column, row, PARTS: tl.constexpr):
    """Write a tile of slopes, keys `column` down and queries `row` across, as parts."""
    place = slopes.at + group * slopes.length * slopes.length
    place += column[:, None] * slopes.length + row[None, :]
    first, second = two_parts(numbers, slopes.at.dtype.element_ty)
    tl.store(place, first)
    if PARTS > 1:
        tl.store(place + slopes.part, second)


@triton.jit
def _clear_slopes(slopes, group, column, sees, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Set the slopes of up to `reach` queries before row `first` to 0. `sees`: the first row that may attend to a key."""
    for start in range(tl.maximum(sees - slopes.reach, 0) // ROWS * ROWS, first, ROWS):
        nothing = tl.zeros((COLUMNS, ROWS), tl.float32)
        _store_slopes(nothing, slopes, group, column, start + tl.arange(0, ROWS), PARTS)


@triton.jit
def _load_slopes(slopes, group, inside, place, PARTS: tl.constexpr, ASK: tl.constexpr):
    """Load both parts of a tile at `place`, the first twice if PARTS is 1; ASK: 0 where not `inside`."""
    place = slopes.at + group * slopes.length * slopes.length + place
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


@kernel
def slope_product(
    slopes,
    query,
    key,
    out,
    count,
    width,
    scale,
    WIDTH: tl.constexpr,
    SLOPES: tl.constexpr,  # parts
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ASK: tl.constexpr,  # the last step over rows is not a full one
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write a tile of the gradient of rows that are both queries and keys: all columns of a block, then the next block."""
    blocks = tl.cdiv(count, ROWS)
    index = tl.program_id(0)
    across = index % (WIDTH // COLUMNS) * COLUMNS
    index = index // (WIDTH // COLUMNS)
    first = index % blocks * ROWS
    group = (index // blocks).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    step = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = 0  # the first query that may attend to these rows
    end = count  # and the end of the keys that they may attend to
    if CAUSAL:
        start = first // INNER * INNER
        end = tl.minimum(count, first + ROWS)
    for inner in range(start, count, INNER):
        right = load_chunk(query, group, inner, count, across, INNER, COLUMNS, WIDTH, QUERY_PARTS, ASK)
        place = row[:, None] * slopes.length + (inner + step)[None, :]
        left = _load_slopes(slopes, group, (inner + step < count)[None, :], place, SLOPES, ASK)
        total = product(total, left, right, SLOPES, QUERY_PARTS, False)
    for inner in range(0, end, INNER):
        right = load_chunk(key, group, inner, count, across, INNER, COLUMNS, WIDTH, KEY_PARTS, ASK)
        place = (inner + step)[:, None] * slopes.length + row[None, :]
        left = _load_slopes(slopes, group, (inner + step < count)[:, None], place, SLOPES, ASK)
        turned = tl.trans(left[0]), tl.trans(left[1])
        total = product(total, turned, right, SLOPES, KEY_PARTS, False)
    column = across + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    place = out + (group * count + row[:, None]) * width + column[None, :]
    tl.store(place, total * scale, mask=inside)


@triton.jit
def _turn(FOLD: tl.constexpr):
    """Return which block this program works on; block 0 has the most keys, and starts first.

    FOLD: the second half of the programs starts with the fewest keys. Where all programs run at once, two on each
    multiprocessor, a long one then shares it with a short one.
    """
    turn = tl.program_id(1)
    if FOLD:
        half = tl.num_programs(1) // 2
        turn = tl.where(turn < half, turn, tl.num_programs(1) - 1 + half - turn)
    return turn


@triton.jit
def _scaled(scores, left, other, scale, SCALED: tl.constexpr):
    """Return scores in units of log 2, times the factors of both sides, each shaped for its side."""
    if SCALED:
        return scores * (left * (scale * LOG2_E)) * other
    return scores * (scale * LOG2_E)


@triton.jit
def _load_kept(
    first,
    second,
    group,
    start,
    count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    PARTS: tl.constexpr,
    SECOND_PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load the tile of both products that a program keeps, with its factors; with chunks, only the factors."""
    one = 0.0
    if CHUNK == 0:
        one = load_parts(first, group, start, count, HEIGHT, WIDTH, PARTS)
    one_factors = 1.0
    if SCALED:
        one_factors = row_values(first.factors, group, start, count, HEIGHT, 1.0)[:, None]
    other = one
    other_factors = one_factors
    if SECOND > 0:
        other = load_parts(second, group, start, count, HEIGHT, SECOND, SECOND_PARTS)
        other_factors = row_values(second.factors, group, start, count, HEIGHT, 1.0)[:, None]
    return one, one_factors, other, other_factors


@triton.jit
def _scores(
    kept,
    kept_first,
    kept_start,
    kept_count,
    first,
    second,
    group,
    start,
    count,
    scale,
    second_scale,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    KEPT: tl.constexpr,  # parts of the tile that is kept, in the first product
    LOADED: tl.constexpr,  # and of the tile that is loaded
    SECOND_KEPT: tl.constexpr,
    SECOND_LOADED: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,  # columns that are read at a time; 0 is all. With chunks, there is no second product
    ASK: tl.constexpr,
):
    """Return the scores (LEFT, RIGHT) of a kept tile and a loaded one, and the loaded parts of the first product.

    With chunks, nothing is kept: chunks of both tiles are loaded, and none is returned.
    """
    nothing = tl.zeros((LEFT, RIGHT), tl.float32)
    if CHUNK > 0:
        loaded = nothing
        scores = _chunked_scores(
            kept_first, first, group, kept_start, kept_count, start, count, scale * LOG2_E, kept[1],
            LEFT, RIGHT, WIDTH, KEPT, LOADED, SCALED, CHUNK, ASK,
        )  # fmt: skip
    else:
        loaded = load_parts(first, group, start, count, RIGHT, WIDTH, LOADED, ASK)
        scores = product(nothing, kept[0], loaded, KEPT, LOADED, True)
        others = kept[1]
        if SCALED:
            others = row_values(first.factors, group, start, count, RIGHT, 1.0, ASK)[None, :]
        scores = _scaled(scores, kept[1], others, scale, SCALED)
        if SECOND > 0:
            more = load_parts(second, group, start, count, RIGHT, SECOND, SECOND_LOADED, ASK)
            more = product(nothing, kept[2], more, SECOND_KEPT, SECOND_LOADED, True)
            others = row_values(second.factors, group, start, count, RIGHT, 1.0, ASK)[None, :]
            scores += _scaled(more, kept[3], others, second_scale, True)
    return scores, loaded


@kernel
def mix(
    query,
    key,
    second_query,
    second_key,
    value,
    bias,
    real,
    mask,
    out,
    log_total,
    queries,
    keys,
    value_width,
    scale,
    second_scale,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,  # of query, key, second query, second key, value
    SCALED: tl.constexpr,  # whether the first product has factors; the second always has
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    CHUNK: tl.constexpr,  # see `_scores`
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Mix the values of a block of queries, and write the logarithm of the weights' total."""
    group = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - _turn(FOLD)) * ROWS
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    kept = _load_kept(query, second_query, group, first, queries, ROWS, WIDTH, SECOND, PARTS[0], PARTS[2], SCALED, CHUNK)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUES), tl.float32)
    plain, last = key_spans(first, queries, keys, ROWS, COLUMNS, CAUSAL, HAS_REAL or MASK != 0)
    for ask in tl.static_range(2):
        for start in range(plain * ask, plain + (last - plain) * ask, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            scores, _ = _scores(
                kept, query, first, queries, key, second_key, group, start, keys, scale, second_scale,
                ROWS, COLUMNS, WIDTH, SECOND, PARTS[0], PARTS[1], PARTS[2], PARTS[3], SCALED, CHUNK, ask,
            )  # fmt: skip
            if HAS_BIAS:
                scores += row_values(bias, group, start, keys, COLUMNS, 0.0, ask)[None, :] * LOG2_E
            if ask:
                scores = allowed_only(
                    scores, limits, row[:, None], column[None, :], group, group * mask.batch, queries, keys,
                    real, mask, HAS_REAL, MASK,
                )  # fmt: skip
            v = load_parts(value, group, start, keys, COLUMNS, VALUES, PARTS[4], ask)
            v_factors = row_values(value.factors, group, start, keys, COLUMNS, 1.0, ask)
            scores += exponent(v_factors)[None, :]
            higher = tl.maximum(highest, tl.max(scores, 1))
            level = tl.where(higher > -float("inf"), higher, 0.0)
            fading = tl.exp2(highest - level)
            weights = tl.exp2(scores - (level - LIFT)[:, None])
            total = total * fading + tl.sum(weights * inverse(v_factors)[None, :], 1)
            # Tensor cores round sums towards 0, and errors would add up over thousands of keys: they sum only within a tile.
            weights = two_parts(weights, v[0].dtype)
            more = product(tl.zeros((ROWS, VALUES), tl.float32), weights, v, 2, PARTS[4], False)
            mixed = mixed * fading[:, None] + more
            highest = higher
    level = tl.where(highest > -float("inf"), highest - LIFT, 0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    across = tl.arange(0, VALUES)
    place = (group * queries + row[:, None]) * value_width + across[None, :]
    tl.store(out + place, mixed, mask=(row < queries)[:, None] & (across < value_width)[None, :])
    tl.store(log_total + group * queries + row, (level + tl.log2(total)) * LN_2, mask=row < queries)


@kernel
def query_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
    key_bf16,
    second_key_bf16,
    bias,
    real,
    mask,
    log_total,
    centre,
    out,
    second_out,
    queries,
    keys,
    width,
    second_width,
    scale,
    second_scale,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,  # of query, key, second query, second key, value, key_bf16, second_key_bf16
    SLOPES: tl.constexpr,  # parts of the gradients of the scores
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    CHUNK: tl.constexpr,  # see `_scores`; always 0
    SHARED: tl.constexpr,  # keys equal queries, and `out` holds the keys' gradient: add to it
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Write the gradients of a block of queries, and of the second queries."""
    group = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - _turn(FOLD)) * ROWS
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    kept = _load_kept(query, second_query, group, first, queries, ROWS, WIDTH, SECOND, PARTS[0], PARTS[2], SCALED, CHUNK)
    g = load_parts(grad, group, first, queries, ROWS, VALUES, 2)
    level = row_values(log_total, group, first, queries, ROWS, 0.0)
    level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
    middle = row_values(centre, group, first, queries, ROWS, 0.0)
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    second_gradient = gradient
    if SECOND > 0:
        second_gradient = tl.zeros((ROWS, SECOND), tl.float32)
    plain, last = key_spans(first, queries, keys, ROWS, COLUMNS, CAUSAL, HAS_REAL or MASK != 0)
    for ask in tl.static_range(2):
        for start in range(plain * ask, plain + (last - plain) * ask, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            scores, b = _scores(
                kept, query, first, queries, key, second_key, group, start, keys, scale, second_scale,
                ROWS, COLUMNS, WIDTH, SECOND, PARTS[0], PARTS[1], PARTS[2], PARTS[3], SCALED, CHUNK, ask,
            )  # fmt: skip
            if HAS_BIAS:
                scores += row_values(bias, group, start, keys, COLUMNS, 0.0, ask)[None, :] * LOG2_E
            if ask:
                scores = allowed_only(
                    scores, limits, row[:, None], column[None, :], group, group * mask.batch, queries, keys,
                    real, mask, HAS_REAL, MASK,
                )  # fmt: skip
            v = load_parts(value, group, start, keys, COLUMNS, VALUES, PARTS[4], ask)
            slopes = product(tl.zeros((ROWS, COLUMNS), tl.float32), g, v, 2, PARTS[4], True) - middle[:, None]
            slopes = two_parts(tl.exp2(scores - level[:, None]) * slopes, v[0].dtype)
            if SCALED:
                b = load_parts(key_bf16, group, start, keys, COLUMNS, WIDTH, PARTS[5], ask)
            gradient = product(gradient, slopes, b, SLOPES, PARTS[5], False)
            if SECOND > 0:
                b = load_parts(second_key_bf16, group, start, keys, COLUMNS, SECOND, PARTS[6], ask)
                second_gradient = product(second_gradient, slopes, b, SLOPES, PARTS[6], False)
    across = tl.arange(0, WIDTH)
    inside = (row < queries)[:, None] & (across < width)[None, :]
    place = out + (group * queries + row[:, None]) * width + across[None, :]
    gradient *= scale
    if SHARED:
        gradient += tl.load(place, mask=inside, other=0.0)
    tl.store(place, gradient, mask=inside)
    if SECOND > 0:
        across = tl.arange(0, SECOND)
        inside = (row < queries)[:, None] & (across < second_width)[None, :]
        place = (group * queries + row[:, None]) * second_width + across[None, :]
        tl.store(second_out + place, second_gradient * second_scale, mask=inside)


@kernel
def key_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
    query_bf16,
    second_query_bf16,
    bias,
    real,
    mask,
    log_total,
    centre,
    out,
    second_out,
    value_out,
    bias_out,
    slopes_out,
    queries,
    keys,
    width,
    second_width,
    value_width,
    scale,
    second_scale,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,  # of query, key, second query, second key, value, query_bf16, second_query_bf16
    SLOPES: tl.constexpr,  # parts of the gradients of the scores
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    WANTS_KEY: tl.constexpr,
    WANTS_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,  # see `_scores`; with chunks, write slopes in place of the gradients of keys
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Compute scores transposed, keys down and queries across, so that the weights can be left factors as they are."""
    group = tl.program_id(0).to(tl.int64)
    begin = _turn(FOLD) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    kept = _load_kept(key, second_key, group, begin, keys, COLUMNS, WIDTH, SECOND, PARTS[1], PARTS[3], SCALED, CHUNK)
    v = kept[0]
    if WANTS_KEY:
        v = load_parts(value, group, begin, keys, COLUMNS, VALUES, PARTS[4])
    gradient = 0.0
    second_gradient = 0.0
    if CHUNK == 0:
        gradient = tl.zeros((COLUMNS, WIDTH), tl.float32)
        second_gradient = gradient
        if SECOND > 0:
            second_gradient = tl.zeros((COLUMNS, SECOND), tl.float32)
    value_gradient = tl.zeros((COLUMNS, VALUES), tl.float32)
    bias_gradient = tl.zeros((COLUMNS,), tl.float32)
    biases = 0.0
    if HAS_BIAS:
        biases = row_values(bias, group, begin, keys, COLUMNS, 0.0)[:, None] * LOG2_E
    first = 0
    clear = 0  # from here to `end`, whole tiles, every row may attend to all of these keys, and scores need no checks
    if CAUSAL:
        sees = begin - (keys - queries)  # the first row that may attend to the first of these keys
        first = tl.maximum(sees, 0) // ROWS * ROWS
        clear = tl.maximum(tl.cdiv(sees + COLUMNS - 1, ROWS) * ROWS, first)
        if CHUNK > 0 and WANTS_KEY:
            _clear_slopes(slopes_out, group, column, sees, first, ROWS, COLUMNS, SLOPES)
    end = tl.maximum(queries // ROWS * ROWS, first)
    clear = tl.minimum(clear, end)
    if HAS_REAL or MASK != 0:
        clear = end
    for ask in tl.static_range(2):
        for index in range(clear + (first - clear) * ask, end + (queries - 2 * end + clear) * ask, ROWS):
            start = index
            if ask:
                start = tl.where(index < clear, index, index + end - clear)
            row = start + tl.arange(0, ROWS)
            scores, b = _scores(
                kept, key, begin, keys, query, second_query, group, start, queries, scale, second_scale,
                COLUMNS, ROWS, WIDTH, SECOND, PARTS[1], PARTS[0], PARTS[3], PARTS[2], SCALED, CHUNK, ask,
            )  # fmt: skip
            if HAS_BIAS:
                scores += biases
            if ask:
                scores = allowed_only(
                    scores, limit(row, queries, keys, CAUSAL)[None, :], row[None, :], column[:, None], group,
                    group * mask.batch, queries, keys, real, mask, HAS_REAL, MASK,
                )  # fmt: skip
            level = row_values(log_total, group, start, queries, ROWS, 0.0, ask)
            level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
            weights = tl.exp2(scores - level[None, :])
            g = load_parts(grad, group, start, queries, ROWS, VALUES, 2, ask)
            if WANTS_VALUE:
                value_gradient = product(value_gradient, two_parts(weights, g[0].dtype), g, 2, 2, False)
            if WANTS_KEY:
                middle = row_values(centre, group, start, queries, ROWS, 0.0, ask)
                slopes = product(tl.zeros((COLUMNS, ROWS), tl.float32), v, g, PARTS[4], 2, True)
                slopes = weights * (slopes - middle[None, :])
                if HAS_BIAS:
                    bias_gradient += tl.sum(slopes, 1)
                if CHUNK > 0:
                    _store_slopes(slopes, slopes_out, group, column, row, SLOPES)
                else:
                    slopes = two_parts(slopes, g[0].dtype)
                    if SCALED:
                        b = load_parts(query_bf16, group, start, queries, ROWS, WIDTH, PARTS[5], ask)
                    gradient = product(gradient, slopes, b, SLOPES, PARTS[5], False)
                    if SECOND > 0:
                        b = load_parts(second_query_bf16, group, start, queries, ROWS, SECOND, PARTS[6], ask)
                        second_gradient = product(second_gradient, slopes, b, SLOPES, PARTS[6], False)
    own = column < keys
    here = group * keys + column
    if WANTS_VALUE:
        across = tl.arange(0, VALUES)
        inside = own[:, None] & (across < value_width)[None, :]
        tl.store(value_out + here[:, None] * value_width + across[None, :], value_gradient, mask=inside)
    if WANTS_KEY and CHUNK == 0:
        across = tl.arange(0, WIDTH)
        inside = own[:, None] & (across < width)[None, :]
        place = out + here[:, None] * width + across[None, :]
        tl.store(place, gradient * scale, mask=inside)
        if SECOND > 0:
            across = tl.arange(0, SECOND)
            inside = own[:, None] & (across < second_width)[None, :]
            tl.store(
                second_out + here[:, None] * second_width + across[None, :], second_gradient * second_scale, mask=inside
            )
    if WANTS_KEY and HAS_BIAS:
        tl.store(bias_out + here, bias_gradient, mask=own)
