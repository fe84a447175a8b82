"""Is this forward the first one, or activation checkpointing running it again inside a backward?"""

import torch
from torch import Tensor


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


def first_forward(like: Tensor) -> Tensor:
    """A bool on `like`'s device: False where checkpointing recomputes a forward that already counted."""
    out: Tensor = _first_forward(like)
    return out
