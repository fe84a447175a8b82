"""Launch the mixing kernels: how large their tiles are, in how many parts operands are split, and which kernels compute the
gradients.

Tiles are the first choice that fits into a multiprocessor's shared memory.
"""

# mypy: ignore-errors
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.float32_parts import (
    DTYPES,
    STORED_BF16,
    WIDEST,
    Parts,
    PlannedSplit,
    bf16_operand,
    fp16_operand,
    part_width,
    plan_split,
    run_splits,
    split_rows,
    tile_width,
)
from holdfast.kernels.operators import cdiv
from holdfast.kernels.token_mixing import triton
from holdfast.kernels.token_mixing.triton import Mask, mask_kind, mask_operand

WIDEST_VECTOR = 8192  # columns of queries and keys: of a row, one program finds the largest number
SLOPES_HELD = 2**25  # numbers of the matrix of slopes, in each part, up to which the kernels take wide vectors


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int
    fold: bool = False  # see `triton._turn`
    chunk: int = 0  # columns of queries and keys that are read at a time; 0 is all

    @property
    def options(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.warps, "num_stages": self.stages}

    def chunked(self, width: int) -> dict[str, int]:
        """Return the options of a kernel that reads vectors of this width in chunks, or whole."""
        chunk = min(self.chunk, width & -width)  # `width & -width` is the largest power of 2 that divides it
        return {"CHUNK": chunk, **self.options, "FOLD": self.fold}


# Measured on an H200. The last fits everywhere.
SMALL = (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))
TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, fold=True), Tiling(64, 64, 4, 2, fold=True), Tiling(64, 32, 4, 2), *SMALL),
    "query": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "key": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),
    "value": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),  # the kernel over keys where only values are wanted
}
# For vectors that are read in chunks. The first of each was measured on an H200, at a width of 384 (docs/performance.md).
SMALL_WIDE = (Tiling(32, 32, 4, 2, chunk=32), Tiling(16, 16, 4, 1, chunk=16))
WIDE_TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, fold=True, chunk=32), *SMALL_WIDE),
    "key": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, chunk=32), *SMALL_WIDE),
    "value": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, chunk=32), *SMALL_WIDE),
}
SCRATCH = 8192  # bytes that a kernel needs besides its tiles

# For gradients as products of slopes: rows and columns of a tile of a gradient; `chunk`: slopes that a step of a loop adds.
PRODUCT_TILINGS = (
    Tiling(128, 128, 8, 3, chunk=64),
    Tiling(128, 64, 4, 2, chunk=64),
    Tiling(64, 64, 4, 2, chunk=32),
    Tiling(32, 32, 4, 1, chunk=32),
)
PADDING = 128  # the matrix of slopes has a multiple of this many rows and columns, so that tiles end inside of it


def _tile_bytes(kernel: str, tiling: Tiling, constants: dict[str, Any]) -> int:
    """Return the bytes of the tiles: those that a program keeps, and those of a step of its loop, `stages` times."""
    width, second, values = (constants[name] for name in ("WIDTH", "SECOND", "VALUES"))
    parts = constants["PARTS"]
    over_keys = kernel in ("key", "value")
    long, short = (tiling.columns, tiling.rows) if over_keys else (tiling.rows, tiling.columns)
    if tiling.chunk:  # steps of the inner loop, over chunks; gradients of queries and keys have a kernel of their own
        chunk = min(tiling.chunk, width)
        read = parts[0] * tiling.rows + parts[1] * tiling.columns
        kept = values * (parts[4] * tiling.columns + (2 * tiling.rows if over_keys else 0))
        return 2 * (tiling.stages * read * chunk + kept)
    if over_keys:
        kept = parts[1] * width + parts[3] * second
        loaded = parts[0] * width + parts[2] * second + 2 * values
    else:
        kept = parts[0] * width + parts[2] * second
        loaded = parts[1] * width + parts[3] * second + parts[4] * values
    if kernel in ("query", "key"):
        kept += (2 if kernel == "query" else parts[4]) * values
        loaded += parts[5] * width * constants["SCALED"] + parts[6] * second
    return 2 * (long * kept + tiling.stages * short * loaded)


def first_fitting(tilings: Sequence[Tiling], bytes_of: Callable[[Tiling], int], device: torch.device) -> Tiling:
    """Return the first tiling whose tiles fit into the shared memory of one program; the last where none does."""
    limit = shared_memory(device) - SCRATCH
    return next((tiling for tiling in tilings if bytes_of(tiling) <= limit), tilings[-1])


def _choose_tiling(kernel: str, constants: dict[str, Any], device: torch.device, wide: bool) -> Tiling:
    """Return the first tiling of the kernel that fits."""
    tilings = (WIDE_TILINGS if wide else TILINGS)[kernel]
    return first_fitting(tilings, lambda tiling: _tile_bytes(kernel, tiling, constants), device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory one program may have; 2^30 in the interpreter, which has no limit."""
    if device.type != "cuda":
        return 2**30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def supports(
    query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None, shared: bool
) -> bool:
    """Return whether the kernels take rows of these widths and dtypes, none of them empty; `shared`: keys equal queries."""
    # On an H200 with Triton 3.6, a call with wide vectors, keys of their own and a second product ended with an illegal
    # memory access. No cause was found: in Triton's interpreter and in the compiled PTX, all global pointers of that call
    # are inside of its tensors. Triton's issues 10573 (since Triton 3.6) and 11366 (an illegal read of shared memory) are
    # about such GPUs, kernels with several products, and tiles of 32 columns; whether they are the cause was not tested.
    # The wide calls that ran on that GPU had keys equal to queries, no second product, and all slopes held at a time.
    if is_wide(query, second_query) and not (shared and second_query is None and _slopes_of(query) <= SLOPES_HELD):
        return False
    operands = [rows for rows in (query, key, value, second_query, second_key) if rows is not None]
    widths = [0 if rows is None else rows.shape[2] for rows in (query, second_query, value)]
    if max(widths[:2]) > WIDEST_VECTOR or widths[2] > WIDEST:
        return False
    if not all(rows.dtype in DTYPES and rows.numel() > 0 for rows in operands):
        return False
    padded = [0 if width == 0 else part_width(width) for width in widths]
    constants = dict(zip(("WIDTH", "SECOND", "VALUES"), padded, strict=True)) | {"PARTS": (2,) * 7, "SCALED": True}
    tilings = WIDE_TILINGS if is_wide(query, second_query) else TILINGS
    least = max(_tile_bytes(kernel, choices[-1], constants) for kernel, choices in tilings.items())
    return least + SCRATCH <= shared_memory(query.device)


def _padded_length(rows: Tensor) -> int:
    """Return the number of rows (G,N,m) in a group, with padding up to a multiple of PADDING."""
    return cdiv(rows.shape[1], PADDING) * PADDING


def _slopes_of(rows: Tensor) -> int:
    """Return how many slopes there are between all these rows, with padding."""
    return rows.shape[0] * _padded_length(rows) ** 2


def is_wide(query: Tensor, second_query: Tensor | None) -> bool:
    """Return whether vectors of these widths are read in chunks."""
    return max(rows.shape[2] for rows in (query, second_query) if rows is not None) > WIDEST


def _fp16_parts(rows: Tensor) -> int:
    """Return in how many float16 parts to split the rows."""
    return 2 if rows.dtype == torch.float32 else 1


def _bf16_parts(rows: Tensor, out: torch.dtype) -> int:
    """Return in how many bfloat16 parts to split the rows: 1 if they are bfloat16, or the result of dtype `out` is."""
    return 1 if STORED_BF16 in (rows.dtype, out) else 2


class Rows(NamedTuple):
    """What is mixed, and what the weights come from."""

    query: Tensor
    key: Tensor  # the same object as `query` where keys equal queries
    value: Tensor
    second_query: Tensor | None
    second_key: Tensor | None

    @property
    def scaled(self) -> bool:
        """Return whether the first product is one of float16 parts; one of bfloat16 numbers needs no factors."""
        return not self.query.dtype == self.key.dtype == STORED_BF16


class WantedGradients(NamedTuple):
    """Which gradients the backward will compute."""

    query: bool
    key: bool  # and bias
    value: bool
    coarse: bool = False  # those of queries and keys will be rounded to bfloat16: one part of each factor is enough


def _gradient_bf16_parts(rows: Tensor, other: Tensor, wants: WantedGradients) -> int:
    """Return in how many bfloat16 parts to split rows that are a factor of the other's gradient."""
    return 1 if wants.coarse else _bf16_parts(rows, other.dtype)


def split_operands(rows: Rows, real: Tensor | None, wants: WantedGradients, *, fill: bool = True) -> list[Tensor]:
    """Return all parts that `mix` and `mix_backward` need: the fields of `Parts` for each of the rows, one after another.

    `fill=False` only allocates them, for the compiler.
    """
    real = None if real is None else real.contiguous()
    splits: list[PlannedSplit] = []

    def split(operand: Tensor, real: Tensor | None, fp16: int, bf16: int) -> Parts:
        splits.append(plan_split(operand, real, fp16=fp16, bf16=bf16))
        return splits[-1].parts

    def product(query: Tensor, key: Tensor, scaled: bool) -> list[Tensor]:
        of_query, of_key = (_fp16_parts(query), _fp16_parts(key)) if scaled else (0, 0)
        needs_query, needs_key = (wants.key, wants.query) if scaled else (True, True)
        query_bf16 = _gradient_bf16_parts(query, key, wants) if needs_query else 0
        key_bf16 = _gradient_bf16_parts(key, query, wants) if needs_key else 0
        if key is query and real is None:
            both = split(query, None, of_query, max(query_bf16, key_bf16))
            return [*both, *(part.new_empty(0) for part in both)]
        return [*split(query, None, of_query, query_bf16), *split(key, real, of_key, key_bf16)]

    value_bf16 = _bf16_parts(rows.value, torch.float32) if wants.query or wants.key else 0
    parts = product(rows.query, rows.key, rows.scaled)
    parts += split(rows.value, real, _fp16_parts(rows.value), value_bf16)
    if rows.second_query is not None and rows.second_key is not None:
        parts += product(rows.second_query, rows.second_key, True)
    if fill:
        run_splits(splits)
    return parts


class Problem(NamedTuple):
    """What is mixed and how: rows, limits, the parts of `split_operands`, and settings."""

    rows: Rows
    bias: Tensor | None
    real: Tensor | None
    mask: Tensor | None
    parts: Sequence[Tensor]
    causal: bool
    scale: float
    second_scale: float


class _Arguments(NamedTuple):
    """The operands and compile-time arguments that all kernels share."""

    query: Parts
    key: Parts
    value: Parts
    second_query: Parts
    second_key: Parts
    operands: tuple[Any, ...]  # of the scores: query, key, second query, second key
    limits: tuple[Tensor, Tensor, Mask]  # bias, real, mask
    constants: dict[str, Any]


def _arguments(problem: Problem) -> _Arguments:
    rows, bias, real, mask, parts, causal, _, _ = problem
    scaled = rows.scaled
    query, key, value, *second = (Parts(*parts[at : at + 3]) for at in range(0, len(parts), 3))
    if rows.key is rows.query and real is None:
        key = query
    second_query, second_key = second or (query, key)
    if scaled:
        first, counts = (fp16_operand(query), fp16_operand(key)), (_fp16_parts(rows.query), _fp16_parts(rows.key))
    else:
        first, counts = (bf16_operand(query, rows.query), bf16_operand(key, rows.key)), (1, 1)
    counts += (_fp16_parts(rows.second_query), _fp16_parts(rows.second_key)) if second else (1, 1)
    constants = {
        "WIDTH": part_width(rows.query.shape[2]),
        "SECOND": 0 if rows.second_query is None else part_width(rows.second_query.shape[2]),
        "VALUES": tile_width(rows.value.shape[2]),
        "PARTS": counts,
        "SCALED": scaled,
        "CAUSAL": causal,
        "HAS_BIAS": bias is not None,
        "HAS_REAL": real is not None,
        "MASK": mask_kind(mask),
    }
    limits = (
        rows.query if bias is None else bias.contiguous(),
        rows.query if real is None else real.contiguous().view(torch.uint8),
        mask_operand(None if mask is None else mask.unsqueeze(1), rows.query),
    )
    operands = (*first, fp16_operand(second_query), fp16_operand(second_key)) if second else (*first, *first)
    return _Arguments(query, key, value, second_query, second_key, operands, limits, constants)


def mix(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out (G,N,n) and the logarithm of the total of the weights (G,N), float32."""
    common, rows = _arguments(problem), problem.rows
    (groups, queries, _), keys, width = rows.query.shape, rows.key.shape[1], rows.value.shape[2]
    constants = {**common.constants, "PARTS": (*common.constants["PARTS"], _fp16_parts(rows.value))}
    out = torch.empty(groups, queries, width, dtype=torch.float32, device=rows.query.device)
    log_total = torch.empty(groups, queries, dtype=torch.float32, device=rows.query.device)
    tiling = _choose_tiling("mix", constants, rows.query.device, is_wide(rows.query, rows.second_query))
    operands = *common.operands, fp16_operand(common.value), *common.limits
    sizes = queries, keys, width, problem.scale, problem.second_scale
    triton.mix[groups, cdiv(queries, tiling.rows)](
        *operands, out, log_total, *sizes, **constants, **tiling.chunked(constants["WIDTH"])
    )
    return out, log_total


def mix_backward(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    problem: Problem,
    wants: WantedGradients,
    grad_total: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, second query, second key and bias; None where not wanted.

    `grad_total` is the gradient of `log_total`; None is 0. Where the key is the query, its gradient is added to the query's.
    """
    common, scale, second_scale = _arguments(problem), problem.scale, problem.second_scale
    query, key, value, second_query, second_key = problem.rows
    (groups, queries, width), keys = query.shape, key.shape[1]
    grad_parts, centre = split_rows(grad, bf16=2, other=out if wants.query or wants.key else None)
    if grad_total is not None and (wants.query or wants.key):
        centre = centre - grad_total.reshape(centre.shape)  # see `blocks.mix_in_blocks_backward`
    grads = bf16_operand(grad_parts, grad)
    values = bf16_operand(common.value, value) if wants.query or wants.key else grads
    operands = (*common.operands, values, grads)
    rest = (*common.limits, log_total, centre)
    widths = (width, 0 if second_query is None else second_query.shape[2])
    part_counts = (*common.constants["PARTS"], _bf16_parts(value, torch.float32))
    slopes = 1 if wants.coarse else 2
    is_chunked = is_wide(query, second_query)

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return tensor.new_empty(tensor.shape) if wanted and tensor is not None else None

    def bf16_operands(first: Parts, of_first: Tensor, second: Parts, of_second: Tensor | None) -> tuple[Any, Any]:
        first = bf16_operand(first, of_first)
        return first, first if of_second is None else bf16_operand(second, of_second)

    def counts(first: Tensor, other: Tensor, second: Tensor | None, second_other: Tensor | None) -> tuple[int, int]:
        of_second = 1 if second is None else _gradient_bf16_parts(second, second_other, wants)
        return _gradient_bf16_parts(first, other, wants), of_second

    of_query, of_second_query = like(query, wants.query), like(second_query, wants.query)
    of_second_key, of_bias = like(second_key, wants.key), like(problem.bias, wants.key or (wants.query and is_chunked))
    shared = key is query and wants.query and wants.key
    of_key = of_query if shared else like(key, wants.key)
    of_value = like(value, wants.value)
    of_keys = counts(query, key, second_query, second_key)
    of_queries = counts(key, query, second_key, second_query)

    def over_keys(slopes_out: triton.Slopes, wants_key: bool) -> None:
        constants = {**common.constants, "PARTS": (*part_counts, *of_keys), "SLOPES": slopes}
        tiling = _choose_tiling("key" if wants_key else "value", constants, query.device, is_chunked)
        wanted = {"WANTS_KEY": wants_key, "WANTS_VALUE": wants.value, **tiling.chunked(constants["WIDTH"])}
        written = [grad if place is None else place for place in (of_key, of_second_key, of_value, of_bias)]
        factors = bf16_operands(common.query, query, common.second_query, second_query) if wants.key else (grads, grads)
        sizes = queries, keys, *widths, value.shape[2], scale, second_scale
        triton.key_gradient[groups, cdiv(keys, tiling.columns)](
            *operands, *factors, *rest, *written, slopes_out, *sizes, **constants, **wanted
        )

    if is_chunked and (wants.query or wants.key):
        assert key is query
        padded, length = common.constants["WIDTH"], _padded_length(query)
        divisor, most_parts = padded & -padded, max(of_keys[0], of_queries[0])  # columns of tiles divide the width

        def product_bytes(tiling: Tiling) -> int:
            return 2 * tiling.stages * tiling.chunk * (slopes * tiling.rows + most_parts * min(tiling.columns, divisor))

        tiling = first_fitting(PRODUCT_TILINGS, product_bytes, query.device)
        tiling = tiling._replace(columns=min(tiling.columns, divisor))
        matrix = torch.empty(slopes, groups, length, length, dtype=STORED_BF16, device=query.device)
        written = triton.Slopes(matrix, _slopes_of(query), length, tiling.rows + tiling.chunk)
        over_keys(written, True)
        if of_query is not None:
            vectors = bf16_operand(common.query, query), bf16_operand(common.key, key)
            parts_of = {"SLOPES": slopes, "QUERY_PARTS": of_keys[0], "KEY_PARTS": of_queries[0]}
            kinds = {"WIDTH": padded, **parts_of, "CAUSAL": problem.causal, "ASK": queries % tiling.chunk != 0}
            triton.slope_product[groups * cdiv(queries, tiling.rows) * (padded // tiling.columns),](
                written, *vectors, of_query, queries, width, scale, **kinds, INNER=tiling.chunk, **tiling.options
            )
    elif wants.key or wants.value:
        over_keys(triton.Slopes(grad, 0, 0, 0), wants.key)
    if wants.query and not is_chunked:
        constants = {**common.constants, "PARTS": (*part_counts, *of_queries), "SLOPES": slopes, "SHARED": shared}
        tiling = _choose_tiling("query", constants, query.device, False)
        factors = bf16_operands(common.key, key, common.second_key, second_key)
        written = of_query, grad if of_second_query is None else of_second_query
        sizes = queries, keys, *widths, scale, second_scale
        triton.query_gradient[groups, cdiv(queries, tiling.rows)](
            *operands, *factors, *rest, *written, *sizes, **constants, **tiling.chunked(0)
        )
    return of_query, None if shared else of_key, of_value, of_second_query, of_second_key, of_bias if wants.key else None
