"""Matrix products that stay float32, whatever the process-wide precision switches say.

    tokens (T,d) and weight (n,d), bfloat16, float16 or float32; results float32, gradients in the dtypes of the inputs

`torch.set_float32_matmul_precision("high")` turns float32 products into TF32 on a GPU, "medium" into bfloat16 even on a
CPU. Either moves router scores by far more than the gap between two experts, so routing opts out. On a GPU with bfloat16
tensor cores, products of half-precision tokens are computed from bfloat16 parts (kernels/float32_parts.py): as exact as
float32, and without float32 copies of the tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from holdfast.kernels.operators import (
    has_bf16_cores,
    has_kernels,
    input_gradients,
    is_differentiated,
    like_wanted,
    on_gpu,
    operator,
)
from holdfast.kernels.torch_internals import is_exporting

HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (*HALF_DTYPES, torch.float32)
EXACT = ("ieee", "none")  # settings of PyTorch's switches for float32 products that round nothing


def ieee_float32() -> AbstractContextManager[object]:
    """Make products inside full float32, also in a backward that runs under autocast; restore the user's settings after."""
    is_set = (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch.backends.cuda.matmul.fp32_precision not in EXACT
        or torch.backends.mkldnn.matmul.fp32_precision not in EXACT  # type: ignore[attr-defined]
    )
    return _change_settings() if is_set else _UNCHANGED


_UNCHANGED: AbstractContextManager[object] = nullcontext()


@contextmanager
def _change_settings() -> Iterator[None]:
    with ExitStack() as settings:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                settings.enter_context(torch.autocast(device, enabled=False))
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            if switch.fp32_precision not in EXACT:
                settings.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
                switch.fp32_precision = "ieee"
        yield


def matmul_float32(left: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """Return `left (..., m,n)` times `right (..., n,p)`, in true float32; gradients in the dtypes of the inputs.

    transposed   `right` is given as (..., p,n)
    """
    if is_exporting():
        return left.float() @ (right.mT if transposed else right).float()
    if torch.is_grad_enabled():
        return _MatMul.apply(left, right, transposed)
    # In decoding, the 10 microseconds that autograd takes for a function are a third of the product.
    return _matmul(left, right.mT if transposed else right)


class _MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, transposed):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(left, right)
        ctx.transposed = transposed
        return _matmul(left, right.mT if transposed else right)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        left, right = ctx.saved_tensors
        product = matmul_float32 if is_differentiated() else _matmul
        grad_left = grad_right = None
        if ctx.needs_input_grad[0]:
            grad_left = product(grad, right if ctx.transposed else right.mT).to(left.dtype)
        if ctx.needs_input_grad[1]:
            factors = (grad.mT, left) if ctx.transposed else (left.mT, grad)
            grad_right = product(*factors).to(right.dtype)
        return grad_left, grad_right, None


def _matmul_anywhere(left: Tensor, right: Tensor) -> Tensor:
    with ieee_float32():
        return left.float() @ right.float()


_matmul = operator(
    "matmul_float32(Tensor left, Tensor right) -> Tensor",
    _matmul_anywhere,
    lambda left, right: left.new_empty(*left.shape[:-1], right.shape[-1], dtype=torch.float32),
)


def linear_float32(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return `tokens (..., d)` times `weight (n,d)` transposed, in true float32; tokens are saved in their own dtype."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    if rows.dtype in HALF_DTYPES and has_linear_kernel(rows, weight):  # for float32 rows the kernel is not always faster
        run = _Linear.apply if torch.is_grad_enabled() else _linear  # without what autograd adds to a call, as above
        out: Tensor = run(rows.contiguous(), weight, None, None, None, None)
    else:
        out = matmul_float32(rows, weight, transposed=True)
    return out.view(*tokens.shape[:-1], weight.shape[0])


class _ScaledMatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, mixture, scales, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(tokens, mixture, scales, weight)
        return _matmul(tokens.float() * _token_scales(mixture, scales), weight.mT)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        tokens, mixture, scales, weight = ctx.saved_tensors
        product = matmul_float32 if is_differentiated() else _matmul
        per_token = _token_scales(mixture, scales)
        grad_tokens = (product(grad, weight) * per_token).to(tokens.dtype)
        return grad_tokens, None, None, product(grad.mT, tokens.float() * per_token).to(weight.dtype)


def _token_scales(mixture: Tensor, scales: Tensor) -> Tensor:
    """Return mixture (T,C) times scales (C,d), neither of which gets a gradient; 1 for a token whose mixture is 0."""
    with torch.no_grad():
        return matmul_float32(mixture, scales) + (1 - mixture.sum(1, keepdim=True))


def scaled_linear_float32(tokens: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """Return (x * m) weight^T with m = mixture scales, (T,C) times (C,d), or 1 where the mixture is 0.

    No gradient flows through m. The backward computes the scaled tokens again instead of keeping them.
    """
    rows, mixture, scales = tokens.reshape(-1, tokens.shape[-1]), mixture.detach(), scales.detach()
    if is_exporting():
        out = matmul_float32(rows.float() * _token_scales(mixture, scales), weight, transposed=True)
    else:
        out = _ScaledMatMul.apply(rows, mixture, scales, weight)  # type: ignore[no-untyped-call]
    return out.view(*tokens.shape[:-1], weight.shape[0])


def has_linear_kernel(tokens: Tensor, weight: Tensor) -> bool:
    """Return whether there is a kernel for these: on a GPU that has bfloat16 tensor cores."""
    return tokens.dtype in DTYPES and weight.dtype in DTYPES and has_kernels(tokens) and has_bf16_cores(tokens)


def scaled_tiles_linear(
    tokens: Tensor, weight: Tensor, order: Tensor, owners: Tensor, bounds: Tensor, scales: Tensor
) -> Tensor:
    """Return (x * m) weight^T with m a row of `scales (C+1,d)`, the same for all tokens of a tile; no gradient through m.

    For tokens in tiles as `clusters.TokenTiles` has them, where `has_linear_kernel`.
    """
    return _Linear.apply(tokens.contiguous(), weight, order, owners, bounds, scales)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)
        return _linear(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return input_gradients(ctx, grad, _linear_backward, _linear_reference, places=(0, 1))


def _linear_reference(tokens: Tensor, weight: Tensor, *tiles_and_scales: Tensor | None) -> Tensor:
    """Compute the product in operations that autograd can differentiate."""
    rows, (order, owners, _, scales) = tokens.float(), tiles_and_scales
    if order is not None and owners is not None and scales is not None:
        count = tokens.shape[0]
        cluster = owners.long().repeat_interleave(order.shape[0] // owners.shape[0])
        places = order.long().where(cluster >= 0, count)  # the order of an unused tile is uninitialised
        cluster_of = cluster.new_zeros(count + 1).scatter(0, places, cluster.clamp_min(0))[:count]
        rows = rows * scales[cluster_of]
    return matmul_float32(rows, weight.t())


_CLUSTERS = "Tensor? order, Tensor? owners, Tensor? bounds, Tensor? scales"
_linear = operator(
    f"split_linear(Tensor tokens, Tensor weight, {_CLUSTERS}) -> Tensor",
    on_gpu(__name__, "linear"),
    lambda tokens, weight, *_: tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=torch.float32),
)
_linear_backward = operator(
    f"split_linear_backward(Tensor grad, Tensor tokens, Tensor weight, {_CLUSTERS}, bool[] wants) -> (Tensor, Tensor)",
    on_gpu(__name__, "linear_backward"),
    lambda grad, tokens, weight, *rest: like_wanted(grad, (tokens, weight), rest[-1]),
)
