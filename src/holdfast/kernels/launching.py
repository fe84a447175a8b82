"""Registering operators, and launching their kernels.

Operators here are opaque to `torch.compile` and cheap to call. `torch.library.custom_op` with `register_autograd` costs
about 75 microseconds of Python for a forward and a backward, nearly what a router's kernels take. An operator without
autograd, inside a `torch.autograd.Function`, costs a third of that.
"""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None  # found without importing Triton, which is slow
EVERYWHERE = "CompositeExplicitAutograd"

PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list})  # types of arguments

_LIBRARY = torch.library.Library("holdfast", "FRAGMENT")


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing this call."""
    return bool(torch.compiler._is_exporting_flag)


# `torch.compile` of torch 2.11 replaces `torch.compiler.is_exporting()` by True, and would run what is meant for exported
# programs: all experts, and no kernel. This attribute makes it call the function instead.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operator(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, devices: str = "CUDA"
) -> Callable[..., Any]:
    """Register an operator with this signature on `devices`, and return a function that calls it.

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
    _LIBRARY.impl(name, implementation, devices)
    torch.library.register_fake(f"holdfast::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.holdfast, name).default

    def call(*arguments: Any) -> Any:
        if needs_operators() or not PLAIN.issuperset(map(type, arguments)):
            return registered(*arguments)
        return implementation(*arguments)  # the dispatcher would do no more, and takes longer than a small kernel

    return call


def is_intercepted() -> bool:
    """Return whether PyTorch must see every operator: for fake tensors, a flop counter, `torch.func`, batched gradients."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
    )


def needs_operators() -> bool:
    """Return whether a compiler, a mode or a transform must see operators instead of kernels."""
    return torch.compiler.is_compiling() or is_intercepted()


_BATCHED_GRADIENTS: Any = torch._C._parse_dispatch_key("VmapMode")  # `torch.autograd.grad(is_grads_batched=True)`


def has_kernels(tensor: Tensor) -> bool:
    """Return whether Triton kernels can run on `tensor`: on a GPU, not empty, and not in a program being exported."""
    return HAS_TRITON and tensor.is_cuda and not is_exporting() and tensor.numel() > 0


def has_bf16_cores(tensor: Tensor) -> bool:
    """Return whether the GPU of `tensor` multiplies bfloat16 numbers in tensor cores."""
    if torch.compiler.is_compiling():  # a compiler cannot look into the cache
        return torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return _capability(tensor.get_device()) >= (8, 0)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def kernels_of(package: str, name: str = "triton") -> Any:
    """Return a module of kernels of a package: imported at its first use, because it needs Triton."""
    return importlib.import_module(f"{package}.{name}")


_UNCHANGED: AbstractContextManager[object] = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches kernels on the current device."""
    # A layer asks some 15 times. Where the device is the current one already, which is usual, this saves 5 microseconds.
    if tensor.get_device() == torch.cuda.current_device():
        return _UNCHANGED
    return torch.cuda.device(tensor.device)


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
