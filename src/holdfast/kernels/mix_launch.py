"""Launching the mixing kernels: which parts they need, and how large their tiles are. Imported only where Triton can run."""

# mypy: ignore-errors
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import mix_kernels
from holdfast.kernels.mix_kernels import Mask
from holdfast.kernels.part_kernels import (
    DTYPES,
    NATIVE,
    WIDEST,
    Apart,
    Kinds,
    Order,
    as_brains,
    as_halves,
    fill_orders,
    order_apart,
    take_apart,
    tile_width,
)
from holdfast.kernels.sizes import cdiv


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int
    fold: bool = False  # see `mix_kernels._turn`

    @property
    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Measured on an H200. The first that fits into a multiprocessor's shared memory is taken, the last fits everywhere.
SMALL = (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))
TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, fold=True), Tiling(64, 64, 4, 2, fold=True), Tiling(64, 32, 4, 2), *SMALL),
    "query": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "key": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),
    "value": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),  # the kernel over keys where only values are wanted
}
SCRATCH = 8192  # bytes that a kernel takes beside its tiles


def _tile_bytes(kernel: str, tiling: Tiling, constants: dict[str, Any]) -> int:
    """What the tiles take: those that stay for a whole program, and those of a step of its loop, `stages` times."""
    width, second, values = (constants[name] for name in ("WIDTH", "SECOND", "VALUES"))
    parts = constants["PARTS"]
    if kernel in ("key", "value"):
        stay = parts[1] * width + parts[3] * second
        pass_by = parts[0] * width + parts[2] * second + 2 * values
        long, short = tiling.columns, tiling.rows
    else:
        stay = parts[0] * width + parts[2] * second
        pass_by = parts[1] * width + parts[3] * second + parts[4] * values
        long, short = tiling.rows, tiling.columns
    if kernel in ("query", "key"):
        stay += (2 if kernel == "query" else parts[4]) * values
        pass_by += parts[5] * width * constants["SCALED"] + parts[6] * second
    return 2 * (long * stay + tiling.stages * short * pass_by) + SCRATCH


def _tiling(kernel: str, constants: dict[str, Any], device: torch.device) -> Tiling:
    limit = shared_memory(device)
    return next(tiling for tiling in TILINGS[kernel] if _tile_bytes(kernel, tiling, constants) <= limit)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """What one program may have; in the interpreter, as much as it likes."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**30


def supports(query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None) -> bool:
    """Whether the kernels take rows of these widths and dtypes, none of them empty."""
    operands = [rows for rows in (query, key, value, second_query, second_key) if rows is not None]
    if not all(rows.shape[-1] <= WIDEST and rows.dtype in DTYPES and rows.numel() > 0 for rows in operands):
        return False
    widths = [0 if rows is None else tile_width(rows.shape[2]) for rows in (query, second_query, value)]
    constants = dict(zip(("WIDTH", "SECOND", "VALUES"), widths, strict=True)) | {"PARTS": (2,) * 7, "SCALED": True}
    least = max(_tile_bytes(kernel, tilings[-1], constants) for kernel, tilings in TILINGS.items())
    return least <= shared_memory(query.device)


def mask_kind(mask: Tensor | None) -> int:
    """0: none, 1: bool, 2: added to the scores."""
    return 0 if mask is None else 1 if mask.dtype == torch.bool else 2


def mask_operand(mask: Tensor | None, otherwise: Tensor) -> Mask:
    """mask (B,H,N,M), or 1 in place of any of them; where there is none, a pointer that is never followed."""
    if mask is None:
        return Mask(otherwise, 0, 0, 0, 0)
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, *strides)


def _halves(rows: Tensor) -> int:
    return 2 if rows.dtype == torch.float32 else 1


def _brains(rows: Tensor, out: torch.dtype, kinds: Kinds) -> int:
    """One if that is all there is, or all that a gradient of dtype `out` can show."""
    return 1 if kinds.brain in (rows.dtype, out) else 2


class Rows(NamedTuple):
    """What is mixed, and by what."""

    query: Tensor
    key: Tensor  # the very query where they are the same
    value: Tensor
    second_query: Tensor | None
    second_key: Tensor | None

    def scaled(self, kinds: Kinds) -> bool:
        """Whether the first product is one of halves; that of brains needs no factors."""
        return not self.query.dtype == self.key.dtype == kinds.brain


class Wants(NamedTuple):
    """Whose gradients will be asked for."""

    query: bool
    key: bool  # and bias
    value: bool
    coarse: bool = False  # those of queries and keys will be rounded to bfloat16: one part of each factor shows as much


def _gradient_brains(rows: Tensor, other: Tensor, wants: Wants, kinds: Kinds) -> int:
    """Of the rows that are a factor of the other's gradient."""
    return 1 if wants.coarse else _brains(rows, other.dtype, kinds)


def take_all_apart(
    rows: Rows, real: Tensor | None, wants: Wants, *, kinds: Kinds = NATIVE, fill: bool = True
) -> list[Tensor]:
    """All parts that `mix` and `mix_backward` need, once for both: an `Apart` for each of the rows, one after another."""
    real = None if real is None else real.contiguous()
    orders: list[Order] = []

    def apart(part: Tensor, real: Tensor | None, halves: int, brains: int) -> Apart:
        orders.append(order_apart(part, real, halves=halves, brains=brains, kinds=kinds))
        return orders[-1].apart

    def product(query: Tensor, key: Tensor, scaled: bool) -> list[Tensor]:
        of_query, of_key = (_halves(query), _halves(key)) if scaled else (0, 0)
        needs_query, needs_key = (wants.key, wants.query) if scaled else (True, True)
        query_brains = _gradient_brains(query, key, wants, kinds) if needs_query else 0
        key_brains = _gradient_brains(key, query, wants, kinds) if needs_key else 0
        if key is query and real is None:
            both = apart(query, None, of_query, max(query_brains, key_brains))
            return [*both, *(part.new_empty(0) for part in both)]
        return [*apart(query, None, of_query, query_brains), *apart(key, real, of_key, key_brains)]

    value_brains = _brains(rows.value, torch.float32, kinds) if wants.query or wants.key else 0
    parts = product(rows.query, rows.key, rows.scaled(kinds))
    parts += apart(rows.value, real, _halves(rows.value), value_brains)
    if rows.second_query is not None and rows.second_key is not None:
        parts += product(rows.second_query, rows.second_key, True)
    if fill:
        fill_orders(orders)
    return parts


class _Problem(NamedTuple):
    """One mixing without its values, ready for any of the kernels."""

    query: Apart
    key: Apart
    value: Apart
    second_query: Apart
    second_key: Apart
    operands: tuple[Any, ...]  # of the scores: query, key, second query, second key
    limits: tuple[Tensor, Tensor, Mask]  # bias, real, mask
    constants: dict[str, Any]


def _problem(
    rows: Rows,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: Sequence[Tensor],
    causal: bool,
    kinds: Kinds,
) -> _Problem:
    query, key, value, *second = (Apart(*parts[at : at + 3]) for at in range(0, len(parts), 3))
    if rows.key is rows.query and real is None:
        key = query
    second_query, second_key = second or (query, key)
    scaled = rows.scaled(kinds)
    first = (as_halves(query), as_halves(key)) if scaled else (as_brains(query, rows.query), as_brains(key, rows.key))
    constants = {
        "WIDTH": tile_width(rows.query.shape[2]),
        "SECOND": 0 if rows.second_query is None else tile_width(rows.second_query.shape[2]),
        "VALUES": tile_width(rows.value.shape[2]),
        "PARTS": (
            *((_halves(rows.query), _halves(rows.key)) if scaled else (1, 1)),
            *((_halves(rows.second_query), _halves(rows.second_key)) if second else (1, 1)),
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
    operands = (*first, as_halves(second_query), as_halves(second_key)) if second else (*first, *first)
    return _Problem(query, key, value, second_query, second_key, operands, limits, constants)


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
    kinds: Kinds = NATIVE,
) -> tuple[Tensor, Tensor]:
    """out (G,N,n) and the logarithm of the total of the weights (G,N), float32."""
    problem = _problem(rows, bias, real, mask, parts, causal, kinds)
    (groups, queries, _), keys, width = rows.query.shape, rows.key.shape[1], rows.value.shape[2]
    constants = {**problem.constants, "PARTS": (*problem.constants["PARTS"], _halves(rows.value))}
    out = torch.empty(groups, queries, width, dtype=torch.float32, device=rows.query.device)
    log_total = torch.empty(groups, queries, dtype=torch.float32, device=rows.query.device)
    tiling = _tiling("mix", constants, rows.query.device)
    mix_kernels.mix[groups, cdiv(queries, tiling.rows)](
        *problem.operands,
        as_halves(problem.value),
        *problem.limits,
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
    wants: Wants,
    kinds: Kinds = NATIVE,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, second query, second key and bias; None where not wanted.

    Where the key is the query, its gradient is in the query's.
    """
    problem = _problem(rows, bias, real, mask, parts, causal, kinds)
    query, key, value, second_query, second_key = rows
    (groups, queries, width), keys = query.shape, key.shape[1]
    grad_parts, centre = take_apart(grad, brains=2, other=out if wants.query or wants.key else None, kinds=kinds)
    grads = as_brains(grad_parts, grad)
    values = as_brains(problem.value, value) if wants.query or wants.key else grads
    operands = (*problem.operands, values, grads)
    rest = (*problem.limits, log_total, centre)
    widths = (width, 0 if second_query is None else second_query.shape[2])
    part_counts = (*problem.constants["PARTS"], _brains(value, torch.float32, kinds))
    slopes = 1 if wants.coarse else 2

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted and tensor is not None else None

    def brains(first: Apart, of_first: Tensor, second: Apart, of_second: Tensor | None) -> tuple[Any, Any]:
        first = as_brains(first, of_first)
        return first, first if of_second is None else as_brains(second, of_second)

    def counts(first: Tensor, other: Tensor, second: Tensor | None, second_other: Tensor | None) -> tuple[int, int]:
        of_second = 1 if second is None else _gradient_brains(second, second_other, wants, kinds)
        return _gradient_brains(first, other, wants, kinds), of_second

    of_query, of_second_query = like(query, wants.query), like(second_query, wants.query)
    of_second_key, of_bias = like(second_key, wants.key), like(bias, wants.key)
    shared = key is query and wants.query and wants.key
    of_key = of_query if shared else like(key, wants.key)
    of_value = like(value, wants.value)
    if wants.key or wants.value:
        these = counts(query, key, second_query, second_key)
        constants = {**problem.constants, "PARTS": (*part_counts, *these), "SLOPES": slopes}
        tiling = _tiling("key" if wants.key else "value", constants, query.device)
        places = [grad if place is None else place for place in (of_key, of_second_key, of_value, of_bias)]
        mix_kernels.key_gradient[groups, cdiv(keys, tiling.columns)](
            *operands,
            *(brains(problem.query, query, problem.second_query, second_query) if wants.key else (grads, grads)),
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
        constants = {**problem.constants, "PARTS": (*part_counts, *these), "SLOPES": slopes}
        tiling = _tiling("query", constants, query.device)
        mix_kernels.query_gradient[groups, cdiv(queries, tiling.rows)](
            *operands,
            *brains(problem.key, key, problem.second_key, second_key),
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
