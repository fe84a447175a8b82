"""Rows in expert order: sort slots by expert, and multiply the rows of each expert by its weights.

    T tokens, K slots a token, E experts, d width, H hidden; R rows, sorted by expert: one a slot, or fewer if fewer are used
    tokens (T,d); rows (R,n); order (R,), the slot of each row; slots (T,K), the row of each slot
    offsets (E,) int32: expert e owns rows offsets[e-1] to offsets[e]

An expert index of E marks an unused slot. Unused slots come last: their rows are numbered `used`, the last offset, or more,
hold undefined values and are never read.

On a GPU the host does not know how many slots are in use, and memory is allocated for R = T K rows. A caller that knows a
smaller number, `most_rows`, gets R = `most_rows`. Slots in use beyond that number are dropped, never written elsewhere.

On a GPU `grouped_mm` and `grouped_outer` use torch's grouped kernel where it applies and a Triton kernel where it does not:
neither waits for the offsets. Elsewhere they loop over experts, which on a CPU is faster than torch's own.

`gather_mm` and `mm_combine` are operators with backwards of their own, because only then is the whole layer one graph under
`torch.compile(fullgraph=True)` in training, in every dtype, and because autograd's backward of a gather adds with atomics,
in an order that changes from run to run. Neither keeps the gathered tokens nor the experts' outputs for the backward:

    gather_mm     saves the tokens and gathers them again
    mm_combine    dL/dweight_r = dL/dy_r . (W h_r) = (W^T dL/dy_r) . h_r needs only h; where a kernel applies the activation,
                  the backward computes h again too
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operators import (
    HAS_TRITON,
    has_bf16_cores,
    has_kernels,
    input_gradients,
    like_wanted,
    on_gpu,
    operator,
)

MOST_EXPERTS = 512  # that the kernels sort by: with more, the counts of a program become too large
ALIGNMENT = 16  # bytes, of every row and matrix that torch's grouped kernel takes
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {  # of gated experts, `activation(gate) * up`, that have a kernel
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),  # on a GPU they are one function
    "relu": F.relu,
}


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
    keys = chosen.reshape(-1)
    if experts < torch.iinfo(torch.int16).max:
        keys = keys.to(torch.int16)
    by_expert, order = torch.sort(keys, stable=True)
    boundaries = torch.arange(experts, device=chosen.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, boundaries, right=True).to(torch.int32)
    positions = torch.arange(order.shape[0], device=chosen.device)
    slots = torch.empty_like(order).scatter_(0, order, positions).view(chosen.shape)
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


def gather_mm(tokens: Tensor, weight: Tensor, plan: Dispatch, bias: Tensor | None = None) -> Tensor:
    """Return each row's token (d) times its expert's weight (E,H,d), plus its expert's bias (E,H), as (R,H)."""
    return _GatherMM.apply(tokens, weight, *plan, bias)


def mm_combine(
    hidden: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    plan: Dispatch,
    *,
    activate: Callable[[Tensor, Dispatch], Tensor],
    glu: str | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Activate `hidden`, multiply each row (R,H) by its expert's weight (E,d,H), and add each token's weighted slots: (T,d).

    With `bias (E,d)`, the bias of its expert is added to each product.

    `glu` names the activation if `activate` is gated, with gate and up side by side in `hidden (R,2H)`, and has a name.
    Then a kernel may do its work, and `activate` is not called.
    """
    if glu not in ACTIVATIONS or not has_kernels(hidden):
        hidden, glu = activate(hidden, plan), None
    return _MMCombine.apply(hidden, weight, slot_weights, *plan, bias, glu or "")


class _GatherMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)
        return _gather_mm(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return input_gradients(ctx, grad, _gather_mm_backward, gather_mm_reference, places=(0, 1, 5))


class _MMCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        *tensors, ctx.glu = inputs
        ctx.save_for_backward(*tensors)
        return _mm_combine(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        def backward(grad, *inputs):  # type: ignore[no-untyped-def]
            return _mm_combine_backward(grad, *inputs[:-1], ctx.glu, inputs[-1])

        reference = partial(mm_combine_reference, glu=ctx.glu)
        return input_gradients(ctx, grad, backward, reference, places=(0, 1, 2, 6))


def gather_mm_reference(
    tokens: Tensor, weight: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `gather_mm` in operations that autograd can differentiate; this waits for the device."""
    used = tokens.index_select(0, order[: int(offsets[-1])] // max(slots.shape[1], 1))
    return _grouped_mm_reference(used, weight, offsets, bias, order.shape[0])


def mm_combine_reference(
    hidden: Tensor, weight: Tensor, slot_weights: Tensor, *plan_and_bias: Tensor | None, glu: str
) -> Tensor:
    """Compute `mm_combine` in operations that autograd can differentiate; this waits for the device."""
    _, slots, offsets, bias = plan_and_bias
    assert slots is not None and offsets is not None
    count = int(offsets[-1])
    used = hidden[:count]
    if glu:
        gate, up = used.chunk(2, dim=-1)
        used = ACTIVATIONS[glu](gate) * up
    outputs = _grouped_mm_reference(used, weight, offsets, bias, 1 + count)  # the last row, of zeros, is for unused slots
    values = outputs[slots.clamp_max(count)].float()  # (T,K,d)
    return (values * slot_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _grouped_mm_reference(used: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Return the products of the used rows, filled up with zeros to `count` rows."""
    products = [used[rows] @ weight[expert].t() for expert, rows in enumerate(_rows_of_experts(offsets))]
    if bias is not None:
        products = [product + own.to(product.dtype) for product, own in zip(products, bias, strict=True)]
    return F.pad(torch.cat(products), (0, 0, 0, count - used.shape[0]))


def _rows_of_experts(offsets: Tensor) -> list[slice]:
    """Return the rows of each expert; on a GPU this waits for the device."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


# The operators. After their first tensors, `rest` are the fields of a `Dispatch`, the bias, and what their schemas say.
def _gather_mm_anywhere(tokens: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    order, slots, offsets, bias = rest
    rows = gather_rows(tokens.contiguous(), order, slots, offsets[-1])
    return grouped_mm(rows, weight, offsets, transpose=True, bias=bias)


def _gather_mm_backward_anywhere(grad: Tensor, tokens: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    order, slots, offsets, bias, wants = rest
    grad, used = grad.contiguous(), offsets[-1]
    of_tokens = of_weight = of_bias = grad.new_empty(0)
    if wants[0]:
        of_tokens = combine_rows(grouped_mm(grad, weight, offsets, transpose=False), slots, None, used)
    if wants[1]:
        of_weight = grouped_outer(grad, gather_rows(tokens.contiguous(), order, slots, used), offsets)
    if wants[2] and bias is not None:
        of_bias = sum_rows(grad, offsets, None, order).to(bias.dtype)
    return of_tokens, of_weight, of_bias


def _mm_combine_anywhere(hidden: Tensor, weight: Tensor, slot_weights: Tensor, *rest: Any) -> Tensor:
    _, slots, offsets, bias, glu = rest
    hidden = _glu_rows(hidden.contiguous(), offsets[-1], glu) if glu else hidden.contiguous()
    slot_weights = slot_weights.contiguous()
    if bias is not None and has_kernels(slots):  # the kernel of the sum adds biases too
        outputs = grouped_mm(hidden, weight, offsets, transpose=True)
        return _combine(outputs, slots, slot_weights, offsets[-1], bias.contiguous(), offsets)
    return combine_rows(grouped_mm(hidden, weight, offsets, transpose=True, bias=bias), slots, slot_weights, offsets[-1])


def _mm_combine_backward_anywhere(
    grad: Tensor, hidden: Tensor, weight: Tensor, slot_weights: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    order, slots, offsets, bias, glu, wants = rest
    used, slot_weights = offsets[-1], slot_weights.contiguous()
    grad_rows = gather_rows(grad.contiguous(), order, slots, used)
    unscaled = grouped_mm(grad_rows, weight, offsets, transpose=False)
    grad_hidden, scaled, grad_slots = rows_backward(unscaled, hidden.contiguous(), slot_weights, order, slots, used, glu)
    of_weight = grouped_outer(grad_rows, scaled, offsets) if wants[1] else grad.new_empty(0)
    of_bias = grad.new_empty(0)
    if bias is not None:
        grad_slots = add_bias_dots(grad_rows, bias, order, slots, offsets, grad_slots)
        if wants[3]:
            of_bias = sum_rows(grad_rows, offsets, slot_weights, order).to(bias.dtype)
    return grad_hidden, of_weight, grad_slots, of_bias


_PLAN = "Tensor order, Tensor slots, Tensor offsets, Tensor? bias"
_gather_mm = operator(
    f"gather_mm(Tensor tokens, Tensor weight, {_PLAN}) -> Tensor",
    _gather_mm_anywhere,
    lambda tokens, weight, order, *_: tokens.new_empty(order.shape[0], weight.shape[1]),
)
_gather_mm_backward = operator(
    f"gather_mm_backward(Tensor grad, Tensor tokens, Tensor weight, {_PLAN}, bool[] wants) -> (Tensor, Tensor, Tensor)",
    _gather_mm_backward_anywhere,
    lambda grad, tokens, weight, *rest: like_wanted(grad, (tokens, weight, rest[-2]), rest[-1]),
)
_mm_combine = operator(
    f"mm_combine(Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu) -> Tensor",
    _mm_combine_anywhere,
    lambda hidden, weight, slot_weights, order, slots, *_: hidden.new_empty(slots.shape[0], weight.shape[1]),
)
_mm_combine_backward = operator(
    f"mm_combine_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu, bool[] wants) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _mm_combine_backward_anywhere,
    lambda grad, hidden, weight, slot_weights, order, slots, offsets, bias, glu, wants: like_wanted(
        grad, (hidden, weight, slot_weights, bias), (True, wants[1], True, wants[3])
    ),
)


# What the operators are made of: Triton on a GPU, PyTorch elsewhere. The last has no PyTorch version: see `mm_combine`.
_gather, _combine = on_gpu(__name__, "gather"), on_gpu(__name__, "combine")
_add_bias, _add_bias_dots = on_gpu(__name__, "add_bias"), on_gpu(__name__, "add_bias_dots")
_sum_rows, _rows_backward = on_gpu(__name__, "sum_rows"), on_gpu(__name__, "rows_backward")
_mm_on_gpu, _outer_on_gpu = on_gpu(__name__, "mm"), on_gpu(__name__, "outer")
_glu_rows = on_gpu(__name__, "glu")


def gather_rows(tokens: Tensor, order: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """Return the token of each row."""
    if not has_kernels(tokens) or order.shape[0] == 0:
        return tokens.index_select(0, order // max(slots.shape[1], 1))
    return _gather(tokens, slots, used, order.shape[0])


def combine_rows(rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor) -> Tensor:
    """Return y_t = sum_s weight_ts rows[slot_ts], added in float32, slot after slot; an unused slot adds nothing."""
    if has_kernels(slots):
        return _combine(rows, slots, weights, used, None, None)
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
    return total.to(rows.dtype)


def add_bias_rows(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Add the bias (E,n) of its expert to each row (R,n), in place; return the rows. Unused rows are undefined."""
    if has_kernels(rows):
        return _add_bias(rows, bias.contiguous(), offsets)
    for expert, own in enumerate(_rows_of_experts(offsets)):
        rows[own] += bias[expert]
    return rows


def sum_rows(rows: Tensor, offsets: Tensor, weights: Tensor | None, order: Tensor) -> Tensor:
    """Return the sum (E,n) of the rows (R,n) of each expert in float32, times `weights (T,K)` of their slots if given."""
    if has_kernels(rows):
        return _sum_rows(rows, offsets, weights, order)
    scaled = rows.float() if weights is None else rows.float() * weights.flatten()[order].unsqueeze(1)
    return torch.stack([scaled[own].sum(0) for own in _rows_of_experts(offsets)])


def add_bias_dots(grad: Tensor, bias: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, dots: Tensor) -> Tensor:
    """Add grad_r . bias of the row's expert to `dots (T,K)` at the slot of each row, in place; return `dots`."""
    if has_kernels(grad):
        return _add_bias_dots(grad, bias.contiguous(), order, offsets, dots)
    products = torch.empty(grad.shape[0], device=grad.device)
    for expert, own in enumerate(_rows_of_experts(offsets)):
        products[own] = grad[own].float() @ bias[expert].float()
    return dots.add_(_to_slots(products, slots, offsets[-1]))


def rows_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, slots: Tensor, used: Tensor, glu: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `rows`, weight_r h_r, and for each slot (T,K) grad_r . h_r of its row, 0 if it is unused.

    h_r is the row itself or, with the name `glu` of an activation, its gated activation (only on a GPU). The gradient of h_r
    is weight_r grad_r. The kernel overwrites `grad`.
    """
    if has_kernels(rows):
        return _rows_backward(grad, rows, weights, order, used, glu)
    scale = weights.flatten()[order].unsqueeze(1)
    dots = (grad.float() * rows.float()).sum(1)
    return (grad * scale).to(grad.dtype), (rows * scale).to(rows.dtype), _to_slots(dots, slots, used)


def _to_slots(values: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """Return one value per row as one value per slot (T,K), 0 in unused slots."""
    if values.shape[0] == 0:
        return values.new_zeros(slots.shape)
    in_use = slots < used
    return values[slots.where(in_use, 0)].where(in_use, 0.0)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, *, transpose: bool, bias: Tensor | None = None) -> Tensor:
    """Return each expert's rows (R,m) times its weight (E,n,m)^T, or times its weight (E,m,n) if not `transpose`.

    With `bias (E,n)`, that of its expert is added to each row, on a CPU before the product is rounded, as `nn.Linear` does.
    Unused rows of the result are 0 on a CPU, and undefined on a GPU, where the host does not know how many there are.
    """
    matrices = weight.transpose(-2, -1) if transpose else weight
    if rows.shape[0] == 0:
        return rows.new_empty(0, matrices.shape[-1])
    if _torch_has_kernel(rows, weight) and _aligned(matrices):
        out = F.grouped_mm(rows, matrices, offs=offsets)
        return out if bias is None else add_bias_rows(out, bias, offsets)
    if HAS_TRITON and rows.is_cuda:
        out = _mm_on_gpu(rows, matrices, offsets)
        return out if bias is None else add_bias_rows(out, bias, offsets)
    out, owned = rows.new_empty(rows.shape[0], matrices.shape[-1]), _rows_of_experts(offsets)
    bias = None if bias is None else bias.to(rows.dtype)
    for expert, own in enumerate(owned):
        if bias is None:
            torch.mm(rows[own], matrices[expert], out=out[own])
        else:
            torch.addmm(bias[expert], rows[own], matrices[expert], out=out[own])
    out[owned[-1].stop :].zero_()
    return out


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum over each expert's rows of left (R,n) times right (R,m), as (E,n,m); 0 for an expert without rows."""
    experts = offsets.shape[0]
    if left.shape[0] == 0:
        return left.new_zeros(experts, left.shape[1], right.shape[1])
    if _torch_has_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=offsets)
    if HAS_TRITON and left.is_cuda:
        return _outer_on_gpu(left, right, offsets)
    out = left.new_empty(experts, left.shape[1], right.shape[1])
    for expert, own in enumerate(_rows_of_experts(offsets)):
        torch.mm(left[own].t(), right[own], out=out[expert])
    return out


def _torch_has_kernel(*operands: Tensor) -> bool:
    """Return whether torch's grouped kernel runs here: elsewhere it is a loop that waits for the offsets, or an error."""
    first = operands[0]
    if not first.is_cuda or first.dtype != torch.bfloat16 or not has_bf16_cores(first):
        return False
    return all([_aligned(each) and each.data_ptr() % ALIGNMENT == 0 for each in operands])  # noqa: C419  # a list is faster


def _aligned(operand: Tensor) -> bool:
    """Return whether rows are a multiple of ALIGNMENT long. Results must be too, or the kernel leaves gaps between rows."""
    return operand.shape[-1] * operand.element_size() % ALIGNMENT == 0
