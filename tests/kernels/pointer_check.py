"""Check, in Triton's interpreter, that kernels read and write only inside of the tensors that they were given.

On a GPU, an access outside of a tensor may hit memory that belongs to something else, and then goes unnoticed. In the
interpreter it reads the memory of the test process. Comparisons of results find neither.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


class PointerOutside(Exception):
    """A kernel used a pointer outside of the tensors of its launch."""


def tensors_of(argument: Any) -> Iterator[Tensor]:
    """Return the tensors of an argument of a kernel, which may be a tuple of tuples."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for each in argument:
            yield from tensors_of(each)


def ranges_of(tensors: Iterator[Tensor]) -> np.ndarray[Any, Any]:
    """Return the first byte of each tensor and the first byte after it: (2, tensors), sorted."""
    found = {(0, 0)}
    for tensor in tensors:
        if tensor.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.add((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    return np.array(sorted(found), dtype=np.uint64).T


def require_inside(ranges: np.ndarray[Any, Any], pointers: Any, mask: Any, what: str) -> None:
    """Raise an error if one of the pointers, where `mask` is true, does not point to a whole element of a tensor."""
    size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
    places, used = np.broadcast_arrays(pointers.data.astype(np.uint64), True if mask is None else mask.data.astype(bool))
    places = places[used]
    # Views of one tensor overlap, so that a pointer can lie in a range that starts before the nearest one.
    ends = np.maximum.accumulate(ranges[1])
    at = np.searchsorted(ranges[0], places, side="right") - 1
    outside = places + size > ends[at]
    if outside.any():
        worst = places[outside][0]
        gaps = [int(worst) - int(end) for end in ranges[1] if int(worst) >= int(end) > 0]
        where = f"{min(gaps)} bytes after the nearest tensor before it" if gaps else "before all tensors"
        raise PointerOutside(
            f"{what}: {int(outside.sum())} of {places.size} pointers are outside of all tensors, one {where}"
        )


@contextmanager
def pointers_checked() -> Iterator[None]:
    """Make every load, store and atomic operation of the interpreter raise `PointerOutside` for a pointer outside.

    The allowed pointers are those of the tensors passed to the launch that is running. Masked-out pointers may be anything.
    """
    from triton.runtime import interpreter

    running: list[tuple[str, np.ndarray[Any, Any]]] = []
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__

    def checked_launch(self: Any, *arguments: Any, **options: Any) -> Any:
        running.append((self.fn.__name__, ranges_of(tensors_of((*arguments, *options.values())))))
        try:
            return launch(self, *arguments, **options)
        finally:
            running.pop()

    def checked(name: str, mask_at: int | None) -> Callable[..., Any]:
        access: Callable[..., Any] = getattr(interpreter.InterpreterBuilder, name)
        pointer_at = 1 if name == "create_atomic_rmw" else 0

        def check(self: Any, *arguments: Any) -> Any:
            kernel, ranges = running[-1]
            mask = None if mask_at is None else arguments[mask_at]
            require_inside(ranges, arguments[pointer_at], mask, f"{kernel}, {name.removeprefix('create_')}")
            return access(self, *arguments)

        return check

    # Unmasked loads and stores are masked ones with a mask of ones.
    masks = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3, "create_atomic_cas": None}
    with ExitStack() as patches:
        for name, mask_at in masks.items():
            patches.enter_context(mock.patch.object(interpreter.InterpreterBuilder, name, checked(name, mask_at)))
        patches.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", checked_launch))
        yield
