"""Products of rows that are sorted by expert, one weight matrix an expert, and an expert layer's two products with them.

    T tokens, K slots a token, E experts, d width, H hidden; R rows, one a slot, sorted by expert
    offsets (E,) int32: expert e owns rows offsets[e-1] to offsets[e]; rows past the last offset are unused

On a GPU `grouped_mm` and `grouped_outer` use torch's grouped kernel where it applies and a Triton kernel where it does not:
neither waits for the offsets. Elsewhere they loop over experts, which on a CPU is faster than torch's own.

`gather_mm` and `mm_combine` are operators with backwards of their own, because only then is the whole layer one graph under
`torch.compile(fullgraph=True)` in training, in every dtype, and because autograd's backward of a gather adds with atomics,
in an order that changes from run to run. Neither keeps the gathered tokens nor the experts' outputs for the backward:

    gather_mm     saves the tokens and gathers them again
    mm_combine    dL/dweight_r = dL/dy_r . (W h_r) = (W^T dL/dy_r) . h_r needs only h; where a kernel applies the activation,
                  the backward computes h again too
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.dispatch import (
    Dispatch,
    add_bias_dots,
    add_bias_rows,
    combine_rows,
    gather_rows,
    glu_rows,
    glu_rows_backward,
    has_glu_kernel,
    scale_and_dot,
    sum_rows,
)
from holdfast.kernels.operators import EVERYWHERE, HAS_TRITON, has_bf16_cores, input_gradients, like_wanted, on_gpu, operator

ALIGNMENT = 16  # bytes, of every row and matrix that torch's grouped kernel takes


def gather_mm(tokens: Tensor, weight: Tensor, plan: Dispatch, bias: Tensor | None = None) -> Tensor:
    """Return each row's token (d) times its expert's weight (E,H,d), plus its expert's bias (E,H), as (R,H)."""
    out: Tensor = _GatherMM.apply(tokens, weight, *plan, bias)  # type: ignore[no-untyped-call]
    return out


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
    if not has_glu_kernel(glu, hidden):
        hidden, glu = activate(hidden, plan), None
    out: Tensor = _MMCombine.apply(hidden, weight, slot_weights, *plan, bias, glu or "")  # type: ignore[no-untyped-call]
    return out


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


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {  # those of `dispatch.GLUS`
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gather_mm_reference(
    tokens: Tensor, weight: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `gather_mm` in operations that autograd can differentiate; this waits for the device."""
    ends = offsets.tolist()
    used = tokens.index_select(0, order[: ends[-1]] // max(slots.shape[1], 1))
    return _pad_rows(_grouped_mm_reference(used, weight, ends, bias), order.shape[0])


def mm_combine_reference(
    hidden: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    glu: str,
) -> Tensor:
    """Compute `mm_combine` in operations that autograd can differentiate; this waits for the device."""
    ends = offsets.tolist()
    used = hidden[: ends[-1]]
    if glu:
        gate, up = used.chunk(2, dim=-1)
        used = ACTIVATIONS[glu](gate) * up
    outputs = _pad_rows(
        _grouped_mm_reference(used, weight, ends, bias), 1 + ends[-1]
    )  # the last row, of zeros, is for unused slots
    values = outputs[slots.clamp_max(ends[-1])].float()  # (T,K,d)
    return (values * slot_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _grouped_mm_reference(used: Tensor, weight: Tensor, ends: list[int], bias: Tensor | None) -> Tensor:
    products, start = [], 0
    for expert, end in enumerate(ends):
        product = used[start:end] @ weight[expert].t()
        products.append(product if bias is None else product + bias[expert].to(product.dtype))
        start = end
    return torch.cat(products)


def _pad_rows(values: Tensor, count: int) -> Tensor:
    return F.pad(values, (0, 0, 0, count - values.shape[0]))


def _gather_mm_anywhere(
    tokens: Tensor, weight: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    rows = grouped_mm(gather_rows(tokens.contiguous(), order, slots, offsets[-1]), weight, offsets, transpose=True)
    return rows if bias is None else add_bias_rows(rows, bias, offsets)


def _gather_mm_backward_anywhere(
    grad: Tensor,
    tokens: Tensor,
    weight: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    grad, used = grad.contiguous(), offsets[-1]
    of_tokens = of_weight = of_bias = grad.new_empty(0)
    if wants[0]:
        of_tokens = combine_rows(grouped_mm(grad, weight, offsets, transpose=False), slots, None, used)
    if wants[1]:
        of_weight = grouped_outer(grad, gather_rows(tokens.contiguous(), order, slots, used), offsets)
    if wants[2] and bias is not None:
        of_bias = sum_rows(grad, offsets, None, order).to(bias.dtype)
    return of_tokens, of_weight, of_bias


def _mm_combine_anywhere(
    hidden: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    glu: str,
) -> Tensor:
    hidden = glu_rows(hidden.contiguous(), offsets[-1], glu) if glu else hidden.contiguous()
    outputs = grouped_mm(hidden, weight, offsets, transpose=True)
    bias = None if bias is None else bias.contiguous()
    return combine_rows(outputs, slots, slot_weights.contiguous(), offsets[-1], bias, offsets)


def _mm_combine_backward_anywhere(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    glu: str,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    used = offsets[-1]
    grad_rows = gather_rows(grad.contiguous(), order, slots, used)
    unscaled = grouped_mm(grad_rows, weight, offsets, transpose=False)
    slot_weights = slot_weights.contiguous()
    rows = hidden.contiguous()
    if glu:
        grad_hidden, scaled, grad_slots = glu_rows_backward(unscaled, rows, slot_weights, order, used, glu)
    else:
        grad_hidden, scaled, grad_slots = scale_and_dot(unscaled, rows, slot_weights, order, slots, used)
    of_weight = grouped_outer(grad_rows, scaled, offsets) if wants[1] else grad.new_empty(0)
    of_bias = grad.new_empty(0)
    if bias is not None:
        grad_slots = add_bias_dots(grad_rows, bias, order, slots, offsets, grad_slots)
        if wants[3]:
            of_bias = sum_rows(grad_rows, offsets, slot_weights, order).to(bias.dtype)
    return grad_hidden, of_weight, grad_slots, of_bias


def _mm_combine_backward_fake(
    grad: Tensor, hidden: Tensor, weight: Tensor, slot_weights: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    bias, _, wants = rest[-3:]
    return like_wanted(grad, (hidden, weight, slot_weights, bias), (True, wants[1], True, wants[3]))


_PLAN = "Tensor order, Tensor slots, Tensor offsets, Tensor? bias"
_gather_mm = operator(
    f"gather_mm(Tensor tokens, Tensor weight, {_PLAN}) -> Tensor",
    _gather_mm_anywhere,
    lambda tokens, weight, order, *_: tokens.new_empty(order.shape[0], weight.shape[1]),
    devices=EVERYWHERE,
)
_gather_mm_backward = operator(
    f"gather_mm_backward(Tensor grad, Tensor tokens, Tensor weight, {_PLAN}, bool[] wants) -> (Tensor, Tensor, Tensor)",
    _gather_mm_backward_anywhere,
    lambda grad, tokens, weight, *rest: like_wanted(grad, (tokens, weight, rest[-2]), rest[-1]),
    devices=EVERYWHERE,
)
_mm_combine = operator(
    f"mm_combine(Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu) -> Tensor",
    _mm_combine_anywhere,
    lambda hidden, weight, slot_weights, order, slots, *_: hidden.new_empty(slots.shape[0], weight.shape[1]),
    devices=EVERYWHERE,
)
_mm_combine_backward = operator(
    f"mm_combine_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu, bool[] wants) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _mm_combine_backward_anywhere,
    _mm_combine_backward_fake,
    devices=EVERYWHERE,
)


_mm_on_gpu, _outer_on_gpu = on_gpu(__name__, "mm"), on_gpu(__name__, "outer")


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, *, transpose: bool) -> Tensor:
    """Return each expert's rows (R,m) times its weight (E,n,m)^T, or times its weight (E,m,n) if not `transpose`.

    Unused rows of the result are 0 on a CPU, and undefined on a GPU, where the host does not know how many there are.
    """
    matrices = weight.transpose(-2, -1) if transpose else weight
    if rows.shape[0] == 0:
        return rows.new_empty(0, matrices.shape[-1])
    if _torch_has_kernel(rows, weight) and _aligned(matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)
    if HAS_TRITON and rows.is_cuda:
        return _mm_on_gpu(rows, matrices, offsets)
    out = rows.new_empty(rows.shape[0], matrices.shape[-1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrices[expert], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum over each expert's rows of left (R,n) times right (R,m), as (E,n,m); 0 for an expert without rows."""
    experts = offsets.shape[0]
    if left.shape[0] == 0:
        return left.new_zeros(experts, left.shape[1], right.shape[1])
    if _torch_has_kernel(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
    if HAS_TRITON and left.is_cuda:
        return _outer_on_gpu(left, right, offsets)
    out = left.new_empty(experts, left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        else:
            out[expert].zero_()
        start = end
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
