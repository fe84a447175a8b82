"""A float32 matrix product that stays float32, whatever the process-wide precision switches say.

`torch.set_float32_matmul_precision("high")` turns float32 products into TF32 on a GPU, "medium" into bfloat16 even on a
CPU. Either moves router scores by far more than the gap between two experts, so routing opts out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Full float32 products inside, the user's setting restored outside."""
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    if all(setting in ("ieee", "none") for setting in before):
        yield
        return
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, setting in zip(switches, before, strict=True):
            switch.fp32_precision = setting


@torch.library.custom_op("holdfast::matmul_float32", mutates_args=())
def _matmul(left: Tensor, right: Tensor) -> Tensor:
    with ieee_float32():
        return left.float() @ right.float()


@_matmul.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


def _save(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    left, right = ctx.saved_tensors
    return _matmul(grad, right.t()).to(left.dtype), _matmul(left.t(), grad).to(right.dtype)


_matmul.register_autograd(_backward, setup_context=_save)


def linear_float32(tokens: Tensor, weight: Tensor) -> Tensor:
    """`tokens (..., d)` times `weight (n,d)` transposed, in true float32; the backward keeps the tokens in their own dtype."""
    out: Tensor = _matmul(tokens.reshape(-1, tokens.shape[-1]), weight.t())
    return out.view(*tokens.shape[:-1], weight.shape[0])
