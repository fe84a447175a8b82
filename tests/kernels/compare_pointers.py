"""Kernels with a wrong access, each of which `pointer_check` finds; test_comparisons.py has a case for each."""

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


@triton.jit
def copy_all(pair):
    """Copy 16 numbers without a mask."""
    place = tl.arange(0, 16)
    tl.store(pair.target + place, tl.load(pair.source + place))


def run(kernel, count, *arguments, **options) -> Pair:
    """Run a kernel over views of `count` numbers, behind which there is memory of the same storage."""
    pair = Pair(torch.arange(32.0)[:count], torch.zeros(32)[:count])
    with pointers_checked():
        kernel[(1,)](pair, *arguments, **options)
    return pair


def is_refused(message: str, kernel, count: int, *arguments, **options) -> None:
    try:
        run(kernel, count, *arguments, **options)
    except InterpreterError as error:
        # The interpreter raises its own error, for each kernel function that the first one passed through.
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert isinstance(causes[-1], PointerOutside) and message in str(causes[-1]), causes[-1]
        return
    raise AssertionError("the wrong access was not found")


def is_accepted() -> None:
    for pair in (run(copy, 13, 13, read=0, write=0, atomic=atomic) for atomic in (False, True)):
        assert torch.equal(*pair)
    assert torch.equal(*run(copy_all, 16))


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name: nothing on a GPU, where no access is checked."""
    if device != "cpu":
        return {}
    one_past = "1 of 14 pointers are outside of all tensors, one 0 bytes after the nearest tensor"
    return {
        "pointers: inside": is_accepted,
        "pointers: a load past the end": partial(
            is_refused, f"copy, masked_load: {one_past}", copy, 13, 13, read=1, write=0, atomic=False
        ),
        "pointers: a store past the end": partial(
            is_refused, f"copy, masked_store: {one_past}", copy, 13, 13, read=0, write=1, atomic=False
        ),
        "pointers: an atomic addition past the end": partial(
            is_refused, f"copy, atomic_rmw: {one_past}", copy, 13, 13, read=0, write=1, atomic=True
        ),
        "pointers: a load without a mask": partial(
            is_refused, "copy_all, masked_load: 3 of 16 pointers are outside", copy_all, 13
        ),
    }
