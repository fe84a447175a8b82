"""What a backward needs to know: is it differentiated itself, is this forward a recomputation, which state does it read?

**Second derivatives.** An operator's backward is a kernel, or a loop that writes in place: autograd cannot differentiate it
and would take its result for a constant. So a backward that is differentiated itself (`create_graph=True`) computes the
function again in plain PyTorch and takes the gradient of that. It costs the memory that the operator saves, and is right to
any order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.launching import EVERYWHERE, is_exporting, operator


def has_gradient(node: Any) -> bool:
    """Whether the parameter nearest to this autograd node has a gradient, to which the running backward will add.

    In a backward, a parameter gets its gradient after all nodes that use it have run.
    """
    seen, queue = {node}, deque([node])
    while queue:
        for used, _ in queue.popleft().next_functions:
            if used is None or used in seen:
                continue
            parameter = getattr(used, "variable", None)
            if isinstance(parameter, nn.Parameter):
                return parameter.grad is not None and _will_add_to(used) and bool(parameter.grad.any())
            seen.add(used)
            queue.append(used)
    return False


def _will_add_to(leaf: Any) -> bool:
    """Whether the running backward adds to the gradient of a parameter; `torch.autograd.grad` returns gradients instead."""
    try:
        found: bool = torch._C._will_engine_execute_node(leaf)  # type: ignore[attr-defined]
    except RuntimeError:  # torch does not answer for a leaf whose gradient `torch.autograd.grad` returns
        return False
    return found


def is_differentiated() -> bool:
    """Return whether the running backward is differentiated itself; a compiled one never is (torch refuses it)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiable_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor | tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Return the gradients of `function(*inputs)` that `needs` asks for, differentiable; None in the other places.

    `grad` is the gradient of the function's output, or a tuple with one for each output.
    """
    with torch.enable_grad():
        # Views, because one input may be computed from another: each gets only the gradient through itself.
        views = [None if value is None else value.view_as(value) for value in inputs]
        places = [at for at, view in enumerate(views) if needs[at] and view is not None and view.requires_grad]
        wanted = [view for at in places if (view := views[at]) is not None]
        outputs, grads = function(*views), grad
        if isinstance(outputs, tuple):  # an output that depends on none of the wanted inputs has no gradient
            kept = [at for at, output in enumerate(outputs) if output.requires_grad]
            outputs, grads = tuple(outputs[at] for at in kept), tuple(grad[at] for at in kept)
        found = torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)
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


def refuse_second_derivatives(grad: Tensor, message: str) -> Tensor:
    """Return `grad` unchanged; differentiating it raises a ValueError with this message."""
    if not is_differentiated():
        return grad
    out: Tensor = _Refused.apply(grad, message)
    return out


def is_recomputing() -> bool:
    """Return whether a backward is running, in which checkpointing runs a forward again."""
    task: int = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    return task != -1


@torch.library.custom_op("holdfast::first_forward", mutates_args=())
def _first_forward(like: Tensor) -> Tensor:
    # An operator rather than a Python test, so that a compiled layer asks each time it runs, not once when traced.
    return torch.full((), not is_recomputing(), device=like.device)  # a fill: copying a scalar over would wait for the GPU


@_first_forward.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=like.device)


def is_first_forward(like: Tensor) -> Tensor:
    """Return a bool on the device of `like`: False where checkpointing recomputes a forward that already counted."""
    out: Tensor = _first_forward(like)
    return out


_copy = operator("copy_of(Tensor state) -> Tensor", torch.clone, torch.empty_like, devices=EVERYWHERE)


def snapshot_for_backward(state: Tensor, training: bool = True) -> Tensor:
    """Return a copy of a buffer for the backward to read, taken now.

    A compiled backward would otherwise read the buffer itself, after later batches have changed it. In an exported program
    nothing changes the buffer outside of training, and the copy is a plain one.
    """
    if is_exporting() and not training:
        return state.clone()
    out: Tensor = _copy(state)
    return out
