"""Rows that go to other processes and come back: the transport of expert parallelism.

T tokens, R processes of a group; a token has one row for each process it goes to, sorted by process, then by token

Going out is a gather and an exchange, coming home an exchange and a sum over each token's rows; each is the other's
backward. Sums are gathers too, in a fixed order, so that nothing adds with atomics.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.kernels import rows


class Journey(NamedTuple):
    """Which tokens go where; made on all processes of the group together."""

    order: Tensor  # (S,) the place of each row sent, counted through all of them
    places: Tensor  # (T,R) the row of each token for each process; S where it does not go there
    sent: list[int]  # how many rows to each process
    received: list[int]  # and from each
    group: dist.ProcessGroup


def journey(wanted: Tensor, group: dist.ProcessGroup) -> Journey:
    """For `wanted (T,R)`, True where a token goes to a process. Waits for the device once, to learn how many rows come."""
    sent = wanted.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_each, from_each = torch.stack([sent, received]).tolist()
    by_process = wanted.t().reshape(-1)
    going = by_process.nonzero().squeeze(1)
    tokens, processes = max(wanted.shape[0], 1), wanted.shape[1]
    order = going % tokens * processes + going // tokens
    places = (by_process.cumsum(0) - 1).where(by_process, sum(to_each)).view(wanted.t().shape).t()
    return Journey(order, places.contiguous(), to_each, from_each, group)


def go_out(values: Tensor, way: Journey) -> Tensor:
    """`values (T,n)` of the tokens at hand to those (S',n) that came here, from each process in turn."""
    out: Tensor = _GoOut.apply(values, way)
    return out


def come_home(values: Tensor, way: Journey) -> Tensor:
    """`values (S',n)` of the tokens that came here, back to where those are from: (T,n), summed over where each was."""
    out: Tensor = _ComeHome.apply(values, way)
    return out


def _outwards(values: Tensor, way: Journey) -> Tensor:
    used = torch.full((), sum(way.sent), device=values.device)
    return _exchanged(rows.gather(values.contiguous(), way.order, way.places, used), way.received, way.sent, way.group)


def _homewards(values: Tensor, way: Journey) -> Tensor:
    used = torch.full((), sum(way.sent), device=values.device)
    return rows.combine(_exchanged(values.contiguous(), way.sent, way.received, way.group), way.places, None, used)


def _exchanged(values: Tensor, coming: list[int], going: list[int], group: dist.ProcessGroup) -> Tensor:
    out = values.new_empty(sum(coming), *values.shape[1:])
    dist.all_to_all_single(out, values, coming, going, group=group)
    return out


class _GoOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, way: Journey) -> Tensor:
        ctx.way = way
        return _outwards(values, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return come_home(grad, ctx.way), None


class _ComeHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, way: Journey) -> Tensor:
        ctx.way = way
        return _homewards(values, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return go_out(grad, ctx.way), None
