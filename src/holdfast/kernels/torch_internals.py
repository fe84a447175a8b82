"""Private interfaces of PyTorch: all that the package uses, with the reason, in one place.

Each works from torch 2.11 on, the oldest version that is supported, unless its comment names a later one.
tests/kernels/test_torch_internals.py fails if a version of torch changes one of them.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

Function = TypeVar("Function", bound=Callable[..., Any])

# `torch.autograd.grad(is_grads_batched=True)` and `vectorize=True` run a backward under this key.
_BATCHED_GRADIENTS: Any = torch._C._parse_dispatch_key("VmapMode")


def constant_when_compiled(function: Function) -> Function:
    """Make `torch.compile` call this function while it traces, and take the result for a constant.

    `torch.compiler.assume_constant_result` does the same, but imports all of Dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def is_exporting() -> bool:
    """Return whether `torch.export` is tracing this call.

    `torch.compile` of torch 2.11 replaces the public `torch.compiler.is_exporting()` by True, and would run what is meant
    for exported programs: all experts, and no kernel.
    """
    return bool(torch.compiler._is_exporting_flag)


@constant_when_compiled
def is_exporting_to_onnx() -> bool:
    """Return whether `torch.onnx.export` is running. It may run Dynamo, which would replace the public function by False."""
    return torch.onnx.is_in_onnx_export()


def is_intercepted() -> bool:
    """Return whether PyTorch must see every operator: for fake tensors, a flop counter, `torch.func`, batched gradients.

    There is no public way to ask. An operator that skips the dispatcher needs to know.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
    )


def raw_stream(device: int) -> int:
    """Return the handle of a GPU's current stream. The public `torch.cuda.current_stream` builds an object each time."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]


def running_backward() -> int:
    """Return a number of the backward that this thread runs; -1 if it runs none. There is no public way to ask."""
    return torch._C._current_graph_task_id()  # type: ignore[attr-defined]


def is_recomputing() -> bool:
    """Return whether a backward is running, in which checkpointing runs a forward again."""
    return running_backward() != -1


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
        return torch._C._will_engine_execute_node(leaf)  # type: ignore[attr-defined]
    except RuntimeError:  # torch does not answer for a leaf whose gradient `torch.autograd.grad` returns
        return False


def keep_address(rows: Tensor) -> None:
    """Tell the compiler that this tensor stays where it is, so that a CUDA graph may write to it, as to a static cache."""
    torch._dynamo.mark_static_address(rows)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail on the device if the `condition` is False. `torch._assert` would wait for the GPU to read it."""
    torch._assert_async(condition, message)


def register_dataclass(kind: type, name: str) -> None:
    """Let `torch.export` export a function that returns this dataclass.

    The public `torch.export.register_dataclass` does not say how it imports a class when it loads a saved program.
    """
    _pytree.register_dataclass(kind, serialized_type_name=name)
