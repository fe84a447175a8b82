"""Experts spread over processes: each process holds some of them, and tokens go to the processes of their experts.

    T tokens, R processes of a group; a token has one row for each process it goes to, sorted by process, then by token

A token goes once to every process that has one of its experts, with its weights, and returns as the sum over them. What a
process receives is an ordinary batch for its own experts, in which the slots of others are unused.

Sending is a gather and an exchange, returning an exchange and a sum over each token's rows; each is the other's backward.
Sums are taken in a fixed order, so that nothing adds with atomics.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.kernels.backward import refuse_second_derivatives
from holdfast.kernels.dispatch import combine_rows, gather_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


NO_SECOND_DERIVATIVES = (
    "experts that are spread over processes do not support second derivatives of their weights; keep all experts on every "
    "process (do not call shard_experts), or take first derivatives only."
)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens (T,d), experts (T,K), weights (T,K) -> (T,d)


class Owners:
    """Who holds which experts: equal parts along the last dimension of a mesh; along the first of two, copies."""

    def __init__(self, mesh: "DeviceMesh", experts: int) -> None:
        assert experts % mesh.size(-1) == 0
        self.mesh, self.experts, self.each = mesh, experts, experts // mesh.size(-1)

    def take(self, module: nn.Module) -> None:
        """Leave `module` this process's part of its experts' parameters, as DTensors; the first process's values count."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), self.mesh, placements)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def own(self, parameter: Any) -> Tensor:
        """This process's part, as a plain tensor."""
        out: Tensor = _Own.apply(parameter.to_local(), self.mesh)
        return out

    def run(self, run: Run, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `run` with all experts would, by way of the processes that have them. Every process of the mesh calls it."""
        last = self.mesh.ndim - 1
        owner, me = experts // self.each, self.mesh.get_local_rank(last)
        wanted = (owner.unsqueeze(2) == torch.arange(self.mesh.size(last), device=experts.device)).any(1)
        exchange = plan_exchange(wanted, self.mesh.get_group(last))
        arrived = send_rows(experts, exchange)
        here = arrived // self.each == me
        arrived = (arrived - me * self.each).where(here, self.each)
        outputs = run(send_rows(tokens, exchange), arrived, send_rows(weights, exchange).where(here, 0.0))
        return return_rows(outputs, exchange)


class _Own(torch.autograd.Function):
    """Identity. The gradient that arrives is the sum over the losses of all processes that sent tokens; what a process that
    saw the whole batch would have is their mean, as DDP and FSDP2 take it of all other parameters."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: "DeviceMesh") -> Tensor:
        ctx.mesh = mesh
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        mesh = ctx.mesh
        grad = refuse_second_derivatives(grad, NO_SECOND_DERIVATIVES) / mesh.size()
        if mesh.ndim > 1:
            dist.all_reduce(grad, group=mesh.get_group(0))
        return grad, None


class RowExchange(NamedTuple):
    """Which tokens go to which process; planned by all processes of the group together."""

    order: Tensor  # (S,) the place of each row that is sent, counted through all of (T,R)
    places: Tensor  # (T,R) the row of each token for each process; S where it does not go there
    sent: list[int]  # how many rows go to each process
    received: list[int]  # and come from each
    group: dist.ProcessGroup


def plan_exchange(wanted: Tensor, group: dist.ProcessGroup) -> RowExchange:
    """Plan the exchange for `wanted (T,R)`, True where a token goes to a process.

    This waits for the device once, to learn how many rows come.
    """
    sent = wanted.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_each, from_each = torch.stack([sent, received]).tolist()
    by_process = wanted.t().reshape(-1)
    going = by_process.nonzero().squeeze(1)
    tokens, processes = max(wanted.shape[0], 1), wanted.shape[1]
    order = going % tokens * processes + going // tokens
    places = (by_process.cumsum(0) - 1).where(by_process, sum(to_each)).view(wanted.t().shape).t()
    return RowExchange(order, places.contiguous(), to_each, from_each, group)


def send_rows(values: Tensor, exchange: RowExchange) -> Tensor:
    """Send `values (T,n)` of this process's tokens; return those (S',n) that arrive, from each process in turn."""
    out: Tensor = _SendRows.apply(values, exchange)
    return out


def return_rows(values: Tensor, exchange: RowExchange) -> Tensor:
    """Send `values (S',n)` of the tokens that arrived back; return (T,n), each token's sum over the processes it went to."""
    out: Tensor = _ReturnRows.apply(values, exchange)
    return out


def _send(values: Tensor, exchange: RowExchange) -> Tensor:
    used = torch.full((), sum(exchange.sent), device=values.device)
    return _all_to_all(
        gather_rows(values.contiguous(), exchange.order, exchange.places, used),
        exchange.received,
        exchange.sent,
        exchange.group,
    )


def _return(values: Tensor, exchange: RowExchange) -> Tensor:
    used = torch.full((), sum(exchange.sent), device=values.device)
    return combine_rows(
        _all_to_all(values.contiguous(), exchange.sent, exchange.received, exchange.group), exchange.places, None, used
    )


def _all_to_all(values: Tensor, coming: list[int], going: list[int], group: dist.ProcessGroup) -> Tensor:
    out = values.new_empty(sum(coming), *values.shape[1:])
    dist.all_to_all_single(out, values, coming, going, group=group)
    return out


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _send(values, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return return_rows(grad, ctx.exchange), None


class _ReturnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _return(values, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return send_rows(grad, ctx.exchange), None
