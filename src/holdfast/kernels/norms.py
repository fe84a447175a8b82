"""|heads W v + bias|^2 of many values v, without the vectors themselves, which are as wide as the model.

    v (T,D), W (d,D) given as `across (D,d)`, bias (d,) or None

By W^T W, which is D x D; on a GPU, for half-precision numbers, by a kernel that squares the vectors as it makes them.
"""

import torch
from torch import Tensor

from holdfast.kernels.operators import EVERYWHERE, operator
from holdfast.kernels.precision import linear_float32, matmul_float32
from holdfast.kernels.triton_support import has_kernels, on_device_of

HALVES = (torch.bfloat16, torch.float16)
WIDEST = 256  # what a tile of the kernel holds of v


def projected_norms(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """(T,), float32; gradients in the dtypes of the inputs."""
    if _on_kernels(value, across):
        out: Tensor = _Norms.apply(value, across, bias, heads)  # type: ignore[no-untyped-call]
        return out
    return _by_square(value, across, bias, heads)


def _by_square(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    products = heads**2 * linear_float32(value, linear_float32(across, across))
    if bias is not None:
        products = products + 2 * heads * linear_float32(bias.unsqueeze(0), across)
    norms = (products * value).sum(-1)
    return norms if bias is None else norms + bias.float().square().sum()


def _on_kernels(value: Tensor, across: Tensor) -> bool:
    return value.dtype in HALVES and value.dtype == across.dtype and value.shape[1] <= WIDEST and has_kernels(value)


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, across, bias, heads):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(value, across, bias)
        ctx.heads = heads
        return _norms(value, across, bias, heads)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """With o = heads W v + bias: the gradients of v, W and bias are 2 g heads W^T o, 2 g heads o v^T and 2 g o."""
        value, across, bias = ctx.saved_tensors
        wants_value, wants_across, wants_bias, _ = ctx.needs_input_grad
        of_value = of_across = of_bias = None
        weighted = 2 * ctx.heads * grad.unsqueeze(1) * value.float()  # (T,D)
        if wants_value:
            seen = ctx.heads * linear_float32(value, linear_float32(across, across))
            seen = seen if bias is None else seen + linear_float32(bias.unsqueeze(0), across)
            of_value = (2 * ctx.heads * grad.unsqueeze(1) * seen).to(value.dtype)
        if wants_across:
            of_across = matmul_float32(ctx.heads * matmul_float32(weighted.t(), value), across)
            of_across = of_across if bias is None else of_across + weighted.sum(0).unsqueeze(1) * bias.float()
            of_across = of_across.to(across.dtype)
        if wants_bias:
            of_bias = matmul_float32(weighted.sum(0).unsqueeze(0), across).squeeze(0) + 2 * grad.sum() * bias.float()
            of_bias = of_bias.to(bias.dtype)
        return of_value, of_across, of_bias, None


def _norms_anywhere(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    if not _on_kernels(value, across):
        return _by_square(value, across, bias, heads)
    from holdfast.kernels import norm_kernels

    with on_device_of(value):
        return norm_kernels.norms(value, across, bias, heads)


_norms = operator(
    "projected_norms(Tensor value, Tensor across, Tensor? bias, int heads) -> Tensor",
    _norms_anywhere,
    lambda value, *_: value.new_empty(value.shape[0], dtype=torch.float32),
    devices=EVERYWHERE,
)
