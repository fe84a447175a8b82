"""Operators: how they are registered, how their kernels are launched, and what their backwards need.

**Operators** are opaque to `torch.compile` and cheap to call. `torch.library.custom_op` with `register_autograd` costs about
75 microseconds of Python for a forward and a backward, nearly what a router's kernels take. An operator without autograd,
inside a `torch.autograd.Function`, costs a third of that.

**Kernels.** At every launch Triton finds out which compiled version of a kernel its arguments need, and calls hooks, of
which there are usually none. That takes more Python than the rest of the launch, and a small layer launches some twenty
kernels. A `@kernel` asks Triton once for each kind of arguments:

    @kernel
    def _double(values, out, size, BLOCK: tl.constexpr):
        ...

    _double[(programs,)](values, out, size, BLOCK=1024)

Operands are tensors, ints, floats and tuples of these, and positional. Parameters that are `tl.constexpr` come last; they,
and Triton's options, are keywords, in the same order at every call.

**Second derivatives.** An operator's backward is a kernel, or a loop that writes in place: autograd cannot differentiate it
and would take its result for a constant. So a backward that is differentiated itself (`create_graph=True`) computes the
function again in plain PyTorch and takes the gradient of that. It costs the memory that the operator saves, and is right to
any order.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.kernels.torch_internals import is_exporting, is_intercepted, is_recomputing, raw_stream

HAS_TRITON = importlib.util.find_spec("triton") is not None  # found without importing Triton, which is slow
EVERYWHERE = "CompositeExplicitAutograd"
ALIGNMENT = 16  # Triton compiles one version for addresses and ints that are multiples of this, and one for others

PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list})  # types of arguments

_LIBRARY = torch.library.Library("holdfast", "FRAGMENT")
_on_gpu: set[Callable[..., Any]] = set()  # the functions of `on_gpu`
_import, _capability = functools.cache(importlib.import_module), functools.cache(torch.cuda.get_device_capability)


def operator(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator with this signature where `implementation` runs, and return a function that calls it.

    The function calls `implementation` itself, which costs less Python, unless a compiler, a mode of PyTorch or a class of
    tensors must see the operator.

    `fake` returns outputs of the right shape and dtype, for the compiler. Autograd does not see through the operator: call
    it inside a `torch.autograd.Function`, or on tensors that need no gradient.

    The schema has no default values: the dispatcher drops trailing arguments that equal their defaults, and would call
    `implementation` without them.
    """
    assert "=" not in schema, f"the operator {schema.split('(')[0]} has a default value in its schema"
    _LIBRARY.define(schema)
    name = schema.split("(")[0]
    _LIBRARY.impl(name, implementation, "CUDA" if implementation in _on_gpu else EVERYWHERE)
    torch.library.register_fake(f"holdfast::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.holdfast, name).default

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_intercepted() or not PLAIN.issuperset(map(type, arguments)):
            return registered(*arguments)
        return implementation(*arguments)  # the dispatcher would do no more, and takes longer than a small kernel

    return call


def on_gpu(package: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of a package's triton.py, which is imported at the first call, because it needs Triton.

    It runs on the device of its first argument, a tensor: Triton launches kernels on the current device.
    """

    module = f"{package}.triton"

    def call(*arguments: Any) -> Any:
        with on_device_of(arguments[0]):
            return getattr(_import(module), name)(*arguments)

    _on_gpu.add(call)
    return call


def has_kernels(tensor: Tensor) -> bool:
    """Return whether Triton kernels can run on `tensor`: on a GPU, not empty, and not in a program being exported."""
    return HAS_TRITON and tensor.is_cuda and not is_exporting() and tensor.numel() > 0


def has_bf16_cores(tensor: Tensor) -> bool:
    """Return whether the GPU of `tensor` multiplies bfloat16 numbers in tensor cores."""
    if torch.compiler.is_compiling():  # a compiler cannot look into the cache
        return torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return _capability(tensor.get_device()) >= (8, 0)


_UNCHANGED: AbstractContextManager[object] = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches kernels on the current device."""
    # A layer asks some 15 times. Where the device is the current one already, which is usual, this saves 5 microseconds.
    if tensor.get_device() == torch.cuda.current_device():
        return _UNCHANGED
    return torch.cuda.device(tensor.device)


class Kernel:
    """A Triton kernel: `kernel[grid](*operands, **constants)` launches it."""

    def __init__(self, compiler: Any) -> None:
        self.compiler = compiler  # what `triton.jit` returns
        self._programs: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
        first = operands[0]
        while isinstance(first, tuple):
            first = first[0]
        device = first.get_device()
        kind = (device, *constants.values(), *_kind_of(operands))
        program = self._programs.get(kind)
        if program is not None and not has_hooks():
            _, run, function, metadata, last = program
            run(*(*grid, 1, 1)[:3], raw_stream(device), function, metadata, None, None, None, *operands, *last)
            return
        compiled = self.compiler[grid](*operands, **constants)
        # Triton's interpreter compiles nothing. On AMD's GPUs the size of a tensor matters too.
        if hasattr(compiled, "packed_metadata") and torch.version.hip is None:
            last = [constants[name] for name in self.compiler.arg_names[len(operands) :]]
            # While `compiled` is referenced, Triton does not unload it.
            self._programs[kind] = compiled, compiled.run, compiled.function, compiled.packed_metadata, last


def _kind_of(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what determines the version of a kernel besides its device and constants: Triton never has two for one kind.

    That is of a tensor its dtype and whether its address is aligned, and of an int, whether it is 1, aligned, and 32 bits
    long.
    """
    kind: list[Any] = []
    for each in operands:
        if type(each) is int:
            kind.append((each == 1) + 2 * (each % ALIGNMENT == 0) + 4 * (-(2**31) <= each < 2**31))
        elif type(each) is float:
            kind.append(float)
        elif isinstance(each, tuple):
            kind.append(_kind_of(each))
        else:
            kind.append(each.dtype if each.data_ptr() % ALIGNMENT == 0 else (each.dtype,))
    return tuple(kind)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Return this function as a kernel, compiled by Triton."""
    import triton

    return Kernel(triton.jit(function))


def has_hooks() -> bool:
    """Return whether someone wants to be called at every launch, as Triton's profiler does."""
    runtime = _import("triton.knobs").runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # someone has put a function in the place of the list of hooks
        return True


# Triton has functions for these two as well; they also work inside kernels, and take 7 microseconds outside.
def cdiv(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


_streams: dict[torch.device, torch.cuda.Stream] = {}
_running: dict[torch.device, list[Callable[[], object]]] = {}
Result = TypeVar("Result")


def on_side_stream(like: Tensor, work: Callable[[], Result]) -> Result:
    """Run `work`, on a GPU at the same time as what is launched next; elsewhere, and when compiling, right now.

    `work` launches kernels on the device of `like`, and may read the results of what was launched before. What it writes or
    returns may be read only after `wait_for_side_stream`, or by more work on the side stream.
    """
    if not like.is_cuda or torch.compiler.is_compiling():
        return work()
    if like.device not in _streams:
        _streams[like.device] = torch.cuda.Stream(like.device)
    stream = _streams[like.device]
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        result = work()
    _running.setdefault(like.device, []).append(work)  # keeps the memory of its inputs from being reused too early
    if isinstance(result, Tensor):
        result.record_stream(torch.cuda.current_stream(like.device))  # likewise the memory of its result
    return result


def wait_for_side_stream(like: Tensor) -> None:
    """Make everything launched after this call on the device of `like` wait for the work on the side stream."""
    if like.is_cuda and not torch.compiler.is_compiling() and _running.pop(like.device, None) is not None:
        torch.cuda.current_stream(like.device).wait_stream(_streams[like.device])


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
        gradients = torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)
        by_place = dict(zip(places, gradients, strict=True))
        return [by_place.get(at) for at in range(len(views))]


def input_gradients(
    ctx: Any,
    grad: Tensor,
    backward: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., Tensor],
    places: Sequence[int],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of a `torch.autograd.Function` that has saved its tensors, which come first.

    backward    an operator from (grad, *inputs, wants) to the gradients of the inputs at `places`; it need not compute those
                that `wants` excludes (see `like_wanted`)
    reference   the function of the inputs, in operations that autograd can differentiate
    """
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors
    if is_differentiated():
        return (*differentiable_gradients(reference, saved, needs, grad), *(None,) * (len(needs) - len(saved)))
    wants = [needs[place] for place in places]
    gradients: list[Tensor | None] = [None] * len(needs)
    for place, want, gradient in zip(places, wants, backward(grad, *saved, wants), strict=True):
        gradients[place] = gradient if want else None
    return tuple(gradients)


def like_wanted(grad: Tensor, operands: Sequence[Tensor | None], wants: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return memory for the gradients of `operands`; an empty tensor where an operand is None or its gradient not wanted."""
    return tuple(
        operand.new_empty(operand.shape) if want and operand is not None else grad.new_empty(0)
        for operand, want in zip(operands, wants, strict=True)
    )


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
    return _Refused.apply(grad, message)


# An operator rather than a Python test, so that a compiled layer asks each time it runs, not once when traced. It returns a
# bool on the device of its argument: False where checkpointing recomputes a forward that already counted.
is_first_forward = operator(
    "first_forward(Tensor like) -> Tensor",
    lambda like: torch.full((), not is_recomputing(), device=like.device),  # a fill: a copied scalar would wait for the GPU
    lambda like: torch.empty((), dtype=torch.bool, device=like.device),
)
_copy = operator("copy_of(Tensor state) -> Tensor", torch.clone, torch.empty_like)


def snapshot_for_backward(state: Tensor, training: bool = True) -> Tensor:
    """Return a copy of a buffer for the backward to read, taken now.

    A compiled backward would otherwise read the buffer itself, after later batches have changed it. In an exported program
    nothing changes the buffer outside of training, and the copy is a plain one.
    """
    if is_exporting() and not training:
        return state.clone()
    return _copy(state)
