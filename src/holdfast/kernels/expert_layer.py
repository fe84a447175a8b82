"""A layer of experts as one function of autograd: `dispatch`, `gather_mm`, an activation and `mm_combine`.

The kernels are those of the four functions, and so are the numbers. But each function costs Python, forward and backward,
and so does each copy of a weight in the dtype of the products. In a small layer this takes longer than the kernels.

Autograd keeps what a function saves until its backward returns. For large layers that is too long: the second product's part
of the backward would still hold memory when the first one's part needs it. So what is not an input is kept here, in
`ctx.kept`, and dropped where it is used last, unless the graph is kept for another backward.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.backward import (
    differentiable_gradients,
    graph_is_kept,
    has_hooks_on_saved_tensors,
    is_differentiated,
)
from holdfast.kernels.dispatch import (
    MOST_COLUMNS,
    Dispatch,
    add_bias_dots,
    add_bias_rows,
    combine_rows,
    dispatch,
    gather_rows,
    glu_rows,
    glu_rows_backward,
    has_glu_kernel,
    scale_and_dot,
    sum_rows,
)
from holdfast.kernels.grouped import gather_mm_reference, grouped_mm, grouped_outer, mm_combine_reference
from holdfast.kernels.launching import has_kernels, is_exporting, is_intercepted

Slope = Callable[[Tensor, Tensor, Tensor], Tensor]  # (gradient, input, output) -> gradient of the input
ops: Any = torch.ops.aten
SLOPES: Mapping[str, Slope] = {  # of activations that are not gated; that of relu is part of a kernel
    "silu": lambda grad, given, _: ops.silu_backward(grad, given),
    "gelu": lambda grad, given, _: ops.gelu_backward(grad, given),
    "gelu_tanh": lambda grad, given, _: ops.gelu_backward(grad, given, approximate="tanh"),
    "tanh": lambda grad, _, found: ops.tanh_backward(grad, found),
    "sigmoid": lambda grad, _, found: ops.sigmoid_backward(grad, found),
}
RELU = "relu"


class Network(NamedTuple):
    """What an expert computes: down(activation(up x)), or down(activation(gate x) * up x) if it is gated."""

    up: Tensor  # (E,H,d), or (E,2H,d) with gate and up side by side
    down: Tensor  # (E,d,H)
    up_bias: Tensor | None  # (E,H) or (E,2H)
    down_bias: Tensor | None  # (E,d)
    activation: str | None  # None: a function without a name
    activate: Callable[[Tensor], Tensor]  # what `activation` names
    gated: bool


def can_run_as_one(tokens: Tensor, network: Network) -> bool:
    """Return whether `expert_layer` runs here; else the four functions do.

    A compiler and an exporter need no shortcut. Modes of PyTorch must see the operators, and hooks what is saved.
    """
    if torch.compiler.is_compiling() or is_exporting() or is_intercepted() or has_hooks_on_saved_tensors():
        return False
    if type(network.up) not in PLAIN or type(network.down) not in PLAIN or type(tokens) is not Tensor:
        return False
    name = network.activation
    return has_glu_kernel(name, tokens) if network.gated else name == RELU or name in SLOPES


PLAIN = (Tensor, torch.nn.Parameter)


def expert_layer(
    tokens: Tensor, chosen: Tensor, weights: Tensor, network: Network, dtype: torch.dtype, most_rows: int | None = None
) -> Tensor:
    """Return y_t = sum_s weight_ts FFN_{chosen_ts}(x_t) as (T,d), with products in this dtype; index E marks an unused slot.

    most_rows   at most this many slots have an expert. None: all slots
    """
    out: Tensor = _ExpertLayer.apply(tokens, chosen, weights, *network, dtype, most_rows, torch.is_grad_enabled())
    return out


class _ExpertLayer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        activate: Callable[[Tensor], Tensor],
        gated: bool,
        dtype: torch.dtype,
        most_rows: int | None,
        may_have_backward: bool,
    ) -> Tensor:
        rows, of_up, of_down = _as(dtype, tokens).contiguous(), _as(dtype, up), _as(dtype, down)
        slot_weights = _as(torch.float32, weights).contiguous()
        plan = dispatch(chosen, up.shape[0], most_rows)
        order, slots, offsets = plan
        used = offsets[-1]
        given = grouped_mm(gather_rows(rows, order, slots, used), of_up, offsets, transpose=True)
        is_relu = activation == RELU and not gated
        if up_bias is not None:
            add_bias_rows(given, up_bias, offsets, relu=is_relu)
        elif is_relu:
            given.relu_()
        active = given if is_relu else glu_rows(given, used, activation) if gated else activate(given)
        product = grouped_mm(active, of_down, offsets, transpose=True)
        bias = None if down_bias is None else down_bias.contiguous()
        if may_have_backward:
            ctx.save_for_backward(tokens, chosen, weights, up, down, up_bias, down_bias)
            # A gated activation is computed again in the backward.
            ctx.kept = [rows, slot_weights, of_up, of_down, plan, used, given, None if gated else active]
            ctx.activation, ctx.activate, ctx.gated, ctx.dtype = activation, activate, gated, dtype
        return combine_rows(product, slots, slot_weights, used, bias, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, _, weights, up, down, up_bias, down_bias = ctx.saved_tensors
        want_tokens, _, want_weights, want_up, want_down, want_up_bias, want_down_bias = ctx.needs_input_grad[:7]
        if is_differentiated() or is_intercepted():
            return *_differentiable(ctx, grad), *(None,) * 6
        rows, slot_weights, to_up, to_down, (order, slots, offsets), used, given, active = ctx.kept
        if not graph_is_kept():
            ctx.kept = None
        activation, is_relu = ctx.activation, ctx.activation == RELU and not ctx.gated
        of_tokens = of_up = of_down = of_up_bias = of_down_bias = None

        # Kernels write the gradients of the weights in two parts, that of the bias first.
        dots = torch.empty_like(slot_weights) if has_kernels(grad) and order.shape[0] > 0 else None
        has_bias_dots = down_bias is not None and dots is not None and grad.shape[1] <= MOST_COLUMNS
        bias = down_bias.contiguous() if has_bias_dots else None
        grad_rows = gather_rows(grad.contiguous(), order, slots, used, dots, bias, offsets)
        unscaled = grouped_mm(grad_rows, to_down, offsets, transpose=False)
        if ctx.gated:
            of_given, scaled, of_slots = glu_rows_backward(
                unscaled, given, slot_weights, order, slots, used, activation, dots, has_bias_dots
            )
        else:
            of_given, scaled, of_slots = scale_and_dot(
                unscaled, active, slot_weights, order, slots, used, relu=is_relu, dots=dots, added=has_bias_dots
            )
            if not is_relu:
                of_given = SLOPES[activation](of_given, given, active)
        del unscaled, given, active
        if want_down:
            of_down = _as(down.dtype, grouped_outer(grad_rows, scaled, offsets))
        del scaled
        if down_bias is not None:
            if not has_bias_dots:
                of_slots = add_bias_dots(grad_rows, down_bias, order, slots, offsets, of_slots)
            if want_down_bias:
                of_down_bias = _as(down_bias.dtype, sum_rows(grad_rows, offsets, slot_weights, order))
        del grad_rows
        if want_tokens:
            of_tokens = combine_rows(grouped_mm(of_given, to_up, offsets, transpose=False), slots, None, used)
            of_tokens = _as(tokens.dtype, of_tokens)
        if want_up:
            of_up = _as(up.dtype, grouped_outer(of_given, gather_rows(rows, order, slots, used), offsets))
        if want_up_bias:
            of_up_bias = _as(up_bias.dtype, sum_rows(of_given, offsets, None, order))
        of_weights = _as(weights.dtype, of_slots) if want_weights else None
        return of_tokens, None, of_weights, of_up, of_down, of_up_bias, of_down_bias, *(None,) * 6


def _as(dtype: torch.dtype, values: Tensor) -> Tensor:
    """Return `values.to(dtype)`, with less Python where nothing is to do."""
    return values if values.dtype == dtype else values.to(dtype)


def _differentiable(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the first seven inputs, in operations that autograd can differentiate."""

    def reference(
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        plan: Dispatch = ctx.kept[4]
        hidden = gather_mm_reference(tokens.to(ctx.dtype), up.to(ctx.dtype), *plan, up_bias)
        if not ctx.gated:
            hidden = ctx.activate(hidden)
        glu = ctx.activation if ctx.gated else ""
        return mm_combine_reference(hidden, down.to(ctx.dtype), weights.float(), *plan, down_bias, glu)

    return differentiable_gradients(reference, ctx.saved_tensors, ctx.needs_input_grad[:7], grad)
