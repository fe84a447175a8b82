"""A small layer of experts as one autograd function: `dispatch`, `gather_mm`, an activation and `mm_combine`.

Each of the four functions costs Python, forward and backward. In a small layer this takes longer than the kernels. On a CPU
the numbers are those of the four functions, to the bit. On a GPU two steps are part of other kernels, relu and the dot
products with biases, and numbers differ by rounding.

**Memory.** Autograd keeps what a function saves until its backward returns: the second product's part of the backward would
still hold memory when the first one's part needs it. So what is not an input is kept here, in `ctx.kept`, and dropped where
it is used last, unless the graph is kept for another backward. The gradients of both weights exist until the function
returns, whereas four functions can add up one before they compute the other. In a large layer that counts, and Python does
not: there the four functions run (`SMALL_WEIGHTS`, `SMALL_ROWS`).
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
from holdfast.kernels.grouped import (
    gather_mm_backward,
    gather_mm_reference,
    grouped_mm,
    grouped_outer,
    mm_combine_backward,
    mm_combine_reference,
)
from holdfast.kernels.launching import PLAIN_TENSORS, has_kernels, is_exporting, needs_operators

SMALL_WEIGHTS = 2**25  # numbers in the weights of all experts
SMALL_ROWS = 2**26  # numbers in the results of the first product

Backward = Callable[[Tensor, Tensor, Tensor], Tensor]  # (gradient, input, output) -> gradient of the input
ops: Any = torch.ops.aten
BACKWARDS: Mapping[str, Backward] = {  # of activations that are not gated
    "relu": lambda grad, _, found: ops.threshold_backward(grad, found, 0),
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


def can_run_as_one(tokens: Tensor, chosen: Tensor, weights: Tensor, network: Network) -> bool:
    """Return whether `expert_layer` runs here; else the four functions do.

    A compiler, an exporter and a tracer need no shortcut. Modes of PyTorch must see the operators, and hooks what is saved.
    """
    name, up = network.activation, network.up
    if up.numel() + network.down.numel() > SMALL_WEIGHTS or chosen.numel() * up.shape[1] > SMALL_ROWS:
        return False
    if needs_operators() or is_exporting() or torch._C._get_tracing_state() is not None or has_hooks_on_saved_tensors():
        return False
    if not PLAIN_TENSORS.issuperset(map(type, (tokens, chosen, weights, *network[:4]))):
        return False
    return has_glu_kernel(name, tokens) if network.gated else name in BACKWARDS


def expert_layer(tokens: Tensor, chosen: Tensor, weights: Tensor, network: Network, most_rows: int | None = None) -> Tensor:
    """Return y_t = sum_s weight_ts FFN_{chosen_ts}(x_t) as (T,d); index E marks an unused slot.

    Tokens and the two weights of the network have one dtype; `weights (T,K)` are float32.

    most_rows   at most this many slots have an expert. None: all slots
    """
    out: Tensor = _ExpertLayer.apply(tokens, chosen, weights, *network, most_rows, torch.is_grad_enabled())
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
        most_rows: int | None,
        may_have_backward: bool,
    ) -> Tensor:
        plan = dispatch(chosen, up.shape[0], most_rows)
        order, slots, offsets = plan
        used = offsets[-1]
        hidden = grouped_mm(gather_rows(tokens.contiguous(), order, slots, used), up, offsets, transpose=True)
        is_relu = activation == RELU and not gated
        if up_bias is not None:
            add_bias_rows(hidden, up_bias, offsets, relu=is_relu)
        elif is_relu:
            hidden.relu_()
        activated = hidden if is_relu else glu_rows(hidden, used, activation) if gated else activate(hidden)
        if may_have_backward:
            ctx.save_for_backward(tokens, weights, up, down, up_bias, down_bias)
            # A gated activation is computed again in the backward.
            ctx.kept = [plan, used, hidden, None if gated else activated]
            ctx.activation, ctx.activate, ctx.gated = activation, activate, gated
        del hidden
        product = grouped_mm(activated, down, offsets, transpose=True)
        del activated
        bias = None if down_bias is None else down_bias.contiguous()
        return combine_rows(product, slots, weights.contiguous(), used, bias, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, weights, up, down, up_bias, down_bias = ctx.saved_tensors
        want_tokens, _, want_weights, want_up, want_down, want_up_bias, want_down_bias = ctx.needs_input_grad[:7]
        plan, used, hidden, activated = ctx.kept
        if not graph_is_kept():
            ctx.kept = None
        if is_differentiated():
            return _differentiable(ctx, grad, plan)
        if needs_operators():
            return _by_operators(ctx, grad, plan, hidden, activated)
        order, slots, offsets = plan
        is_relu, weights = ctx.activation == RELU and not ctx.gated, weights.contiguous()
        of_tokens = of_up = of_down = of_up_bias = of_down_bias = None

        # Kernels write the gradients of the weights in two parts, that of the bias first.
        dots = torch.empty_like(weights) if has_kernels(grad) and order.shape[0] > 0 else None
        has_bias_dots = down_bias is not None and dots is not None and grad.shape[1] <= MOST_COLUMNS
        bias = down_bias.contiguous() if has_bias_dots else None
        grad_rows = gather_rows(grad.contiguous(), order, slots, used, dots, bias, offsets)
        of_activated = grouped_mm(grad_rows, down, offsets, transpose=False)
        places = weights, order, slots, used
        if ctx.gated:
            of_hidden, scaled, of_weights = glu_rows_backward(
                of_activated, hidden, *places, ctx.activation, dots, has_bias_dots
            )
        else:
            of_hidden, scaled, of_weights = scale_and_dot(
                of_activated, activated, *places, relu=is_relu, dots=dots, added=has_bias_dots
            )
        del of_activated
        if want_down:
            of_down = grouped_outer(grad_rows, scaled, offsets)
        del scaled
        if down_bias is not None:
            if not has_bias_dots:
                of_weights = add_bias_dots(grad_rows, down_bias, order, slots, offsets, of_weights)
            if want_down_bias:
                of_down_bias = sum_rows(grad_rows, offsets, weights, order).to(down_bias.dtype)
        del grad_rows
        if not ctx.gated and not is_relu:
            of_hidden = BACKWARDS[ctx.activation](of_hidden, hidden, activated)
        del hidden, activated
        if want_tokens:
            of_tokens = combine_rows(grouped_mm(of_hidden, up, offsets, transpose=False), slots, None, used)
        if want_up:
            of_up = grouped_outer(of_hidden, gather_rows(tokens.contiguous(), order, slots, used), offsets)
        if want_up_bias:
            of_up_bias = sum_rows(of_hidden, offsets, None, order).to(up_bias.dtype)
        return of_tokens, None, of_weights if want_weights else None, of_up, of_down, of_up_bias, of_down_bias, *(None,) * 5


def _by_operators(ctx: Any, grad: Tensor, plan: Dispatch, hidden: Tensor, activated: Any) -> tuple[Tensor | None, ...]:
    """Return what `_ExpertLayer.backward` returns, with the operators that four functions call."""
    tokens, weights, up, down, up_bias, down_bias = ctx.saved_tensors
    wants = ctx.needs_input_grad[:7]
    rows, glu = (hidden, ctx.activation) if ctx.gated else (activated, "")
    of_hidden, of_down, of_weights, of_down_bias = mm_combine_backward(
        grad, rows, down, weights, *plan, down_bias, glu, wants[4], wants[6]
    )
    if not ctx.gated:
        of_hidden = BACKWARDS[ctx.activation](of_hidden, hidden, activated)
    of_tokens, of_up, of_up_bias = gather_mm_backward(of_hidden, tokens, up, *plan, up_bias, wants[0], wants[3], wants[5])
    found = of_tokens, None, of_weights, of_up, of_down, of_up_bias, of_down_bias
    return *(each if want else None for each, want in zip(found, wants, strict=True)), *(None,) * 5


def _differentiable(ctx: Any, grad: Tensor, plan: Dispatch) -> tuple[Tensor | None, ...]:
    """Return what `_ExpertLayer.backward` returns, in operations that autograd can differentiate."""

    def reference(
        tokens: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        hidden = gather_mm_reference(tokens, up, *plan, up_bias)
        hidden = hidden if ctx.gated else ctx.activate(hidden)
        return mm_combine_reference(hidden, down, weights, *plan, down_bias, ctx.activation if ctx.gated else "")

    of_tokens, _, *needs = ctx.needs_input_grad[:7]
    first, *others = differentiable_gradients(reference, ctx.saved_tensors, [of_tokens, *needs], grad)
    return first, None, *others, *(None,) * 5
