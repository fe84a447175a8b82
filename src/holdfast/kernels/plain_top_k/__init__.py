"""Plain top-k routing as one function of autograd.

    rows (T,d), weight (E,d)
    logits = rows weight^T,  gates = softmax(logits),  experts: the k best,  weights: a softmax over their logits

`linear_float32`, a softmax and `select_top_k` compute the same with the same kernels: outputs are equal to the bit. So are
gradients, unless logits, gates and weights all have one: then three numbers are added in another order. But each function
and each view costs Python and a step of the backward: in a small layer this takes longer than the kernels.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backward import differentiable_gradients, is_differentiated
from holdfast.kernels.fp32_linear import linear_gradients, linear_without_autograd, matmul_float32
from holdfast.kernels.select import softmax_top_k, softmax_top_k_gradient


def plain_top_k(tokens: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits and gates (T,E), the k best experts (T,k), best first, and their weights, for `tokens (..., d)`."""
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _PlainTopK.apply(tokens, weight, k)
    return found


class _PlainTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, k: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
        logits = linear_without_autograd(rows, weight)
        gates = torch.softmax(logits, dim=-1)
        experts, weights, places = softmax_top_k(logits, k)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        kept = weights if places.numel() else None  # a caller may change them in place where no kernel reads them again
        ctx.save_for_backward(tokens, weight, logits, gates, experts, kept, places)
        return logits, gates, experts, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, weight, logits, gates, experts, weights, places = ctx.saved_tensors
        of_logits, of_gates, _, of_weights = grads
        needs = ctx.needs_input_grad[:2]
        if is_differentiated():
            shapes = logits.shape, gates.shape, experts.shape
            given = zip((of_logits, of_gates, of_weights), shapes, strict=True)
            wanted = tuple(logits.new_zeros(shape) if grad is None else grad for grad, shape in given)
            return *differentiable_gradients(_Reference(experts), [tokens, weight], needs, wanted), None
        parts = [] if of_logits is None else [of_logits]
        if of_weights is not None:
            parts.append(softmax_top_k_gradient(of_weights, logits, experts, weights, places))
        if of_gates is not None:
            parts.append(torch._softmax_backward_data(of_gates, gates, -1, torch.float32))  # type: ignore[attr-defined]
        if not parts:
            return None, None, None
        grad = parts[0] if len(parts) == 1 else sum(parts[1:], parts[0])
        rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
        of_rows, of_weight = linear_gradients(grad.contiguous(), rows, weight, *needs)
        return None if of_rows is None else of_rows.view(tokens.shape), of_weight, None


class _Reference:
    """The function in operations that autograd can differentiate, for given `experts (T,k)`."""

    def __init__(self, experts: Tensor) -> None:
        self.experts = experts

    def __call__(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = matmul_float32(tokens.reshape(-1, tokens.shape[-1]), weight, transposed=True)
        return logits, torch.softmax(logits, dim=-1), torch.softmax(logits.gather(-1, self.experts), dim=-1)
