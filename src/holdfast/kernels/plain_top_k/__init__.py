"""Plain top-k routing as one autograd function.

    rows (T,d), weight (E,d)
    logits = rows weight^T,  gates = softmax(logits),  experts: the k best,  weights: a softmax over their logits

`linear_float32`, a softmax, `select_top_k`, `require_finite` and `balance_loss` compute the same. But each function, each
view and each kernel costs Python: in a small layer this takes longer than the kernels. On a GPU one kernel does all that
follows the logits, and a second makes the balance loss. One kernel computes the gradient; PyTorch computes the part that
comes through gates.

On a CPU, outputs equal those of the separate functions to the bit, and so do gradients, unless logits, gates and weights all
have one: then three numbers are added in another order. On a GPU only the selected experts are equal to the bit.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.backward import differentiable_gradients, is_differentiated
from holdfast.kernels.balance import MOST_EXPERTS as MOST_BALANCED
from holdfast.kernels.balance import reference as balance_reference
from holdfast.kernels.finite import place_of_report, require_finite
from holdfast.kernels.fp32_linear import gradient_part_count, linear_gradients, linear_without_autograd, matmul_float32
from holdfast.kernels.launching import kernels_of, needs_operators, on_device_of
from holdfast.kernels.select import has_select_kernel, top


class PlainRouting(NamedTuple):
    """The result of `plain_top_k` for T tokens."""

    logits: Tensor  # (T,E) float32
    gates: Tensor  # (T,E) float32
    experts: Tensor  # (T,k), best first
    weights: Tensor  # (T,k) float32
    loss: Tensor | None  # (), `balance` times the balance loss; None if it was not computed


def plain_top_k(
    tokens: Tensor, weight: Tensor, k: int, *, layer: Tensor | None = None, balance: float | None = None
) -> PlainRouting:
    """Route `tokens (..., d)` to their k best experts.

    layer     the layer's name from `encode_name`, to be reported if logits are not finite; None: no check
    balance   the coefficient of the balance loss of one process; None: no loss. It is computed only where there is a kernel
    """
    found = PlainRouting(*_PlainTopK.apply(tokens, weight, k, layer, balance))
    if layer is not None and not has_select_kernel(found.logits):
        require_finite(found.logits, tokens, layer, None)
    return found


class _PlainTopK(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tokens: Tensor, weight: Tensor, k: int, layer: Tensor | None, coefficient: float | None
    ) -> tuple[Tensor | None, ...]:
        rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
        logits = linear_without_autograd(rows, weight)
        loss = slopes = kept = None
        if has_select_kernel(logits):
            gates, experts, weights, loss, slopes = _route_on_gpu(logits, k, layer, coefficient)
        else:
            kept = gates = torch.softmax(logits, dim=-1)
            experts = top(logits, k)
            weights = torch.softmax(logits.gather(-1, experts), dim=-1)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.coefficient = coefficient
        ctx.save_for_backward(tokens, weight, logits, experts, kept, slopes)
        return logits, gates, experts, weights, loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, weight, logits, experts, gates, slopes = ctx.saved_tensors
        of_logits, of_gates, _, of_weights, of_loss = grads
        needs = ctx.needs_input_grad[:2]
        if is_differentiated():
            reference = _Reference(experts, ctx.coefficient if of_loss is not None else None)
            given = (of_logits, logits.shape), (of_gates, logits.shape), (of_weights, experts.shape), (of_loss, ())
            wanted = tuple(logits.new_zeros(shape) if grad is None else grad for grad, shape in given)
            return *differentiable_gradients(reference, [tokens, weight], needs, wanted), None, None, None
        if all(grad is None for grad in grads):
            return (None,) * 5
        by_kernel = has_select_kernel(logits) and not needs_operators()
        if of_loss is not None and not by_kernel:
            of_gates = of_loss * slopes.expand_as(logits) + (0 if of_gates is None else of_gates)
        if of_gates is not None:
            gates = torch.softmax(logits, dim=-1) if gates is None else gates
            of_gates = torch._softmax_backward_data(of_gates, gates, -1, torch.float32)  # type: ignore[attr-defined]
        if by_kernel:
            of_logits = of_gates if of_logits is None else of_logits if of_gates is None else of_logits + of_gates
            grad = _gradient_on_gpu(
                logits, experts, of_logits, of_weights, of_loss, slopes, gradient_part_count(tokens, weight)
            )
        else:
            parts = [of_logits, None if of_weights is None else _of_chosen(of_weights, logits, experts), of_gates]
            first, *others = [part for part in parts if part is not None]
            grad = sum(others, first).contiguous()
        rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
        of_rows, of_weight = linear_gradients(grad, rows, weight, *needs)
        return None if of_rows is None else of_rows.view(tokens.shape), of_weight, None, None, None


def _route_on_gpu(
    logits: Tensor, k: int, layer: Tensor | None, coefficient: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gates, experts, weights, the balance loss and its slopes; the last two are None without a coefficient."""
    experts = logits.shape[1]
    is_balanced = coefficient is not None and experts <= MOST_BALANCED
    with on_device_of(logits):
        record = None if layer is None else place_of_report(logits, layer)
        gates, chosen, weights, sums = kernels_of(__name__).route(logits, k, record, is_balanced)
        if not is_balanced:
            return gates, chosen, weights, None, None
        return gates, chosen, weights, *kernels_of("holdfast.kernels.balance").loss(sums, experts, coefficient)


def _gradient_on_gpu(logits: Tensor, *rest: Any) -> Tensor:
    with on_device_of(logits):
        grad: Tensor = kernels_of(__name__).gradient(logits, *rest)
        return grad


def _of_chosen(grad: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the gradient of the logits for the gradient (T,k) of the weights.

    The weights are computed again: a caller may have changed them in place.
    """
    weights = torch.softmax(logits.gather(-1, experts), dim=-1)
    of_chosen = torch._softmax_backward_data(grad, weights, -1, torch.float32)  # type: ignore[attr-defined]
    return torch.zeros_like(logits).scatter_add(-1, experts, of_chosen)


class _Reference:
    """The function in operations that autograd can differentiate, for given `experts (T,k)`."""

    def __init__(self, experts: Tensor, coefficient: float | None) -> None:
        self.experts, self.coefficient = experts, coefficient

    def __call__(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logits = matmul_float32(tokens.reshape(-1, tokens.shape[-1]), weight, transposed=True)
        gates = torch.softmax(logits, dim=-1)
        found = logits, gates, torch.softmax(logits.gather(-1, self.experts), dim=-1)
        if self.coefficient is None:
            return found
        return *found, self.coefficient * balance_reference(gates, self.experts, None, None)
