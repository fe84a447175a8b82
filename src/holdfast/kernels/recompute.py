"""What a backward runs again: is this forward the first one or a recomputation, and which state do both see?"""

import torch
from torch import Tensor

from holdfast.kernels.operators import EVERYWHERE, operator


def recomputing() -> bool:
    """Is a backward running?"""
    task: int = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    return task != -1


@torch.library.custom_op("holdfast::first_forward", mutates_args=())
def _first_forward(like: Tensor) -> Tensor:
    # An operator rather than a Python test, so that a compiled layer asks each time it runs, not once when traced.
    return torch.full((), not recomputing(), device=like.device)  # a fill: copying a scalar over would wait for the GPU


@_first_forward.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=like.device)


_copy = operator("copy_of(Tensor state) -> Tensor", torch.clone, torch.empty_like, devices=EVERYWHERE)


def as_now(state: Tensor, training: bool = True) -> Tensor:
    """A copy of a buffer for a backward to read; a compiled one would make it again, from what the buffer is by then.

    Outside of training an exported program has a plain copy, since nothing in it changes the buffer.
    """
    if torch.compiler.is_exporting() and not training:
        return state.clone()
    out: Tensor = _copy(state)
    return out


def first_forward(like: Tensor) -> Tensor:
    """A bool on `like`'s device: False where checkpointing recomputes a forward that already counted."""
    out: Tensor = _first_forward(like)
    return out
