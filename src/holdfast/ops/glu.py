"""Gated activations, `activation(gate) * up`, on rows that hold both halves side by side.

A named activation on a GPU is one kernel forward and one backward; everything else is plain torch, which inductor fuses.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.ops.triton_support import HAS_TRITON, on_device_of

FUSED = ("silu", "gelu", "gelu_tanh", "relu")


def glu(gate_up: Tensor, used: Tensor, name: str | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """`gate_up (R,2H) -> (R,H)`. `name` is the activation's name if it has one; rows past `used` are undefined."""
    if name in FUSED and HAS_TRITON and gate_up.is_cuda and gate_up.numel() > 0:
        out: Tensor = _glu(gate_up, used, name)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


@torch.library.custom_op("holdfast::glu", mutates_args=())
def _glu(gate_up: Tensor, used: Tensor, name: str) -> Tensor:
    from holdfast.ops import kernels

    with on_device_of(gate_up):
        return kernels.glu(gate_up, used, name)


@_glu.register_fake
def _(gate_up: Tensor, used: Tensor, name: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("holdfast::glu_backward", mutates_args=())
def _glu_backward(grad: Tensor, gate_up: Tensor, used: Tensor, name: str) -> Tensor:
    from holdfast.ops import kernels

    with on_device_of(gate_up):
        return kernels.glu_backward(grad.contiguous(), gate_up, used, name)


@_glu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, used: Tensor, name: str) -> Tensor:
    return torch.empty_like(gate_up)


def _save(ctx, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    gate_up, used, ctx.name = inputs
    ctx.save_for_backward(gate_up, used)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    gate_up, used = ctx.saved_tensors
    return _glu_backward(grad, gate_up, used, ctx.name), None, None


_glu.register_autograd(_backward, setup_context=_save)
