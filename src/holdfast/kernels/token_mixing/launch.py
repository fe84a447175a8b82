"""Launch the mixing kernels: in how many parts operands are split, and how large the tiles are."""

# mypy: ignore-errors
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.float32_parts import (
    DTYPES,
    NATIVE,
    WIDEST,
    Parts,
    PartTypes,
    PlannedSplit,
    bf16_operand,
    fp16_operand,
    plan_split,
    run_splits,
    split_rows,
    tile_width,
)
from holdfast.kernels.launching import cdiv
from holdfast.kernels.token_mixing import triton
from holdfast.kernels.token_mixing.allowed_keys import Mask, mask_kind, mask_operand


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int
    fold: bool = False  # see `triton._turn`

    @property
    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Measured on an H200. The first that fits into a multiprocessor's shared memory is used; the last fits everywhere.
SMALL = (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))
TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, fold=True), Tiling(64, 64, 4, 2, fold=True), Tiling(64, 32, 4, 2), *SMALL),
    "query": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "key": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),
    "value": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),  # the kernel over keys where only values are wanted
}
SCRATCH = 8192  # bytes that a kernel needs besides its tiles


def _tile_bytes(kernel: str, tiling: Tiling, constants: dict[str, Any]) -> int:
    """Return the bytes of the tiles: those that a program keeps, and those of a step of its loop, `stages` times."""
    width, second, values = (constants[name] for name in ("WIDTH", "SECOND", "VALUES"))
    parts = constants["PARTS"]
    if kernel in ("key", "value"):
        kept = parts[1] * width + parts[3] * second
        loaded = parts[0] * width + parts[2] * second + 2 * values
        long, short = tiling.columns, tiling.rows
    else:
        kept = parts[0] * width + parts[2] * second
        loaded = parts[1] * width + parts[3] * second + parts[4] * values
        long, short = tiling.rows, tiling.columns
    if kernel in ("query", "key"):
        kept += (2 if kernel == "query" else parts[4]) * values
        loaded += parts[5] * width * constants["SCALED"] + parts[6] * second
    return 2 * (long * kept + tiling.stages * short * loaded) + SCRATCH


def _tiling(kernel: str, constants: dict[str, Any], device: torch.device) -> Tiling:
    limit = shared_memory(device)
    return next(tiling for tiling in TILINGS[kernel] if _tile_bytes(kernel, tiling, constants) <= limit)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory one program may have; 2^30 in the interpreter, which has no limit."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**30


def supports(query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None) -> bool:
    """Return whether the kernels take rows of these widths and dtypes, none of them empty."""
    operands = [rows for rows in (query, key, value, second_query, second_key) if rows is not None]
    if not all(rows.shape[-1] <= WIDEST and rows.dtype in DTYPES and rows.numel() > 0 for rows in operands):
        return False
    widths = [0 if rows is None else tile_width(rows.shape[2]) for rows in (query, second_query, value)]
    constants = dict(zip(("WIDTH", "SECOND", "VALUES"), widths, strict=True)) | {"PARTS": (2,) * 7, "SCALED": True}
    least = max(_tile_bytes(kernel, tilings[-1], constants) for kernel, tilings in TILINGS.items())
    return least <= shared_memory(query.device)


def _fp16_parts(rows: Tensor) -> int:
    """Return in how many float16 parts to split the rows."""
    return 2 if rows.dtype == torch.float32 else 1


def _bf16_parts(rows: Tensor, out: torch.dtype, types: PartTypes) -> int:
    """Return in how many bfloat16 parts to split the rows: 1 if they are bfloat16, or the result of dtype `out` is."""
    return 1 if types.bf16 in (rows.dtype, out) else 2


class Rows(NamedTuple):
    """What is mixed, and what the weights come from."""

    query: Tensor
    key: Tensor  # the same object as `query` where keys equal queries
    value: Tensor
    second_query: Tensor | None
    second_key: Tensor | None

    def scaled(self, types: PartTypes) -> bool:
        """Return whether the first product is one of float16 parts; one of bfloat16 numbers needs no factors."""
        return not self.query.dtype == self.key.dtype == types.bf16


class WantedGradients(NamedTuple):
    """Which gradients the backward will compute."""

    query: bool
    key: bool  # and bias
    value: bool
    coarse: bool = False  # those of queries and keys will be rounded to bfloat16: one part of each factor is enough


def _gradient_bf16_parts(rows: Tensor, other: Tensor, wants: WantedGradients, types: PartTypes) -> int:
    """Return in how many bfloat16 parts to split rows that are a factor of the other's gradient."""
    return 1 if wants.coarse else _bf16_parts(rows, other.dtype, types)


def split_operands(
    rows: Rows, real: Tensor | None, wants: WantedGradients, *, types: PartTypes = NATIVE, fill: bool = True
) -> list[Tensor]:
    """Return all parts that `mix` and `mix_backward` need: the fields of `Parts` for each of the rows, one after another.

    `fill=False` only allocates them, for the compiler.
    """
    real = None if real is None else real.contiguous()
    splits: list[PlannedSplit] = []

    def split(operand: Tensor, real: Tensor | None, fp16: int, bf16: int) -> Parts:
        splits.append(plan_split(operand, real, fp16=fp16, bf16=bf16, types=types))
        return splits[-1].parts

    def product(query: Tensor, key: Tensor, scaled: bool) -> list[Tensor]:
        of_query, of_key = (_fp16_parts(query), _fp16_parts(key)) if scaled else (0, 0)
        needs_query, needs_key = (wants.key, wants.query) if scaled else (True, True)
        query_bf16 = _gradient_bf16_parts(query, key, wants, types) if needs_query else 0
        key_bf16 = _gradient_bf16_parts(key, query, wants, types) if needs_key else 0
        if key is query and real is None:
            both = split(query, None, of_query, max(query_bf16, key_bf16))
            return [*both, *(part.new_empty(0) for part in both)]
        return [*split(query, None, of_query, query_bf16), *split(key, real, of_key, key_bf16)]

    value_bf16 = _bf16_parts(rows.value, torch.float32, types) if wants.query or wants.key else 0
    parts = product(rows.query, rows.key, rows.scaled(types))
    parts += split(rows.value, real, _fp16_parts(rows.value), value_bf16)
    if rows.second_query is not None and rows.second_key is not None:
        parts += product(rows.second_query, rows.second_key, True)
    if fill:
        run_splits(splits)
    return parts


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


def _arguments(
    rows: Rows,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: Sequence[Tensor],
    causal: bool,
    types: PartTypes,
) -> _Arguments:
    query, key, value, *second = (Parts(*parts[at : at + 3]) for at in range(0, len(parts), 3))
    if rows.key is rows.query and real is None:
        key = query
    second_query, second_key = second or (query, key)
    scaled = rows.scaled(types)
    first = (
        (fp16_operand(query), fp16_operand(key))
        if scaled
        else (bf16_operand(query, rows.query), bf16_operand(key, rows.key))
    )
    constants = {
        "WIDTH": tile_width(rows.query.shape[2]),
        "SECOND": 0 if rows.second_query is None else tile_width(rows.second_query.shape[2]),
        "VALUES": tile_width(rows.value.shape[2]),
        "PARTS": (
            *((_fp16_parts(rows.query), _fp16_parts(rows.key)) if scaled else (1, 1)),
            *((_fp16_parts(rows.second_query), _fp16_parts(rows.second_key)) if second else (1, 1)),
        ),
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


def mix(
    rows: Rows,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: Sequence[Tensor],
    causal: bool,
    scale: float,
    second_scale: float,
    *,
    types: PartTypes = NATIVE,
) -> tuple[Tensor, Tensor]:
    """Return out (G,N,n) and the logarithm of the total of the weights (G,N), float32."""
    common = _arguments(rows, bias, real, mask, parts, causal, types)
    (groups, queries, _), keys, width = rows.query.shape, rows.key.shape[1], rows.value.shape[2]
    constants = {**common.constants, "PARTS": (*common.constants["PARTS"], _fp16_parts(rows.value))}
    out = torch.empty(groups, queries, width, dtype=torch.float32, device=rows.query.device)
    log_total = torch.empty(groups, queries, dtype=torch.float32, device=rows.query.device)
    tiling = _tiling("mix", constants, rows.query.device)
    triton.mix[groups, cdiv(queries, tiling.rows)](
        *common.operands,
        fp16_operand(common.value),
        *common.limits,
        out,
        log_total,
        queries,
        keys,
        width,
        scale,
        second_scale,
        **constants,
        **tiling.options,
        FOLD=tiling.fold,
    )
    return out, log_total


def mix_backward(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    rows: Rows,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: Sequence[Tensor],
    causal: bool,
    scale: float,
    second_scale: float,
    *,
    wants: WantedGradients,
    grad_total: Tensor | None = None,
    types: PartTypes = NATIVE,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, second query, second key and bias; None where not wanted.

    `grad_total` is the gradient of `log_total`; None is 0. Where the key is the query, its gradient is added to the query's.
    """
    common = _arguments(rows, bias, real, mask, parts, causal, types)
    query, key, value, second_query, second_key = rows
    (groups, queries, width), keys = query.shape, key.shape[1]
    grad_parts, centre = split_rows(grad, bf16=2, other=out if wants.query or wants.key else None, types=types)
    if grad_total is not None and (wants.query or wants.key):
        centre = centre - grad_total.reshape(centre.shape)  # see `blocks.mix_in_blocks_backward`
    grads = bf16_operand(grad_parts, grad)
    values = bf16_operand(common.value, value) if wants.query or wants.key else grads
    operands = (*common.operands, values, grads)
    rest = (*common.limits, log_total, centre)
    widths = (width, 0 if second_query is None else second_query.shape[2])
    part_counts = (*common.constants["PARTS"], _bf16_parts(value, torch.float32, types))
    slopes = 1 if wants.coarse else 2

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted and tensor is not None else None

    def bf16_operands(first: Parts, of_first: Tensor, second: Parts, of_second: Tensor | None) -> tuple[Any, Any]:
        first = bf16_operand(first, of_first)
        return first, first if of_second is None else bf16_operand(second, of_second)

    def counts(first: Tensor, other: Tensor, second: Tensor | None, second_other: Tensor | None) -> tuple[int, int]:
        of_second = 1 if second is None else _gradient_bf16_parts(second, second_other, wants, types)
        return _gradient_bf16_parts(first, other, wants, types), of_second

    of_query, of_second_query = like(query, wants.query), like(second_query, wants.query)
    of_second_key, of_bias = like(second_key, wants.key), like(bias, wants.key)
    shared = key is query and wants.query and wants.key
    of_key = of_query if shared else like(key, wants.key)
    of_value = like(value, wants.value)
    if wants.key or wants.value:
        these = counts(query, key, second_query, second_key)
        constants = {**common.constants, "PARTS": (*part_counts, *these), "SLOPES": slopes}
        tiling = _tiling("key" if wants.key else "value", constants, query.device)
        places = [grad if place is None else place for place in (of_key, of_second_key, of_value, of_bias)]
        triton.key_gradient[groups, cdiv(keys, tiling.columns)](
            *operands,
            *(bf16_operands(common.query, query, common.second_query, second_query) if wants.key else (grads, grads)),
            *rest,
            *places,
            queries,
            keys,
            *widths,
            value.shape[2],
            scale,
            second_scale,
            **constants,
            WANTS_KEY=wants.key,
            WANTS_VALUE=wants.value,
            **tiling.options,
            FOLD=tiling.fold,
        )
    if wants.query:
        these = counts(key, query, second_key, second_query)
        constants = {**common.constants, "PARTS": (*part_counts, *these), "SLOPES": slopes}
        tiling = _tiling("query", constants, query.device)
        triton.query_gradient[groups, cdiv(queries, tiling.rows)](
            *operands,
            *bf16_operands(common.key, key, common.second_key, second_key),
            *rest,
            of_query,
            grad if of_second_query is None else of_second_query,
            queries,
            keys,
            *widths,
            scale,
            second_scale,
            **constants,
            SHARED=shared,
            **tiling.options,
            FOLD=tiling.fold,
        )
    return of_query, None if shared else of_key, of_value, of_second_query, of_second_key, of_bias
