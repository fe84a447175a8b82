"""One head of many, by an index that stays on the device. `index_select` does the same, three times as slowly on an H200."""

import torch
from torch import Tensor

from holdfast.ops.triton_support import HAS_TRITON, on_device_of


def take_head(rows: Tensor, head: Tensor) -> Tensor:
    """`rows (B,H,N,D)` of the head with index `head (1,)`: (B,N,D)."""
    out: Tensor = _take_head(rows, head)
    return out


@torch.library.custom_op("holdfast::take_head", mutates_args=())
def _take_head(rows: Tensor, head: Tensor) -> Tensor:
    if HAS_TRITON and rows.is_cuda and rows.numel() > 0:
        from holdfast.ops import head_kernels

        with on_device_of(rows):
            return head_kernels.take(rows, head)
    return rows.index_select(1, head).squeeze(1)


@_take_head.register_fake
def _(rows: Tensor, head: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], *rows.shape[2:])


@torch.library.custom_op("holdfast::put_head", mutates_args=())
def _put_head(rows: Tensor, head: Tensor, heads: int) -> Tensor:
    """(B,heads,N,D): `rows (B,N,D)` as that head, and 0 as the others."""
    if HAS_TRITON and rows.is_cuda and rows.numel() > 0:
        from holdfast.ops import head_kernels

        with on_device_of(rows):
            return head_kernels.put(rows, head, heads)
    out = rows.new_zeros(rows.shape[0], heads, *rows.shape[1:])
    return out.index_copy_(1, head, rows.unsqueeze(1))


@_put_head.register_fake
def _(rows: Tensor, head: Tensor, heads: int) -> Tensor:
    return rows.new_empty(rows.shape[0], heads, *rows.shape[1:])


def _save(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    rows, head = inputs
    ctx.heads = rows.shape[1]
    ctx.save_for_backward(head)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
    (head,) = ctx.saved_tensors
    return _put_head(grad.contiguous(), head, ctx.heads), None


_take_head.register_autograd(_backward, setup_context=_save)
