"""Rows in expert order: sort slots by expert, move rows between token order and expert order, and work on them there.

    T tokens, K slots a token, E experts; R rows, sorted by expert: one a slot, or fewer if fewer slots are in use
    tokens (T,d); rows (R,d); order (R,), the slot of each row; slots (T,K), the row of each slot

An expert index of E marks an unused slot. Unused slots come last: their rows are numbered `used` or more, hold undefined
values and are never read. Triton on a GPU, PyTorch elsewhere.

On a GPU the host does not know how many slots are in use, and memory is allocated for R = T K rows. A caller that knows a
smaller number, `most_rows`, gets R = `most_rows`. Slots in use beyond that number are dropped, never written elsewhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import has_kernels, on_gpu, operator

MOST_EXPERTS = 512  # with more, the counts of a program become too large
GLUS = ("silu", "gelu", "gelu_tanh", "relu")  # gated activations, `activation(gate) * up`, that have a kernel


class Dispatch(NamedTuple):
    """Where the row of each slot is."""

    order: Tensor  # (R,) the slot of each row, counted through all slots; undefined from `used` on
    slots: Tensor  # (T,K) the row of each slot; `used` or more for an unused one
    offsets: Tensor  # (E,) int32, where each expert's rows end

    @property
    def used(self) -> Tensor:
        """The number of rows that belong to an expert."""
        return self.offsets[-1]


def dispatch(chosen: Tensor, experts: int, most_rows: int | None = None) -> Dispatch:
    """Sort the slots of `chosen (T,K)` by expert, stably: within an expert, rows keep the order of their tokens.

    At most `most_rows` slots must be in use, if given. With more, raise ValueError on a CPU; on a GPU, where counting them
    would synchronise with the host, the last experts lose their last rows.
    """
    rows = chosen.numel() if most_rows is None else min(most_rows, chosen.numel())
    if has_kernels(chosen) and experts <= MOST_EXPERTS and 0 < chosen.numel() < 2**31:
        return Dispatch(*_dispatch(chosen.contiguous(), experts, rows))
    tokens, slots_per_token = chosen.shape
    keys = chosen.reshape(-1)
    if experts < torch.iinfo(torch.int16).max:
        keys = keys.to(torch.int16)
    by_expert, order = torch.sort(keys, stable=True)
    boundaries = torch.arange(experts, device=chosen.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, boundaries, right=True).to(torch.int32)
    positions = torch.arange(order.shape[0], device=chosen.device)
    slots = torch.empty_like(order).scatter_(0, order, positions).view(tokens, slots_per_token)
    if chosen.device.type == "cpu" and not torch.compiler.is_compiling():
        used = int(offsets[-1])  # reading a size is free on a CPU, a stall on a GPU, a graph break in a trace
        if used > rows:
            raise ValueError(f"{used} slots have an expert, but most_rows is {rows}; pass a larger number, or None.")
        return Dispatch(order[:used], slots, offsets)
    return Dispatch(order, slots, offsets) if most_rows is None else Dispatch(order[:rows], slots, offsets.clamp_max(rows))


_dispatch = operator(
    "dispatch(Tensor chosen, int experts, SymInt rows) -> (Tensor, Tensor, Tensor)",
    on_gpu(__name__, "dispatch"),
    lambda chosen, experts, rows: (
        chosen.new_empty(rows, dtype=torch.int64),
        chosen.new_empty(chosen.shape, dtype=torch.int64),
        chosen.new_empty(experts, dtype=torch.int32),
    ),
)


# Kernels for rows on a GPU. The last two have no PyTorch version: see `has_glu_kernel`.
_gather, _combine = on_gpu(__name__, "gather"), on_gpu(__name__, "combine")
_add_bias, _add_bias_dots = on_gpu(__name__, "add_bias"), on_gpu(__name__, "add_bias_dots")
_sum_rows, _scale_and_dot = on_gpu(__name__, "sum_rows"), on_gpu(__name__, "scale_and_dot")
# (rows (R,2H), used, name of the activation) -> activation(gate) * up, as (R,H)
glu_rows = on_gpu(__name__, "glu")
# (grad, gate_up, weights, order, used, name) -> the gradient of gate_up, weight_r h_r, and grad_r . h_r by slot, with
# h = glu_rows(gate_up). The gradient of h is weight_r grad_r. The kernel overwrites `grad`.
glu_rows_backward = on_gpu(__name__, "glu_backward")


def gather_rows(tokens: Tensor, order: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """Return the token of each row."""
    if not has_kernels(tokens) or order.shape[0] == 0:
        return tokens.index_select(0, order // max(slots.shape[1], 1))
    return _gather(tokens, slots, used, order.shape[0])


def combine_rows(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    used: Tensor,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Return y_t = sum_s weight_ts rows[slot_ts], added in float32, slot after slot; an unused slot adds nothing.

    With `bias (E,d)`, which needs `offsets (E,)`, the bias of its expert is added to each row.
    """
    if has_kernels(slots):
        return _combine(rows, slots, weights, used, bias, offsets)
    dtype = rows.dtype
    if bias is not None:
        assert offsets is not None
        rows = add_bias_rows(rows.to(torch.float32, copy=True), bias, offsets)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    in_use = slots < used
    for slot in range(slots.shape[1]):
        if not in_use[:, slot].any():
            continue
        if in_use[:, slot].all():
            values = rows.index_select(0, slots[:, slot]).float()
        else:
            padded = slots[:, slot].where(in_use[:, slot], 0)
            values = rows.index_select(0, padded).float().masked_fill_(~in_use[:, slot, None], 0.0)
        if weights is None:
            total += values
        else:
            total.addcmul_(values, weights[:, slot, None])
    return total.to(dtype)


def combine_rows_reference(rows: Tensor, slots: Tensor, weights: Tensor, used: int) -> Tensor:
    """Return y_t = sum_s weight_ts * rows[slot_ts] over the slots that point below `used`, as a loop: the specification."""
    out = torch.zeros(slots.shape[0], rows.shape[1])
    for token, its_slots in enumerate(slots.tolist()):
        for position, slot in enumerate(its_slots):
            if slot < used:
                out[token] += weights[token, position] * rows[slot].float()
    return out.to(rows.dtype)


def add_bias_rows(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Add the bias (E,n) of its expert to each row (R,n), in place; return the rows. Unused rows are undefined."""
    if has_kernels(rows):
        return _add_bias(rows, bias.contiguous(), offsets)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        rows[start:end] += bias[expert]
        start = end
    return rows


def sum_rows(rows: Tensor, offsets: Tensor, weights: Tensor | None, order: Tensor) -> Tensor:
    """Return the sum (E,n) of the rows (R,n) of each expert in float32, times `weights (T,K)` of their slots if given."""
    if has_kernels(rows):
        return _sum_rows(rows, offsets, weights, order)
    scaled = rows.float() if weights is None else rows.float() * weights.flatten()[order].unsqueeze(1)
    ends = offsets.tolist()
    parts = [scaled[start:end].sum(0) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.stack(parts)


def add_bias_dots(grad: Tensor, bias: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, dots: Tensor) -> Tensor:
    """Add grad_r . bias of the row's expert to `dots (T,K)` at the slot of each row, in place; return `dots`."""
    if has_kernels(grad):
        _add_bias_dots(grad, bias.contiguous(), order, offsets, dots)
        return dots
    products = torch.empty(grad.shape[0], device=grad.device)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        products[start:end] = grad[start:end].float() @ bias[expert].float()
        start = end
    return dots.add_(_to_slots(products, slots, offsets[-1]))


def scale_and_dot(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, slots: Tensor, used: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight_r grad_r, weight_r rows_r, and for each slot (T,K) grad_r . rows_r of its row, 0 if it is unused.

    The kernel overwrites `grad`.
    """
    if has_kernels(rows):
        return _scale_and_dot(grad, rows, weights, order, used)
    scale = weights.flatten()[order].unsqueeze(1)
    dots = (grad.float() * rows.float()).sum(1)
    return (grad * scale).to(grad.dtype), (rows * scale).to(rows.dtype), _to_slots(dots, slots, used)


def _to_slots(values: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """Return one value per row as one value per slot (T,K), 0 in unused slots."""
    if values.shape[0] == 0:
        return values.new_zeros(slots.shape)
    in_use = slots < used
    return values[slots.where(in_use, 0)].where(in_use, 0.0)


def has_glu_kernel(name: str | None, rows: Tensor) -> bool:
    """Return whether `glu_rows` and `glu_rows_backward` can be called with this activation and these rows."""
    return name in GLUS and has_kernels(rows)
