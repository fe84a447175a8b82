"""Launch a Triton kernel with little Python.

At every launch Triton finds out which compiled version of a kernel its arguments need. That takes more Python than the rest
of the launch, and a small layer launches some twenty kernels. `fast_launch` asks Triton once for each kind of arguments:

    @fast_launch
    @triton.jit
    def _double(values, out, size, BLOCK: tl.constexpr):
        ...

    _double[(programs,)](values, out, size, BLOCK=1024)

Operands must be tensors, ints and floats, the first of them a tensor. They are positional. Parameters that are
`tl.constexpr`, and Triton's options, are keywords, in the same order at every call. In its interpreter, and on AMD GPUs,
where the size of a tensor matters too, Triton launches the kernel itself every time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 16  # Triton compiles one version for addresses and ints that are multiples of this, and one for others


class FastLaunch:
    """A Triton kernel: `kernel[grid](*operands, **constants)` launches it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._programs: dict[tuple[Any, ...], _Program] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
        program = self._programs.get(kind_of(operands, constants))
        if program is not None:
            program.launch(grid, operands)
            return
        compiled = self.kernel[grid](*operands, **constants)
        if hasattr(compiled, "packed_metadata") and torch.version.hip is None:  # not in the interpreter
            self._programs[kind_of(operands, constants)] = _Program(compiled, self.kernel.arg_names, constants)


def fast_launch(kernel: Any) -> FastLaunch:
    """Return a kernel of `triton.jit` that is launched with less Python."""
    return FastLaunch(kernel)


def kind_of(operands: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return what determines the version of a kernel: Triton never has several for one kind.

    That is the device, the constants, of a tensor its dtype and whether its address is aligned, and of an int, whether it is
    1, aligned, and 32 bits long.
    """
    return (
        operands[0].get_device(),
        *constants.values(),
        *[
            (each == 1) + 2 * (each % ALIGNMENT == 0) + 4 * (-(2**31) <= each < 2**31)
            if type(each) is int
            else float
            if type(each) is float
            else (each.dtype, each.data_ptr() % ALIGNMENT == 0)
            for each in operands
        ],
    )


class _Program:
    """A compiled version of a kernel."""

    def __init__(self, compiled: Any, names: list[str], constants: dict[str, Any]) -> None:
        self._compiled = compiled
        self._arguments = [constants.get(name) for name in names]
        self._places = [place for place, name in enumerate(names) if name not in constants]

    def launch(self, grid: tuple[int, ...], operands: tuple[Any, ...]) -> None:
        arguments = self._arguments.copy()
        for place, operand in zip(self._places, operands, strict=True):
            arguments[place] = operand
        self._compiled[(*grid, 1, 1)[:3]](*arguments)
