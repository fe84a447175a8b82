"""The experts' products: tokens to the rows of their experts, through two grouped products, and back.

    T tokens, K slots a token, E experts, d width, H hidden; R rows, one a slot, sorted by expert

The two products are operators with backwards of their own, because only then is the whole layer one graph under
`torch.compile(fullgraph=True)` in training, in every dtype, and because autograd's backward of a gather adds with atomics,
in an order that changes from run to run. Neither keeps the gathered tokens nor the experts' outputs for the backward:

    gather_mm     saves the tokens and gathers them again
    mm_combine    needs  dL/dweight_r = dL/dy_r . (W h_r) = (W^T dL/dy_r) . h_r,  which asks for h only; where it is told
                  the activation that makes h of gate and up, it makes h again too
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels import double_backward, grouped, rows
from holdfast.kernels.dispatch import Dispatch
from holdfast.kernels.operators import EVERYWHERE, operator


def gather_mm(tokens: Tensor, weight: Tensor, plan: Dispatch) -> Tensor:
    """Each row's token (d) times its expert's weight (E,H,d): (R,H)."""
    out: Tensor = _GatherMM.apply(tokens, weight, *plan)  # type: ignore[no-untyped-call]
    return out


def mm_combine(hidden: Tensor, weight: Tensor, slot_weights: Tensor, plan: Dispatch, *, glu: str | None = None) -> Tensor:
    """Each row (R,H) times its expert's weight (E,d,H), then the weighted sum over each token's slots: (T,d).

    With `glu`, an activation's name, `hidden (R,2H)` is gate and up side by side (see `rows.fuses`).
    """
    out: Tensor = _MMCombine.apply(hidden, weight, slot_weights, *plan, glu or "")  # type: ignore[no-untyped-call]
    return out


class _GatherMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)
        return _gather_mm(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        want_tokens, want_weight = ctx.needs_input_grad[:2]
        if double_backward.is_wanted():
            return tuple(double_backward.gradients(_gather_mm_plain, ctx.saved_tensors, ctx.needs_input_grad, grad))
        grad_tokens, grad_weight = _gather_mm_backward(grad, *ctx.saved_tensors, want_tokens, want_weight)
        return grad_tokens if want_tokens else None, grad_weight if want_weight else None, None, None, None


class _MMCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, slot_weights, order, slots, offsets, glu):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, slot_weights, order, slots, offsets)
        ctx.glu = glu
        return _mm_combine(hidden, weight, slot_weights, order, slots, offsets, glu)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wants = ctx.needs_input_grad[:3]
        if double_backward.is_wanted():
            plain = partial(_mm_combine_plain, glu=ctx.glu)
            return *double_backward.gradients(plain, ctx.saved_tensors, ctx.needs_input_grad[:6], grad), None
        grads = _mm_combine_backward(grad, *ctx.saved_tensors, ctx.glu, wants[1])
        return (*(found if want else None for found, want in zip(grads, wants, strict=True)), *(None,) * 4)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {  # of `rows.GLUS`
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _gather_mm_plain(tokens: Tensor, weight: Tensor, order: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """`gather_mm` for autograd to differentiate; it waits for the device."""
    ends = offsets.tolist()
    used = tokens.index_select(0, order[: ends[-1]] // max(slots.shape[1], 1))
    return _pad_rows(_mm_plain(used, weight, ends), order.shape[0])


def _mm_combine_plain(
    hidden: Tensor, weight: Tensor, slot_weights: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, glu: str
) -> Tensor:
    """`mm_combine` for autograd to differentiate; it waits for the device."""
    ends = offsets.tolist()
    used = hidden[: ends[-1]]
    if glu:
        gate, up = used.chunk(2, dim=-1)
        used = ACTIVATIONS[glu](gate) * up
    outputs = _pad_rows(_mm_plain(used, weight, ends), 1 + ends[-1])  # the last is that of unused slots
    values = outputs[slots.clamp_max(ends[-1])].float()  # (T,K,d)
    return (values * slot_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _mm_plain(used: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    products = [used[start:end] @ weight[expert].t() for expert, (start, end) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat(products)


def _pad_rows(values: Tensor, count: int) -> Tensor:
    return F.pad(values, (0, 0, 0, count - values.shape[0]))


def _gather_mm_anywhere(tokens: Tensor, weight: Tensor, order: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    return grouped.mm(rows.gather(tokens.contiguous(), order, slots, offsets[-1]), weight, offsets, transpose=True)


def _gather_mm_backward_anywhere(
    grad: Tensor,
    tokens: Tensor,
    weight: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    want_tokens: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad, used = grad.contiguous(), offsets[-1]
    grad_tokens, grad_weight = grad.new_empty(0), grad.new_empty(0)
    if want_tokens:
        grad_tokens = rows.combine(grouped.mm(grad, weight, offsets, transpose=False), slots, None, used)
    if want_weight:
        grad_weight = grouped.outer(grad, rows.gather(tokens.contiguous(), order, slots, used), offsets)
    return grad_tokens, grad_weight


def _gather_mm_backward_fake(
    grad: Tensor, tokens: Tensor, weight: Tensor, *plan_and_wants: Tensor | bool
) -> tuple[Tensor, Tensor]:
    want_tokens, want_weight = plan_and_wants[-2:]
    return tokens.new_empty(tokens.shape if want_tokens else (0,)), weight.new_empty(weight.shape if want_weight else (0,))


def _mm_combine_anywhere(
    hidden: Tensor, weight: Tensor, slot_weights: Tensor, order: Tensor, slots: Tensor, offsets: Tensor, glu: str
) -> Tensor:
    hidden = rows.glu(hidden.contiguous(), offsets[-1], glu) if glu else hidden.contiguous()
    outputs = grouped.mm(hidden, weight, offsets, transpose=True)
    return rows.combine(outputs, slots, slot_weights.contiguous(), offsets[-1])


def _mm_combine_backward_anywhere(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    order: Tensor,
    slots: Tensor,
    offsets: Tensor,
    glu: str,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    used = offsets[-1]
    grad_rows = rows.gather(grad.contiguous(), order, slots, used)
    unscaled = grouped.mm(grad_rows, weight, offsets, transpose=False)
    plan = (slot_weights.contiguous(), order, slots, used)
    if glu:
        grad_hidden, scaled, grad_slots = rows.glu_backward(unscaled, hidden.contiguous(), *plan, glu)
    else:
        grad_hidden, scaled, grad_slots = rows.scale_and_dot(unscaled, hidden.contiguous(), *plan)
    grad_weight = grouped.outer(grad_rows, scaled, offsets) if want_weight else grad.new_empty(0)
    return grad_hidden, grad_weight, grad_slots


def _mm_combine_backward_fake(
    grad: Tensor, hidden: Tensor, weight: Tensor, slot_weights: Tensor, *plan_and_rest: Tensor | str | bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = weight.new_empty(weight.shape if plan_and_rest[-1] else (0,))
    return hidden.new_empty(hidden.shape), grad_weight, slot_weights.new_empty(slot_weights.shape)


_PLAN = "Tensor order, Tensor slots, Tensor offsets"
_gather_mm = operator(
    f"gather_mm(Tensor tokens, Tensor weight, {_PLAN}) -> Tensor",
    _gather_mm_anywhere,
    lambda tokens, weight, order, *_: tokens.new_empty(order.shape[0], weight.shape[1]),
    devices=EVERYWHERE,
)
_gather_mm_backward = operator(
    f"gather_mm_backward(Tensor grad, Tensor tokens, Tensor weight, {_PLAN}, bool want_tokens, bool want_weight)"
    " -> (Tensor, Tensor)",
    _gather_mm_backward_anywhere,
    _gather_mm_backward_fake,
    devices=EVERYWHERE,
)
_mm_combine = operator(
    f"mm_combine(Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu) -> Tensor",
    _mm_combine_anywhere,
    lambda hidden, weight, slot_weights, order, slots, *_: hidden.new_empty(slots.shape[0], weight.shape[1]),
    devices=EVERYWHERE,
)
_mm_combine_backward = operator(
    f"mm_combine_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor slot_weights, {_PLAN}, str glu, "
    "bool want_weight) -> (Tensor, Tensor, Tensor)",
    _mm_combine_backward_anywhere,
    _mm_combine_backward_fake,
    devices=EVERYWHERE,
)
