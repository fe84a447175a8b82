"""The activation `gelu_new` of GPT-2, Phi and T5, computed as transformers does.

    gelu_new(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

It is torch's `gelu` with `approximate="tanh"`, but transformers computes it operation by operation, and last bits differ. On
a CPU we do so too, so that copies of a dense network return its outputs bit for bit. In place, and in blocks that fit into a
cache, this takes about as long in float32 as torch's function. Gradients are those of torch's function.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.torch_internals import is_intercepted

FACTOR = math.sqrt(2.0 / math.pi)
BLOCK = 2**16  # numbers for each thread


def gelu_new(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); on a CPU, bit for bit what transformers returns.

    GPUs, compiled and exported programs and `torch.func` use torch's function.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_intercepted():
        return F.gelu(x, approximate="tanh")
    out: Tensor = _GeluNew.apply(x)
    return out


class _GeluNew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        most = BLOCK * torch.get_num_threads()
        if x.numel() <= most:
            return _write(x, out)
        width = x.shape[-1]
        rows = max(1, most // width)
        for part, into in zip(x.reshape(-1, width).split(rows), out.view(-1, width).split(rows), strict=True):
            _write(part, into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors, approximate="tanh")

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ops.aten.gelu_backward(tangent, *ctx.saved_tensors, approximate="tanh")


def _write(x: Tensor, out: Tensor) -> Tensor:
    return torch.pow(x, 3.0, out=out).mul_(0.044715).add_(x).mul_(FACTOR).tanh_().add_(1.0).mul_(x * 0.5)
