"""Launching the mixing kernels: which parts they need, and how large their tiles are. Imported only where Triton can run."""

# mypy: ignore-errors
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from holdfast.ops import mix_kernels
from holdfast.ops.mix_kernels import Mask
from holdfast.ops.part_kernels import DTYPES, NATIVE, WIDEST, Kinds, Operand, take_apart, tile_width


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int

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
    "mix": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "query": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "key": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),
    "value": (Tiling(32, 64, 4, 3), Tiling(32, 64, 4, 2), *SMALL),  # the kernel over keys where only values are wanted
}
SCRATCH = 8192  # bytes that a kernel takes beside its tiles


def _tile_bytes(kernel: str, tiling: Tiling, constants: dict[str, Any]) -> int:
    """What the tiles take: those that stay for a whole program, and those of a step of its loop, `stages` times."""
    width, second, values = (constants[name] for name in ("WIDTH", "SECOND", "VALUES"))
    parts = constants["PARTS"]
    stay = parts[0] * parts[1] * width + parts[2] * parts[3] * second
    if kernel in ("key", "value"):
        pass_by = parts[0] * width + parts[2] * second + 2 * values
        long, short = tiling.columns, tiling.rows
    else:
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


class _Term(NamedTuple):
    """A product of queries and keys, taken apart: for the scores, and for the gradients of the other side."""

    query: Operand
    key: Operand
    query_brain: Operand
    key_brain: Operand
    parts: tuple[int, int]
    query_brains: int
    key_brains: int
    scaled: bool


def _halves(rows: Tensor) -> int:
    return 2 if rows.dtype == torch.float32 else 1


def _brains(rows: Tensor, out: torch.dtype, kinds: Kinds) -> int:
    """One if that is all there is, or all that a gradient of dtype `out` can show."""
    return 1 if kinds.brain in (rows.dtype, out) else 2


def _term(
    query: Tensor, key: Tensor, real: Tensor | None, kinds: Kinds, wants: Sequence[bool], always_scaled: bool
) -> _Term:
    query_brains, key_brains = _brains(query, key.dtype, kinds), _brains(key, query.dtype, kinds)
    if not always_scaled and query.dtype == key.dtype == kinds.brain:
        q, k = take_apart(query, brains=1, kinds=kinds)[1], take_apart(key, real, brains=1, kinds=kinds)[1]
        return _Term(q, k, q, k, (1, 1), 1, 1, False)
    of_query = {"halves": _halves(query), "brains": query_brains if wants[1] else 0, "kinds": kinds}
    of_key = {"halves": _halves(key), "brains": key_brains if wants[0] else 0, "kinds": kinds}
    if real is None and _same(query, key):
        of_query["brains"] = max(of_query["brains"], of_key["brains"])
        q, query_brain, _ = take_apart(query, **of_query)
        k, key_brain = q, query_brain
    else:
        q, query_brain, _ = take_apart(query, **of_query)
        k, key_brain, _ = take_apart(key, real, **of_key)
    return _Term(q, k, query_brain, key_brain, (_halves(query), _halves(key)), query_brains, key_brains, True)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


class _Problem(NamedTuple):
    """One mixing without its values, ready for any of the kernels."""

    first: _Term
    second: _Term
    limits: tuple[Tensor, Tensor, Mask]  # bias, real, mask
    sizes: tuple[int, int, int]  # G, N, M
    constants: dict[str, Any]


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
    kinds: Kinds,
    wants: Sequence[bool],
) -> _Problem:
    first = _term(query, key, real, kinds, wants, always_scaled=False)
    second = first
    if second_query is not None and second_key is not None:
        second = _term(second_query, second_key, real, kinds, wants, always_scaled=True)
    constants = {
        "WIDTH": tile_width(query.shape[2]),
        "SECOND": 0 if second_query is None else tile_width(second_query.shape[2]),
        "VALUES": tile_width(value.shape[2]),
        "PARTS": (*first.parts, *second.parts),
        "SCALED": first.scaled,
        "CAUSAL": causal,
        "HAS_BIAS": bias is not None,
        "HAS_REAL": real is not None,
        "MASK": mask_kind(mask),
    }
    limits = (
        query if bias is None else bias.contiguous(),
        query if real is None else real.view(torch.uint8),
        mask_operand(None if mask is None else mask.unsqueeze(1), query),
    )
    return _Problem(first, second, limits, (query.shape[0], query.shape[1], key.shape[1]), constants)


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
    *,
    kinds: Kinds = NATIVE,
) -> tuple[Tensor, Tensor]:
    """out (G,N,n) and the logarithm of the total of the weights (G,N), float32."""
    real = None if real is None else real.contiguous()
    problem = _problem(query, key, value, second_query, second_key, bias, real, mask, causal, kinds, wants=(False, False))
    groups, queries, keys = problem.sizes
    values, _, _ = take_apart(value, real, halves=_halves(value), kinds=kinds)
    constants = {**problem.constants, "PARTS": (*problem.constants["PARTS"], _halves(value))}
    out = torch.empty(groups, queries, value.shape[2], dtype=torch.float32, device=query.device)
    log_total = torch.empty(groups, queries, dtype=torch.float32, device=query.device)
    tiling = _tiling("mix", constants, query.device)
    mix_kernels.mix[groups, triton.cdiv(queries, tiling.rows)](
        problem.first.query,
        problem.first.key,
        problem.second.query,
        problem.second.key,
        values,
        *problem.limits,
        out,
        log_total,
        queries,
        keys,
        value.shape[2],
        scale,
        second_scale,
        **constants,
        **tiling.options,
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
    *,
    wants: tuple[bool, bool, bool],  # queries; keys and bias; values
    kinds: Kinds = NATIVE,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, second query, second key and bias; None where not wanted."""
    real = None if real is None else real.contiguous()
    problem = _problem(query, key, value, second_query, second_key, bias, real, mask, causal, kinds, wants)
    first, second = problem.first, problem.second
    groups, queries, keys = problem.sizes
    wants_query, wants_key, wants_value = wants
    _, grads, centre = take_apart(grad, brains=2, other=out, kinds=kinds)
    value_brains = _brains(value, torch.float32, kinds)
    values = take_apart(value, real, brains=value_brains, kinds=kinds)[1] if wants_query or wants_key else grads
    parts = (*problem.constants["PARTS"], value_brains)
    operands = (first.query, first.key, second.query, second.key, values, grads)
    rest = (*problem.limits, log_total, centre)
    widths = (query.shape[2], 0 if second_query is None else second_query.shape[2])

    def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted and tensor is not None else None

    of_query, of_second_query = like(query, wants_query), like(second_query, wants_query)
    of_key, of_second_key, of_bias = like(key, wants_key), like(second_key, wants_key), like(bias, wants_key)
    of_value = like(value, wants_value)
    if wants_query:
        constants = {**problem.constants, "PARTS": (*parts, first.key_brains, second.key_brains)}
        tiling = _tiling("query", constants, query.device)
        mix_kernels.query_gradient[groups, triton.cdiv(queries, tiling.rows)](
            *operands,
            first.key_brain,
            second.key_brain,
            *rest,
            of_query,
            grad if of_second_query is None else of_second_query,
            queries,
            keys,
            *widths,
            scale,
            second_scale,
            **constants,
            **tiling.options,
        )
    if wants_key or wants_value:
        constants = {**problem.constants, "PARTS": (*parts, first.query_brains, second.query_brains)}
        tiling = _tiling("key" if wants_key else "value", constants, query.device)
        places = [grad if place is None else place for place in (of_key, of_second_key, of_value, of_bias)]
        mix_kernels.key_gradient[groups, triton.cdiv(keys, tiling.columns)](
            *operands,
            first.query_brain,
            second.query_brain,
            *rest,
            *places,
            queries,
            keys,
            *widths,
            value.shape[2],
            scale,
            second_scale,
            **constants,
            WANTS_KEY=wants_key,
            WANTS_VALUE=wants_value,
            **tiling.options,
        )
    return of_query, of_key, of_value, of_second_query, of_second_key, of_bias
