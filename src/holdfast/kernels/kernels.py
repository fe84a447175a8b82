"""Triton kernels for moving rows between token order and expert order. Imported only where Triton can run.

R rows sorted by expert, T tokens, K slots a token, `order` the slot of each row and `slots` the row of each slot; `used`
points at the number of rows that belong to an expert. Where slots are ragged, R is far more than that: there are no more
programs over rows than `MOST`, and each takes every so manieth row.
Each output element is written by one program in a fixed order of additions, so results repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.sizes import cdiv, next_power_of_2

BLOCK = 1024
FEW = 16  # slots
MOST = 2**17  # programs over rows: a program that finds nothing to do still has to be started


@triton.jit
def _last_slot(slots, token, limit, K: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr):
    """How many slots to look at: up to the last that is in use; where they are few, all: that lets loads overlap."""
    last = K
    if not FEW:
        places = tl.arange(0, SLOTS)
        own = tl.load(slots + token * K + places, mask=places < K, other=limit)
        last = tl.max(tl.where(own < limit, places + 1, 0), axis=0)
    return last


@triton.jit
def _gather(tokens, slots, used, out, width, K: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """A token is read once and written to all its rows: reading it once for every row takes half as long again."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    values = tl.load(tokens + token * width + column, mask=column < width)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        tl.store(out + row * width + column, values, mask=(column < width) & (row + 0 * column < limit))


@triton.jit
def _combine(
    rows,
    slots,
    weights,
    used,
    out,
    width,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        # A row of nobody is uninitialised memory: never load it, since 0 * NaN is NaN.
        inside = (column < width) & (row + 0 * column < limit)
        values = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * K + slot)
        total += values
    tl.store(out + token * width + column, total, mask=column < width)


@triton.jit
def _scale_and_dot(grad, rows, weights, order, used, scaled, dots, width, BLOCK: tl.constexpr):
    """The gradients are overwritten by what they are times their weights."""
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


@triton.jit
def _activation(x, NAME: tl.constexpr):
    """The activation and its derivative."""
    if NAME == "relu":
        positive = x > 0
        return tl.where(positive, x, 0.0), tl.where(positive, 1.0, 0.0)
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


@triton.jit
def _glu(gate_up, used, out, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value, _ = _activation(gate, NAME)
        tl.store(out + row * width + column, value * up, mask=inside)


@triton.jit
def _glu_backward(grad, gate_up, weights, order, used, grad_gate_up, dots, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """`_scale_and_dot` with the rows h = activation(gate) * up made again, and on through them; `grad` becomes w h."""
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


def _slot_options(slots: Tensor) -> dict[str, int | bool]:
    count = slots.shape[1]
    return {"K": count, "SLOTS": next_power_of_2(count), "FEW": count <= FEW, "BLOCK": BLOCK}


def gather(tokens: Tensor, slots: Tensor, used: Tensor, count: int) -> Tensor:
    out = tokens.new_empty(count, tokens.shape[1])
    grid = (tokens.shape[0], cdiv(out.shape[1], BLOCK))
    _gather[grid](tokens, slots, used, out, out.shape[1], **_slot_options(slots))
    return out


def combine(rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor) -> Tensor:
    out = rows.new_empty(slots.shape[0], rows.shape[1])
    grid = (out.shape[0], cdiv(out.shape[1], BLOCK))
    weighted = weights is not None
    _combine[grid](
        rows, slots, weights if weighted else rows, used, out, out.shape[1], WEIGHTED=weighted, **_slot_options(slots)
    )
    return out


def scale_and_dot(grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`grad` is scaled where it lies."""
    scaled, dots = torch.empty_like(rows), torch.zeros_like(weights)
    grid = (min(rows.shape[0], MOST),)
    _scale_and_dot[grid](grad, rows, weights, order, used, scaled, dots, rows.shape[1], BLOCK=BLOCK)
    return grad, scaled, dots


def glu(gate_up: Tensor, used: Tensor, activation: str) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    grid = (min(out.shape[0], MOST), cdiv(out.shape[1], BLOCK))
    _glu[grid](gate_up, used, out, out.shape[1], NAME=activation, BLOCK=BLOCK)
    return out


def glu_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor, used: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`grad` is overwritten by the weighted h: memory is saved where most is needed."""
    out, dots = torch.empty_like(gate_up), torch.zeros_like(weights)
    grid = (min(grad.shape[0], MOST),)
    _glu_backward[grid](grad, gate_up, weights, order, used, out, dots, grad.shape[1], NAME=activation, BLOCK=BLOCK // 2)
    return out, grad, dots
