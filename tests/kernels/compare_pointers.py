"""A kernel with wrong accesses, which `pointer_check` finds; test_comparisons.py has a case for each."""

# mypy: ignore-errors
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from kernels.pointer_check import PointerOutside, pointers_checked
from torch import Tensor
from triton.runtime.errors import InterpreterError


class Pair(NamedTuple):
    source: Tensor
    target: Tensor


@triton.jit
def copy(pair, count, read: tl.constexpr, write: tl.constexpr, atomic: tl.constexpr):
    """Copy numbers. `read`, `write`: how many numbers past `count` are used."""
    place = tl.arange(0, 16)
    numbers = tl.load(pair.source + place, mask=place < count + read, other=0.0)
    if atomic:
        tl.atomic_add(pair.target + place, numbers, mask=place < count + write)
    else:
        tl.store(pair.target + place, numbers, mask=place < count + write)


def access(operation: str, read: int, write: int, atomic: bool) -> None:
    """Copy 13 numbers of views, behind which there is memory of the same storage; a wrong `operation` must be refused."""
    pair, error = Pair(torch.arange(32.0)[:13], torch.zeros(32)[:13]), None
    try:
        with pointers_checked():
            copy[(1,)](pair, 13, read=read, write=write, atomic=atomic)
    except InterpreterError as raised:  # the interpreter's own error, once for each kernel function that it passed through
        error = raised
        while error.__cause__ is not None:
            error = error.__cause__
    if read == write == 0:
        assert error is None and torch.equal(*pair)
    else:
        one_past = "1 of 14 pointers are outside of all tensors, one 0 bytes after the nearest tensor"
        assert isinstance(error, PointerOutside) and f"copy, {operation}: {one_past}" in str(error)


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name: nothing on a GPU, where no access is checked."""
    cases = {
        "inside": ("", 0, 0, False),
        "a load past the end": ("masked_load", 1, 0, False),
        "a store past the end": ("masked_store", 0, 1, False),
        "an atomic addition past the end": ("atomic_rmw", 0, 1, True),
    }
    return {f"pointers: {name}": partial(access, *case) for name, case in cases.items()} if device == "cpu" else {}
