"""A float32 matrix product that stays float32, whatever the process-wide precision switches say.

`torch.set_float32_matmul_precision("high")` turns float32 products into TF32 on a GPU, "medium" into bfloat16 even on a
CPU. Either moves router scores by far more than the gap between two experts, so routing opts out.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from holdfast.kernels import double_backward, split
from holdfast.kernels.operators import EVERYWHERE, operator


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Full float32 products inside, also in a backward that runs under autocast; the user's settings restored outside."""
    with ExitStack() as settings:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                settings.enter_context(torch.autocast(device, enabled=False))
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            if switch.fp32_precision not in ("ieee", "none"):
                settings.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
                switch.fp32_precision = "ieee"
        yield


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """`left (..., m,n)` times `right (..., n,p)`, in true float32; gradients in the dtypes of the inputs."""
    if torch.compiler.is_exporting():
        return left.float() @ right.float()
    out: Tensor = _MatMul.apply(left, right)  # type: ignore[no-untyped-call]
    return out


class _MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(left, right)
        return _matmul(left, right)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        left, right = ctx.saved_tensors
        grad_left = matmul_float32(grad, right.mT).to(left.dtype) if ctx.needs_input_grad[0] else None
        grad_right = matmul_float32(left.mT, grad).to(right.dtype) if ctx.needs_input_grad[1] else None
        return grad_left, grad_right


def _matmul_anywhere(left: Tensor, right: Tensor) -> Tensor:
    with ieee_float32():
        return left.float() @ right.float()


_matmul = operator(
    "matmul_float32(Tensor left, Tensor right) -> Tensor",
    _matmul_anywhere,
    lambda left, right: left.new_empty(*left.shape[:-1], right.shape[-1], dtype=torch.float32),
    devices=EVERYWHERE,
)


def linear_float32(tokens: Tensor, weight: Tensor) -> Tensor:
    """`tokens (..., d)` times `weight (n,d)` transposed, in true float32; the backward keeps tokens in their own dtype."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    in_parts = rows.dtype in split.HALVES and split.applies(rows, weight)  # of float32 rows neither is always faster
    out = split.linear(rows, weight) if in_parts else matmul_float32(rows, weight.t())
    return out.view(*tokens.shape[:-1], weight.shape[0])


@torch.library.custom_op("holdfast::scaled_matmul_float32", mutates_args=())
def _scaled_matmul(tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    with ieee_float32():
        return (tokens.float() * _token_scales(mixture, scales)) @ weight.float().t()


@_scaled_matmul.register_fake
def _(tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("holdfast::scaled_matmul_float32_backward", mutates_args=())
def _scaled_matmul_backward(
    grad: Tensor, tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    with ieee_float32():
        per_token = _token_scales(mixture, scales)
        grad_tokens = (grad @ weight.float()) * per_token
        grad_weight = grad.t() @ (tokens.float() * per_token)
    return grad_tokens.to(tokens.dtype), grad_weight.to(weight.dtype)


@_scaled_matmul_backward.register_fake
def _(grad: Tensor, tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(tokens.shape), weight.new_empty(weight.shape)


def _scaled_matmul_plain(tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """The same, for autograd to differentiate."""
    with ieee_float32():
        per_token = _token_scales(mixture, scales)
    return matmul_float32(tokens.float() * per_token, weight.t())


def _token_scales(mixture: Tensor, scales: Tensor) -> Tensor:
    """mixture (T,C) times scales (C,d); 1 for a token whose row is 0."""
    return mixture @ scales + (1 - mixture.sum(1, keepdim=True))


def _save_scaled(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward_scaled(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    if double_backward.is_wanted():
        found = double_backward.gradients(_scaled_matmul_plain, ctx.saved_tensors, (True, False, False, True), grad)
        return tuple(found)
    grad_tokens, grad_weight = _scaled_matmul_backward(grad, *ctx.saved_tensors)
    return grad_tokens, None, None, grad_weight


_scaled_matmul.register_autograd(_backward_scaled, setup_context=_save_scaled)


def scaled_linear_float32(tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """(x * m) weight^T with m = mixture scales, (T,C) times (C,d), or 1 where the mixture is 0; no gradient through m.

    The scaled tokens are made again in the backward instead of being kept.
    """
    rows, mixture, scales = tokens.reshape(-1, tokens.shape[-1]), mixture.detach(), scales.detach()
    if torch.compiler.is_exporting():
        out = (rows.float() * _token_scales(mixture, scales)) @ weight.float().t()
    else:
        out = _scaled_matmul(rows, mixture, scales, weight)
    return out.view(*tokens.shape[:-1], weight.shape[0])
