"""Launch a Triton kernel with little Python.

At every launch Triton finds out which compiled version of a kernel its arguments need, and calls hooks, of which there are
usually none. That takes more Python than the rest of the launch, and a small layer launches some twenty kernels.
`fast_launch` asks Triton once for each kind of arguments:

    @fast_launch
    @triton.jit
    def _double(values, out, size, BLOCK: tl.constexpr):
        ...

    _double[(programs,)](values, out, size, BLOCK=1024)

Operands must be tensors, ints and floats, the first of them a tensor. They are positional. Parameters that are
`tl.constexpr` come last; they, and Triton's options, are keywords, in the same order at every call. In its interpreter, for
a profiler that has set hooks, and on AMD GPUs, where the size of a tensor matters too, Triton launches the kernel itself.
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
        kind = kind_of(operands, constants)
        program = self._programs.get(kind)
        if program is not None and not has_hooks():
            program.launch(grid, operands)
            return
        compiled = self.kernel[grid](*operands, **constants)
        if program is None and hasattr(compiled, "packed_metadata") and torch.version.hip is None:  # not in the interpreter
            self._programs[kind] = _Program(compiled, self.kernel.arg_names, operands, constants)


def fast_launch(kernel: Any) -> FastLaunch:
    """Return a kernel of `triton.jit` that is launched with less Python."""
    return FastLaunch(kernel)


def has_hooks() -> bool:
    """Return whether someone wants to be called at every launch, as Triton's profiler does."""
    runtime = _runtime()
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # someone has put a function in the place of the list of hooks
        return True


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def kind_of(operands: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return what determines the version of a kernel: Triton never has several for one kind.

    That is the device, the constants, of a tensor its dtype and whether its address is aligned, and of an int, whether it is
    1, aligned, and 32 bits long.
    """
    kind = [operands[0].get_device(), *constants.values()]
    for each in operands:
        if type(each) is int:
            kind.append((each == 1) + 2 * (each % ALIGNMENT == 0) + 4 * (-(2**31) <= each < 2**31))
        elif type(each) is float:
            kind.append(float)
        else:
            kind.append(each.dtype if each.data_ptr() % ALIGNMENT == 0 else (each.dtype,))
    return tuple(kind)


class _Program:
    """A compiled version of a kernel."""

    def __init__(self, compiled: Any, names: list[str], operands: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._compiled = compiled  # while it is referenced, Triton does not unload it
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._device = operands[0].get_device()
        self._constants = [constants[name] for name in names[len(operands) :]]  # a KeyError: constants do not come last

    def launch(self, grid: tuple[int, ...], operands: tuple[Any, ...]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # type: ignore[attr-defined]
        sizes = (*grid, 1, 1)[:3]
        self._run(*sizes, stream, self._function, self._metadata, None, None, None, *operands, *self._constants)
