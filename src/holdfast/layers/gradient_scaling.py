"""Scale the gradients of experts by their load, so that an expert with few tokens learns as fast as one with many.

    n_e the real tokens of expert e in the batch of all ranks, c = `gradient_scaling`
    gradient of e's weights  <-  gradient * clip(mean_e n_e / max(n_e, 1), 1/c, c)

A loss that is a mean over T tokens gives an expert (n_e / T) times its mean gradient per token. Within the clip this becomes
(mean_e n_e / T) times that mean, whatever its load is (survey, section 4.3). Only weights and biases of experts are scaled:
gradients of tokens and of routers stay. With several micro-batches per step, each is scaled by its own loads.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.routing import Router, Routing
from holdfast.routing.state import sum_over_ranks


def gradient_factors(router: Router, routing: Routing, token_mask: Tensor | None) -> Tensor | None:
    """Return (E,): the factor of each expert's gradients in this forward; None if they stay. Every rank must call it."""
    largest = router.gradient_scaling
    assert largest is not None
    if not (router.training and torch.is_grad_enabled()):
        return None
    with torch.no_grad():
        used = routing.chosen if token_mask is None else routing.chosen & token_mask.reshape(-1, 1)
        loads = sum_over_ranks(used.sum(0).float())
        return (loads.mean() / loads.clamp_min(1)).clamp(1 / largest, largest)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (factors,) = ctx.saved_tensors
        return grad * factors.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)), None


def with_scaled_gradient(weight: Tensor, factors: Tensor) -> Tensor:
    """Return `weight (E,...)`; in its gradient each expert is multiplied by its entry of `factors (E,)`."""
    scaled: Tensor = _ScaledGradient.apply(weight, factors)
    return scaled
