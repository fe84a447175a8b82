"""Triton kernels of ops/mix.py: flash attention with narrow values, in float32 quality. Imported only where Triton can run.

    G groups, N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + second_scale r_i.l_j + bias_j) over the allowed j

Products are of bfloat16 parts (ops/part_kernels.py): scores and outputs of order 2, which is float32, and the gradients' own
products of order 1. Weights are two parts, and their total is that of the parts, so that they still add up to 1.

Every number is written by one program, in a fixed order of additions: no atomics, results repeat to the bit. The backward
has a kernel over queries and one over keys, and each computes the weights again.
"""

# mypy: ignore-errors
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.ops.part_kernels import PARTS, WIDEST, Operand, in_two, product, split, split_gradient, tile_width, tiles

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Mask(NamedTuple):
    """(B,H,N,M) through strides, 0 where it repeats."""

    at: Tensor
    batch: int
    head: int
    row: int
    column: int


@triton.jit
def allowed_only(
    scores,
    row,
    column,
    group,
    start,
    queries,
    keys,
    bias,
    real,
    mask,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """`scores`, in units of log 2, with what is added to them, and -inf where a query may not look; any orientation.

    `bias` and `real` are those of `group`, and its mask starts at `start`.
    """
    inside = column < keys
    allowed = inside & (row < queries)
    if CAUSAL:
        allowed = allowed & (column <= row + keys - queries)
    if HAS_BIAS:
        scores += tl.load(bias + group * keys + column, mask=inside, other=0.0) * LOG2_E
    if HAS_REAL:
        allowed = allowed & (tl.load(real + group * keys + column, mask=inside, other=0) != 0)
    if MASK != 0:
        place = mask.at + start + row.to(tl.int64) * mask.row + column * mask.column
        given = tl.load(place, mask=inside & (row < queries), other=0)
        if MASK == 1:
            allowed = allowed & (given != 0)
        else:
            # The least float32 times log2(e) would be -inf, and a row of nothing else would not be uniform.
            given = given.to(tl.float32)
            scores += tl.where(given > -float("inf"), tl.maximum(given, -2e38), given) * LOG2_E
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def _mix(
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
    width,
    scale,
    second_scale,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,  # of query, key, second query, second key, value
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
    q = tiles(query, group, row, queries, WIDTH, PARTS[0])
    r = q
    if SECOND > 0:
        r = tiles(second_query, group, row, queries, SECOND, PARTS[2])
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUES), tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, keys - queries + first + ROWS)
    for start in range(0, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = tiles(key, group, column, keys, WIDTH, PARTS[1])
        scores = product(tl.zeros((ROWS, COLUMNS), tl.float32), q, k, PARTS[0], PARTS[1], 2, True) * (scale * LOG2_E)
        if SECOND > 0:
            k = tiles(second_key, group, column, keys, SECOND, PARTS[3])
            more = product(tl.zeros((ROWS, COLUMNS), tl.float32), r, k, PARTS[2], PARTS[3], 2, True)
            scores += more * (second_scale * LOG2_E)
        scores = allowed_only(
            scores,
            row[:, None],
            column[None, :],
            group,
            group * mask.batch,
            queries,
            keys,
            bias,
            real,
            mask,
            CAUSAL,
            HAS_BIAS,
            HAS_REAL,
            MASK,
        )
        higher = tl.maximum(highest, tl.max(scores, 1))
        level = tl.where(higher > -float("inf"), higher, 0.0)
        fading = tl.exp2(highest - level)
        v = tiles(value, group, column, keys, VALUES, PARTS[4])
        weights = in_two(tl.exp2(scores - level[:, None]), v[0])
        total = total * fading + tl.sum(weights[0].to(tl.float32) + weights[1].to(tl.float32), 1)
        mixed = product(mixed * fading[:, None], weights, v, 2, PARTS[4], 2, False)
        highest = higher
    level = tl.where(highest > -float("inf"), highest, 0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    across = tl.arange(0, VALUES)
    place = (group * queries + row[:, None]) * width + across[None, :]
    tl.store(out + place, mixed, mask=(row < queries)[:, None] & (across < width)[None, :])
    tl.store(log_total + group * queries + row, (level + tl.log2(total)) * LN_2, mask=row < queries)


@triton.jit
def _query_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
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
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row = first + tl.arange(0, ROWS)
    q = tiles(query, group, row, queries, WIDTH, PARTS[0])
    g = tiles(grad, group, row, queries, VALUES, 2)
    level = tl.load(log_total + group * queries + row, mask=row < queries, other=0.0)
    level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
    middle = tl.load(centre + group * queries + row, mask=row < queries, other=0.0)
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    r = q
    second_gradient = gradient
    if SECOND > 0:
        r = tiles(second_query, group, row, queries, SECOND, PARTS[2])
        second_gradient = tl.zeros((ROWS, SECOND), tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, keys - queries + first + ROWS)
    for start in range(0, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
        k = tiles(key, group, column, keys, WIDTH, PARTS[1])
        scores = product(nothing, q, k, PARTS[0], PARTS[1], 2, True) * (scale * LOG2_E)
        s = k
        if SECOND > 0:
            s = tiles(second_key, group, column, keys, SECOND, PARTS[3])
            scores += product(nothing, r, s, PARTS[2], PARTS[3], 2, True) * (second_scale * LOG2_E)
        scores = allowed_only(
            scores,
            row[:, None],
            column[None, :],
            group,
            group * mask.batch,
            queries,
            keys,
            bias,
            real,
            mask,
            CAUSAL,
            HAS_BIAS,
            HAS_REAL,
            MASK,
        )
        v = tiles(value, group, column, keys, VALUES, PARTS[4])
        slopes = product(nothing, g, v, 2, PARTS[4], 1, True) - middle[:, None]
        slopes = in_two(tl.exp2(scores - level[:, None]) * slopes, k[0])
        gradient = product(gradient, slopes, k, 2, PARTS[1], 1, False)
        if SECOND > 0:
            second_gradient = product(second_gradient, slopes, s, 2, PARTS[3], 1, False)
    across = tl.arange(0, WIDTH)
    inside = (row < queries)[:, None] & (across < width)[None, :]
    tl.store(out + (group * queries + row[:, None]) * width + across[None, :], gradient * scale, mask=inside)
    if SECOND > 0:
        across = tl.arange(0, SECOND)
        inside = (row < queries)[:, None] & (across < second_width)[None, :]
        place = (group * queries + row[:, None]) * second_width + across[None, :]
        tl.store(second_out + place, second_gradient * second_scale, mask=inside)


@triton.jit
def _key_gradient(
    query,
    key,
    second_query,
    second_key,
    value,
    grad,
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
    PARTS: tl.constexpr,
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
    k = tiles(key, group, column, keys, WIDTH, PARTS[1])
    s = k
    if SECOND > 0:
        s = tiles(second_key, group, column, keys, SECOND, PARTS[3])
    v = tiles(value, group, column, keys, VALUES, PARTS[4])
    gradient = tl.zeros((COLUMNS, WIDTH), tl.float32)
    second_gradient = gradient
    if SECOND > 0:
        second_gradient = tl.zeros((COLUMNS, SECOND), tl.float32)
    value_gradient = tl.zeros((COLUMNS, VALUES), tl.float32)
    bias_gradient = tl.zeros((COLUMNS,), tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(tl.program_id(1) * COLUMNS - (keys - queries), 0) // ROWS * ROWS
    for start in range(first, queries, ROWS):
        row = start + tl.arange(0, ROWS)
        nothing = tl.zeros((COLUMNS, ROWS), tl.float32)
        q = tiles(query, group, row, queries, WIDTH, PARTS[0])
        scores = product(nothing, k, q, PARTS[1], PARTS[0], 2, True) * (scale * LOG2_E)
        r = q
        if SECOND > 0:
            r = tiles(second_query, group, row, queries, SECOND, PARTS[2])
            scores += product(nothing, s, r, PARTS[3], PARTS[2], 2, True) * (second_scale * LOG2_E)
        scores = allowed_only(
            scores,
            row[None, :],
            column[:, None],
            group,
            group * mask.batch,
            queries,
            keys,
            bias,
            real,
            mask,
            CAUSAL,
            HAS_BIAS,
            HAS_REAL,
            MASK,
        )
        level = tl.load(log_total + group * queries + row, mask=row < queries, other=0.0)
        level = tl.where(level > -float("inf"), level, 0.0) * LOG2_E
        weights = tl.exp2(scores - level[None, :])
        g = tiles(grad, group, row, queries, VALUES, 2)
        if WANTS_VALUE:
            value_gradient = product(value_gradient, in_two(weights, g[0]), g, 2, 2, 1, False)
        if WANTS_KEY:
            middle = tl.load(centre + group * queries + row, mask=row < queries, other=0.0)
            slopes = weights * (product(nothing, v, g, PARTS[4], 2, 1, True) - middle[None, :])
            if HAS_BIAS:
                bias_gradient += tl.sum(slopes, 1)
            slopes = in_two(slopes, q[0])
            gradient = product(gradient, slopes, q, 2, PARTS[0], 1, False)
            if SECOND > 0:
                second_gradient = product(second_gradient, slopes, r, 2, PARTS[2], 1, False)
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


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int


# The first that fits into a multiprocessor's shared memory is taken.
TILINGS = {
    "mix": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
    "query": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
    "key": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
}
SCRATCH = 8192  # bytes that a kernel takes beside its tiles


class Problem(NamedTuple):
    """One mixing, taken apart for the kernels."""

    query: Operand
    key: Operand
    second_query: Operand
    second_key: Operand
    value: Operand
    bias: Tensor
    real: Tensor
    mask: Mask
    shape: tuple[int, int, int]  # G, N, M
    constants: dict[str, Any]

    def tiling(self, kernel: str) -> dict[str, int]:
        widths, parts = [self.constants[name] for name in ("WIDTH", "SECOND", "VALUES")], self.constants["PARTS"]
        limit = _shared_memory(self.query.at.device)
        rows, columns, warps, stages = next(t for t in TILINGS[kernel] if _tile_bytes(kernel, t, widths, parts) <= limit)
        return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def _tile_bytes(kernel: str, tiling: Tiling, widths: Sequence[int], parts: Sequence[int]) -> int:
    """What the tiles take: those that stay for a whole program, and those of a step of its loop, `stages` times."""
    width, second, values = widths
    of_row = parts[0] * width + parts[2] * second + (0 if kernel == "mix" else 2 * values)
    of_column = parts[1] * width + parts[3] * second + parts[4] * values
    down, across = tiling.rows * of_row, tiling.columns * of_column
    stay, pass_by = (across, down) if kernel == "key" else (down, across)
    return 2 * (stay + tiling.stages * pass_by) + SCRATCH


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """What one program may have; in the interpreter, as much as it likes."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**30


def supports(query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None) -> bool:
    """Whether the kernels take rows of these widths and dtypes, none of them empty."""
    operands = [rows for rows in (query, key, value, second_query, second_key) if rows is not None]
    if not all(rows.shape[-1] <= WIDEST and rows.dtype in PARTS and rows.numel() > 0 for rows in operands):
        return False
    widths = [tile_width(rows.shape[2]) if rows is not None else 0 for rows in (query, second_query, value)]
    least = max(_tile_bytes(kernel, tilings[-1], widths, (3,) * 5) for kernel, tilings in TILINGS.items())
    return least <= _shared_memory(query.device)


def mask_kind(mask: Tensor | None) -> int:
    """0: none, 1: bool, 2: added to the scores."""
    return 0 if mask is None else 1 if mask.dtype == torch.bool else 2


def mask_operand(mask: Tensor | None, otherwise: Tensor) -> Mask:
    """mask (B,H,N,M), or 1 in place of any of them; where there is none, a pointer that is never followed."""
    if mask is None:
        return Mask(otherwise, 0, 0, 0, 0)
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, *strides)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _pair(query: Tensor, key: Tensor, real: Tensor | None, kind: torch.dtype) -> tuple[Operand, Operand]:
    operand = split(query, None, kind)
    return operand, operand if real is None and _same(query, key) else split(key, real, kind)


def _count(operand: Operand) -> int:
    return operand.at.shape[0] if operand.at.dim() == 4 else 1


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    kind: torch.dtype,
    value_parts: int,
) -> Problem:
    real = None if real is None else real.contiguous()
    q, k = _pair(query, key, real, kind)
    r, s = (q, k) if second_query is None else _pair(second_query, second_key, real, kind)
    v = split(value, real, kind, value_parts)
    constants = {
        "WIDTH": tile_width(query.shape[2]),
        "SECOND": 0 if second_query is None else tile_width(second_query.shape[2]),
        "VALUES": tile_width(value.shape[2]),
        "PARTS": tuple(_count(operand) for operand in (q, k, r, s, v)),
        "CAUSAL": causal,
        "HAS_BIAS": bias is not None,
        "HAS_REAL": real is not None,
        "MASK": mask_kind(mask),
    }
    bias = query if bias is None else bias.contiguous()
    real = query if real is None else real.view(torch.uint8)
    shape = (query.shape[0], query.shape[1], key.shape[1])
    return Problem(
        q, k, r, s, v, bias, real, mask_operand(None if mask is None else mask.unsqueeze(1), query), shape, constants
    )


def mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    second_scale: float,
    kind: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """out (G,N,n) and the logarithm of the total of the weights (G,N), float32. `kind` is the dtype of parts."""
    problem = _problem(query, key, value, second_query, second_key, bias, real, mask, causal, kind, value_parts=3)
    groups, queries, keys = problem.shape
    out = torch.empty(groups, queries, value.shape[2], dtype=torch.float32, device=query.device)
    log_total = torch.empty(groups, queries, dtype=torch.float32, device=query.device)
    tiling = problem.tiling("mix")
    _mix[groups, triton.cdiv(queries, tiling["ROWS"])](
        *problem[:8],
        out,
        log_total,
        queries,
        keys,
        value.shape[2],
        scale,
        second_scale,
        **problem.constants,
        **tiling,
    )
    return out, log_total


def mix_backward(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    second_scale: float,
    wants: tuple[bool, bool, bool],  # queries; keys and bias; values
    kind: torch.dtype = torch.bfloat16,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, second query, second key and bias; None where not wanted."""
    problem = _problem(query, key, value, second_query, second_key, bias, real, mask, causal, kind, value_parts=2)
    groups, queries, keys = problem.shape
    parts, centre = split_gradient(grad, out, kind)
    operands = (*problem[:5], parts, *problem[5:8], log_total, centre)
    wants_query, wants_key, wants_value = wants
    width, second_width = query.shape[2], 0 if second_query is None else second_query.shape[2]

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted and tensor is not None else None

    def pointer(tensor: Tensor | None) -> Tensor:
        return grad if tensor is None else tensor

    of_query, of_second_query = like(query, wants_query), like(second_query, wants_query)
    of_key, of_second_key, of_bias = like(key, wants_key), like(second_key, wants_key), like(bias, wants_key)
    of_value = like(value, wants_value)
    if wants_query:
        tiling = problem.tiling("query")
        _query_gradient[groups, triton.cdiv(queries, tiling["ROWS"])](
            *operands,
            of_query,
            pointer(of_second_query),
            queries,
            keys,
            width,
            second_width,
            scale,
            second_scale,
            **problem.constants,
            **tiling,
        )
    if wants_key or wants_value:
        tiling = problem.tiling("key")
        _key_gradient[groups, triton.cdiv(keys, tiling["COLUMNS"])](
            *operands,
            pointer(of_key),
            pointer(of_second_key),
            pointer(of_value),
            pointer(of_bias),
            queries,
            keys,
            width,
            second_width,
            value.shape[2],
            scale,
            second_scale,
            **problem.constants,
            WANTS_KEY=wants_key,
            WANTS_VALUE=wants_value,
            **tiling,
        )
    return of_query, of_key, of_value, of_second_query, of_second_key, of_bias
