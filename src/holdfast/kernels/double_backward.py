"""Second derivatives of operators whose own backward is opaque to autograd.

An operator's backward is a kernel, or a loop that writes in place: autograd cannot differentiate it and would take its
result for a constant. So a backward that is to be differentiated itself (`create_graph=True`) computes the function again
in plain PyTorch and takes the gradient of that. It costs the memory that the operator saves, and is right to any order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_wanted() -> bool:
    """Return whether the backward that runs now is to be differentiated; a compiled one never is (torch refuses it)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of `plain(*inputs)` that `needs` asks for, differentiable; None in the other places."""
    with torch.enable_grad():
        # Views, because one input may be computed from another: each gets only what it brings by itself.
        views = [None if value is None else value.view_as(value) for value in inputs]
        places = [at for at, view in enumerate(views) if needs[at] and view is not None and view.requires_grad]
        wanted = [view for at in places if (view := views[at]) is not None]
        found = torch.autograd.grad(plain(*views), wanted, grad, create_graph=True, allow_unused=True)
        by_place = dict(zip(places, found, strict=True))
        return [by_place.get(at) for at in range(len(views))]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, message: str) -> Tensor:
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        raise ValueError(ctx.message)


def refuse(grad: Tensor, message: str) -> Tensor:
    """Return `grad` unchanged; differentiating it raises a ValueError."""
    if not is_wanted():
        return grad
    out: Tensor = _Refused.apply(grad, message)
    return out
