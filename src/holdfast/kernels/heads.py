"""One head of many, by an index that stays on the device, of several tensors at a time: on a GPU in one launch for all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels import double_backward
from holdfast.kernels.operators import EVERYWHERE, operator
from holdfast.kernels.triton_support import has_kernels, on_device_of


def take_heads(rows: Sequence[Tensor], head: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Of each `rows (B, its heads, N, D)`: (B,N,D), the head that head number `head (1,)` of `heads` reads.

    Where there are fewer than `heads`, each is read by as many neighbours.
    """
    if torch.compiler.is_exporting():
        return tuple(_index_heads(rows, head, heads))
    taken: tuple[Tensor, ...] = _TakeHeads.apply(head, heads, *rows)  # type: ignore[no-untyped-call]
    return taken


class _TakeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, heads, *rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(head)
        ctx.heads, ctx.own = heads, [each.shape[1] for each in rows]
        return tuple(_take_heads(rows, head, heads))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        (head,) = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        put_head = _place_head if double_backward.is_wanted() else _put_head
        put = [
            put_head(grad.contiguous(), head, ctx.heads, own) if need else None
            for grad, own, need in zip(grads, ctx.own, needs, strict=True)
        ]
        return None, None, *put


def _take_heads_anywhere(rows: list[Tensor], head: Tensor, heads: int) -> list[Tensor]:
    if all(has_kernels(each) for each in rows):
        from holdfast.kernels import head_kernels

        with on_device_of(head):
            return head_kernels.take(rows, head, heads)
    return _index_heads(rows, head, heads)


def _index_heads(rows: Sequence[Tensor], head: Tensor, heads: int) -> list[Tensor]:
    return [each.index_select(1, head * each.shape[1] // heads).squeeze(1) for each in rows]


def _put_head_anywhere(rows: Tensor, head: Tensor, heads: int, own: int) -> Tensor:
    """(B,own,N,D): `rows (B,N,D)` as the head that number `head` of `heads` reads, and 0 as the others."""
    if has_kernels(rows):
        from holdfast.kernels import head_kernels

        with on_device_of(rows):
            return head_kernels.put(rows, head, heads, own)
    return _place_head(rows, head, heads, own)


def _place_head(rows: Tensor, head: Tensor, heads: int, own: int) -> Tensor:
    out = rows.new_zeros(rows.shape[0], own, *rows.shape[1:])
    return out.index_copy(1, head * own // heads, rows.unsqueeze(1))


_take_heads = operator(
    "take_heads(Tensor[] rows, Tensor head, int heads) -> Tensor[]",
    _take_heads_anywhere,
    lambda rows, head, heads: [each.new_empty(each.shape[0], *each.shape[2:]) for each in rows],
    devices=EVERYWHERE,
)
_put_head = operator(
    "put_head(Tensor rows, Tensor head, int heads, int own) -> Tensor",
    _put_head_anywhere,
    lambda rows, head, heads, own: rows.new_empty(rows.shape[0], own, *rows.shape[1:]),
    devices=EVERYWHERE,
)
