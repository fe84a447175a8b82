"""Triton kernels of ops/mix.py: flash attention with narrow values, in float32 quality. Imported only where Triton can run.

    G groups, N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + second_scale r_i.l_j + bias_j) over the allowed j

Products are of 16-bit parts (ops/part_kernels.py): scores and outputs of halves, which is float32, or of bfloat16 where
queries and keys are bfloat16; the gradients' own products of brains. A value's factor goes into its weight, and comes out
of the weights' total again, so that weights times values are all of one size.

Every number is written by one program, in a fixed order of additions: no atomics, results repeat to the bit. The backward
has a kernel over queries and one over keys, and each computes the weights again.
"""

# mypy: ignore-errors
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from holdfast.ops.part_kernels import (
    exponent,
    factors,
    in_two,
    inverse,
    lefts,
    parts_apart,
    product,
    product_of_parts,
    right,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LIFT = tl.constexpr(15.0)  # halves of weights are taken of 2^15 times them: small ones keep more digits so


class Mask(NamedTuple):
    """(B,H,N,M) through strides, 0 where it repeats."""

    at: Tensor
    batch: int
    head: int
    row: int
    column: int


@triton.jit
def limit(row, queries, keys, CAUSAL: tl.constexpr):
    """Before which key each row has to stop: one comparison a score is all that is left to do for it."""
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
    bias,
    real,
    mask,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """`scores`, in units of log 2, with what is added to them, and -inf where a query may not look; any orientation.

    `bias` and `real` are those of `group`, and its mask starts at `start`.
    """
    allowed = column < limits
    if HAS_BIAS:
        scores += tl.load(bias + group * keys + column, mask=column < keys, other=0.0) * LOG2_E
    if HAS_REAL:
        allowed = allowed & (tl.load(real + group * keys + column, mask=column < keys, other=0) != 0)
    if MASK != 0:
        place = mask.at + start + row.to(tl.int64) * mask.row + column * mask.column
        given = tl.load(place, mask=(column < keys) & (row < queries), other=0)
        if MASK == 1:
            allowed = allowed & (given != 0)
        else:
            # The least float32 times log2(e) would be -inf, and a row of nothing else would not be uniform.
            given = given.to(tl.float32)
            scores += tl.where(given > -float("inf"), tl.maximum(given, -2e38), given) * LOG2_E
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def _scaled(scores, left, other, scale, SCALED: tl.constexpr):
    """In units of log 2, and with the factors of both sides, each shaped for its side."""
    if SCALED:
        return scores * (left * (scale * LOG2_E)) * other
    return scores * (scale * LOG2_E)


@triton.jit
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
    SCALED: tl.constexpr,  # the first product; the second is
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the rows that look at most keys start first
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    q = lefts(query, group, row, queries, WIDTH, PARTS[0], PARTS[1])
    q_factors = factors(query, group, row, queries)[:, None]
    r = q
    r_factors = q_factors
    if SECOND > 0:
        r = lefts(second_query, group, row, queries, SECOND, PARTS[2], PARTS[3])
        r_factors = factors(second_query, group, row, queries)[:, None]
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUES), tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, keys - queries + first + ROWS)
    for start in range(0, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
        k = right(key, group, column, keys, WIDTH * PARTS[1])
        scores = product(nothing, q, tl.trans(k), PARTS[0])
        scores = _scaled(scores, q_factors, factors(key, group, column, keys)[None, :], scale, SCALED)
        if SECOND > 0:
            s = right(second_key, group, column, keys, SECOND * PARTS[3])
            more = product(nothing, r, tl.trans(s), PARTS[2])
            scores += _scaled(more, r_factors, factors(second_key, group, column, keys)[None, :], second_scale, True)
        scores = allowed_only(
            scores, limits, row[:, None], column[None, :], group, group * mask.batch, queries, keys,
            bias, real, mask, HAS_BIAS, HAS_REAL, MASK,
        )  # fmt: skip
        v = parts_apart(value, group, column, keys, VALUES, PARTS[4])
        v_factors = factors(value, group, column, keys)
        scores += exponent(v_factors)[None, :]
        higher = tl.maximum(highest, tl.max(scores, 1))
        level = tl.where(higher > -float("inf"), higher, 0.0)
        fading = tl.exp2(highest - level)
        weights = tl.exp2(scores - (level - LIFT)[:, None])
        total = total * fading + tl.sum(weights * inverse(v_factors)[None, :], 1)
        # Tensor cores round sums towards 0, which would add up over thousands of keys: only a tile's own sum is theirs.
        weights = in_two(weights, v[0].dtype)
        more = product_of_parts(tl.zeros((ROWS, VALUES), tl.float32), weights, v, 2, PARTS[4], False)
        mixed = mixed * fading[:, None] + more
        highest = higher
    level = tl.where(highest > -float("inf"), highest - LIFT, 0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    across = tl.arange(0, VALUES)
    place = (group * queries + row[:, None]) * value_width + across[None, :]
    tl.store(out + place, mixed, mask=(row < queries)[:, None] & (across < value_width)[None, :])
    tl.store(log_total + group * queries + row, (level + tl.log2(total)) * LN_2, mask=row < queries)


@triton.jit
def query_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
    key_brain,
    second_key_brain,
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
    PARTS: tl.constexpr,  # of query, key, second query, second key, value, key's brain, second key's brain
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the rows that look at most keys start first
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    q = lefts(query, group, row, queries, WIDTH, PARTS[0], PARTS[1])
    q_factors = factors(query, group, row, queries)[:, None]
    g = parts_apart(grad, group, row, queries, VALUES, 2)
    level = tl.load(log_total + group * queries + row, mask=row < queries, other=0.0)
    level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
    middle = tl.load(centre + group * queries + row, mask=row < queries, other=0.0)
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    r = q
    r_factors = q_factors
    second_gradient = gradient
    if SECOND > 0:
        r = lefts(second_query, group, row, queries, SECOND, PARTS[2], PARTS[3])
        r_factors = factors(second_query, group, row, queries)[:, None]
        second_gradient = tl.zeros((ROWS, SECOND), tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, keys - queries + first + ROWS)
    for start in range(0, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
        k = right(key, group, column, keys, WIDTH * PARTS[1])
        scores = product(nothing, q, tl.trans(k), PARTS[0])
        scores = _scaled(scores, q_factors, factors(key, group, column, keys)[None, :], scale, SCALED)
        if SECOND > 0:
            s = right(second_key, group, column, keys, SECOND * PARTS[3])
            more = product(nothing, r, tl.trans(s), PARTS[2])
            scores += _scaled(more, r_factors, factors(second_key, group, column, keys)[None, :], second_scale, True)
        scores = allowed_only(
            scores, limits, row[:, None], column[None, :], group, group * mask.batch, queries, keys,
            bias, real, mask, HAS_BIAS, HAS_REAL, MASK,
        )  # fmt: skip
        v = parts_apart(value, group, column, keys, VALUES, PARTS[4])
        slopes = product_of_parts(nothing, g, v, 2, PARTS[4], True) - middle[:, None]
        slopes = in_two(tl.exp2(scores - level[:, None]) * slopes, v[0].dtype)
        b = (k, k)
        if SCALED:
            b = parts_apart(key_brain, group, column, keys, WIDTH, PARTS[5])
        gradient = product_of_parts(gradient, slopes, b, 2, PARTS[5], False)
        if SECOND > 0:
            b = parts_apart(second_key_brain, group, column, keys, SECOND, PARTS[6])
            second_gradient = product_of_parts(second_gradient, slopes, b, 2, PARTS[6], False)
    across = tl.arange(0, WIDTH)
    inside = (row < queries)[:, None] & (across < width)[None, :]
    tl.store(out + (group * queries + row[:, None]) * width + across[None, :], gradient * scale, mask=inside)
    if SECOND > 0:
        across = tl.arange(0, SECOND)
        inside = (row < queries)[:, None] & (across < second_width)[None, :]
        place = (group * queries + row[:, None]) * second_width + across[None, :]
        tl.store(second_out + place, second_gradient * second_scale, mask=inside)


@triton.jit
def key_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
    query_brain,
    second_query_brain,
    bias,
    real,
    mask,
    log_total,
    centre,
    out,
    second_out,
    value_out,
    bias_out,
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
    PARTS: tl.constexpr,  # of query, key, second query, second key, value, query's brain, second query's brain
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    WANTS_KEY: tl.constexpr,
    WANTS_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Everything transposed, keys down and queries across, so that the weights are a left factor as they come."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = lefts(key, group, column, keys, WIDTH, PARTS[1], PARTS[0])
    k_factors = factors(key, group, column, keys)[:, None]
    s = k
    s_factors = k_factors
    v = k
    if WANTS_KEY:
        v = parts_apart(value, group, column, keys, VALUES, PARTS[4])
    gradient = tl.zeros((COLUMNS, WIDTH), tl.float32)
    second_gradient = gradient
    if SECOND > 0:
        s = lefts(second_key, group, column, keys, SECOND, PARTS[3], PARTS[2])
        s_factors = factors(second_key, group, column, keys)[:, None]
        second_gradient = tl.zeros((COLUMNS, SECOND), tl.float32)
    value_gradient = tl.zeros((COLUMNS, VALUES), tl.float32)
    bias_gradient = tl.zeros((COLUMNS,), tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(tl.program_id(1) * COLUMNS - (keys - queries), 0) // ROWS * ROWS
    for start in range(first, queries, ROWS):
        row = start + tl.arange(0, ROWS)
        limits = limit(row, queries, keys, CAUSAL)[None, :]
        nothing = tl.zeros((COLUMNS, ROWS), tl.float32)
        q = right(query, group, row, queries, WIDTH * PARTS[0])
        scores = product(nothing, k, tl.trans(q), PARTS[1])
        scores = _scaled(scores, k_factors, factors(query, group, row, queries)[None, :], scale, SCALED)
        if SECOND > 0:
            r = right(second_query, group, row, queries, SECOND * PARTS[2])
            more = product(nothing, s, tl.trans(r), PARTS[3])
            scores += _scaled(more, s_factors, factors(second_query, group, row, queries)[None, :], second_scale, True)
        scores = allowed_only(
            scores, limits, row[None, :], column[:, None], group, group * mask.batch, queries, keys,
            bias, real, mask, HAS_BIAS, HAS_REAL, MASK,
        )  # fmt: skip
        level = tl.load(log_total + group * queries + row, mask=row < queries, other=0.0)
        level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
        weights = tl.exp2(scores - level[None, :])
        g = parts_apart(grad, group, row, queries, VALUES, 2)
        if WANTS_VALUE:
            value_gradient = product_of_parts(value_gradient, in_two(weights, g[0].dtype), g, 2, 2, False)
        if WANTS_KEY:
            middle = tl.load(centre + group * queries + row, mask=row < queries, other=0.0)
            slopes = weights * (product_of_parts(nothing, v, g, PARTS[4], 2, True) - middle[None, :])
            if HAS_BIAS:
                bias_gradient += tl.sum(slopes, 1)
            slopes = in_two(slopes, g[0].dtype)
            b = (q, q)
            if SCALED:
                b = parts_apart(query_brain, group, row, queries, WIDTH, PARTS[5])
            gradient = product_of_parts(gradient, slopes, b, 2, PARTS[5], False)
            if SECOND > 0:
                b = parts_apart(second_query_brain, group, row, queries, SECOND, PARTS[6])
                second_gradient = product_of_parts(second_gradient, slopes, b, 2, PARTS[6], False)
    own = column < keys
    here = group * keys + column
    if WANTS_VALUE:
        across = tl.arange(0, VALUES)
        inside = own[:, None] & (across < value_width)[None, :]
        tl.store(value_out + here[:, None] * value_width + across[None, :], value_gradient, mask=inside)
    if WANTS_KEY:
        across = tl.arange(0, WIDTH)
        inside = own[:, None] & (across < width)[None, :]
        tl.store(out + here[:, None] * width + across[None, :], gradient * scale, mask=inside)
        if SECOND > 0:
            across = tl.arange(0, SECOND)
            inside = own[:, None] & (across < second_width)[None, :]
            tl.store(
                second_out + here[:, None] * second_width + across[None, :], second_gradient * second_scale, mask=inside
            )
        if HAS_BIAS:
            tl.store(bias_out + here, bias_gradient, mask=own)
