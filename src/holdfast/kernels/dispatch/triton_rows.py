"""Triton kernels that work on rows in expert order: biases, gated activations, weights, and the sums of an expert's rows.

R rows sorted by expert, T tokens, K slots a token, E experts, `order` the slot of each row; `used` points at the number of
rows that belong to an expert, at most R. R may be far larger than `used`: at most `MOST_PROGRAMS` programs run over rows,
and each takes every `MOST_PROGRAMS`-th row. Results repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.dispatch.triton import BLOCK, columns, expert_of
from holdfast.kernels.fast_launch import fast_launch
from holdfast.kernels.launching import cdiv, next_power_of_2

SHARES = 16  # of an expert's rows: each is added up by its own programs, so that one expert with all rows is not slow
MOST_PROGRAMS = 2**17  # over rows: a program that finds nothing to do still has to be started


@fast_launch
@triton.jit
def _scale_and_dot(grad, rows, weights, order, used, scaled, dots, width, BLOCK: tl.constexpr):
    """Multiply gradients by their weights, in place."""
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        slot = tl.load(order + row)
        weight = tl.load(weights + slot)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
            h = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
            total += g * h
            tl.store(grad + row * width + column, weight * g, mask=inside)
            tl.store(scaled + row * width + column, weight * h, mask=inside)
        tl.store(dots + slot, tl.sum(total, axis=0))


@fast_launch
@triton.jit
def _add_bias(rows, bias, offsets, width, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    used = tl.load(offsets + experts - 1).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), used, tl.num_programs(0)):
        place = rows + row * width + column
        added = tl.load(bias + expert_of(row, offsets, experts, BINS) * width + column, mask=inside, other=0.0)
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + added.to(tl.float32)
        tl.store(place, value, mask=inside)


@fast_launch
@triton.jit
def _sum_rows(rows, weights, order, offsets, out, width, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up one share of the rows of one expert: blocks number `share`, `share + shares`, ..."""
    expert, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = 0
    if expert > 0:
        start = tl.load(offsets + expert - 1)
    end = tl.load(offsets + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start + share * ROWS, end, shares * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < end)[:, None] & (column < width)[None, :]
        values = tl.load(rows + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            slot = tl.load(order + row, mask=row < end, other=0)
            values *= tl.load(weights + slot, mask=row < end, other=0.0)[:, None]
        total += values
    place = (share * tl.num_programs(0) + expert).to(tl.int64) * width + column
    tl.store(out + place, tl.sum(total, axis=0), mask=column < width)


@fast_launch
@triton.jit
def _add_bias_dots(grad, bias, order, offsets, dots, width, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    used = tl.load(offsets + experts - 1).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), used, tl.num_programs(0)):
        expert = expert_of(row, offsets, experts, BINS)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
            total += g * tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        place = dots + tl.load(order + row)
        tl.store(place, tl.load(place) + tl.sum(total, axis=0))


@triton.jit
def _activation(x, NAME: tl.constexpr):
    """Return the activation and its derivative."""
    if NAME == "relu":
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)  # NaN stays NaN, as in torch
    if NAME == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * phi, phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if NAME == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2z)
        phi = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * phi, phi + x * phi * (1.0 - phi) * slope
    s = tl.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


@fast_launch
@triton.jit
def _glu(gate_up, used, out, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value, _ = _activation(gate, NAME)
        tl.store(out + row * width + column, value * up, mask=inside)


@fast_launch
@triton.jit
def _glu_backward(
    grad,
    gate_up,
    weights,
    order,
    used,
    grad_gate_up,
    dots,
    width,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_scale_and_dot` for rows h = activation(gate) * up, which are computed again; `grad` is replaced by weight * h."""
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        slot = tl.load(order + row)
        weight = tl.load(weights + slot)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
            value, slope = _activation(gate, NAME)
            h = (value * up).to(grad.dtype.element_ty).to(tl.float32)  # rounded as it was in the forward
            total += g * h
            tl.store(grad + row * width + column, weight * h, mask=inside)
            tl.store(grad_gate_up + row * 2 * width + column, weight * g * up * slope, mask=inside)
            tl.store(grad_gate_up + row * 2 * width + width + column, weight * g * value, mask=inside)
        tl.store(dots + slot, tl.sum(total, axis=0))


def add_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Add the bias (E,n) of its expert to each row (R,n), in place."""
    experts, width = bias.shape
    block = columns(width)
    grid = (min(rows.shape[0], MOST_PROGRAMS), cdiv(width, block["BLOCK"]))
    _add_bias[grid](rows, bias, offsets, width, experts, BINS=next_power_of_2(experts), **block)
    return rows


def sum_rows(rows: Tensor, offsets: Tensor, weights: Tensor | None, order: Tensor) -> Tensor:
    """Return the sum (E,n) of the rows (R,n) of each expert, times their weights; float32, the same in each run."""
    experts, width = offsets.shape[0], rows.shape[1]
    parts = torch.empty(SHARES, experts, width, dtype=torch.float32, device=rows.device)
    weighted = weights is not None
    _sum_rows[(experts, cdiv(width, 64), SHARES)](
        rows, weights if weighted else rows, order, offsets, parts, width, WEIGHTED=weighted, ROWS=32, COLUMNS=64
    )
    return parts.sum(0)


def add_bias_dots(grad: Tensor, bias: Tensor, order: Tensor, offsets: Tensor, dots: Tensor) -> None:
    """Add the dot product of each row of `grad (R,d)` and the bias of its expert to `dots`, by slot, in place."""
    experts, width = bias.shape
    grid = (min(grad.shape[0], MOST_PROGRAMS),)
    _add_bias_dots[grid](
        grad,
        bias,
        order,
        offsets,
        dots,
        width,
        experts,
        BINS=next_power_of_2(experts),
        **columns(width),
    )


def scale_and_dot(grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale `grad` in place, and return it, the scaled rows and the dot products by slot."""
    scaled, dots = torch.empty_like(rows), torch.zeros_like(weights)
    grid, width = (min(rows.shape[0], MOST_PROGRAMS),), rows.shape[1]
    _scale_and_dot[grid](grad, rows, weights, order, used, scaled, dots, width, **columns(width))
    return grad, scaled, dots


def glu(gate_up: Tensor, used: Tensor, activation: str) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    width, block = out.shape[1], columns(out.shape[1])
    grid = (min(out.shape[0], MOST_PROGRAMS), cdiv(width, block["BLOCK"]))
    _glu[grid](gate_up, used, out, width, NAME=activation, **block)
    return out


def glu_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor, used: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite `grad` with the weighted h: this saves memory where most is needed."""
    out, dots = torch.empty_like(gate_up), torch.zeros_like(weights)
    grid, width = (min(grad.shape[0], MOST_PROGRAMS),), grad.shape[1]
    _glu_backward[grid](grad, gate_up, weights, order, used, out, dots, width, NAME=activation, **columns(width, BLOCK // 2))
    return out, grad, dots
