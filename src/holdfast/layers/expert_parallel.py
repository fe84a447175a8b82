"""Expert parallelism: experts are sharded over ranks, and tokens are sent to the ranks that have their experts.

    T tokens, R ranks of a group; a token has one row for each rank it is sent to; rows are sorted by rank, then by token

A token is sent once to every rank that has one of its experts, with its weights. The outputs are returned and added. What a
rank receives is an ordinary batch for its own experts, in which the slots of other ranks' experts are unused.

Sending is a gather and an exchange; returning is an exchange and a sum over the rows of each token. Each is the backward of
the other. Sums are taken in a fixed order, without atomic additions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.kernels.grouped import combine_rows, gather_rows
from holdfast.kernels.operators import refuse_second_derivatives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


NO_SECOND_DERIVATIVES = (
    "sharded experts do not support second derivatives of their weights; keep all experts on every rank (do not call "
    "shard_experts), or take first derivatives only."
)
# tokens (T,d), experts (T,K), weights (T,K), the number of slots that have an expert -> (T,d)
Run = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class ExpertShards:
    """Which rank has which experts: equal shards along the last dimension of a mesh, replicas along the first of two."""

    def __init__(self, mesh: "DeviceMesh", experts: int) -> None:
        assert experts % mesh.size(-1) == 0
        self.mesh, self.experts, self.each = mesh, experts, experts // mesh.size(-1)

    def shard(self, module: nn.Module) -> None:
        """Replace the parameters of `module` by this rank's shards, as DTensors, with the values of the first rank."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), self.mesh, placements)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def local_part(self, parameter: Any) -> Tensor:
        """Return this rank's shard of a DTensor, as a plain tensor."""
        return _MeanGradient.apply(parameter.to_local(), self.mesh)

    @property
    def own(self) -> slice:
        """Which experts are on this rank."""
        first = self.mesh.get_local_rank(self.mesh.ndim - 1) * self.each
        return slice(first, first + self.each)

    def run(self, run: Run, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return what `run` would return with all experts, by running it on the ranks that have them.

        Every rank of the mesh must call it.
        """
        last = self.mesh.ndim - 1
        owner, rank = experts // self.each, self.mesh.get_local_rank(last)
        slots = (owner.unsqueeze(2) == torch.arange(self.mesh.size(last), device=experts.device)).sum(1)
        exchange = plan_exchange(slots, self.mesh.get_group(last))
        received = send_rows(experts, exchange)
        here = received // self.each == rank
        local = (received - rank * self.each).where(here, self.each)
        weights = send_rows(weights, exchange).where(here, 0.0)
        outputs = run(send_rows(tokens, exchange), local, weights, exchange.slots)
        return return_rows(outputs, exchange)


class _MeanGradient(torch.autograd.Function):
    """The identity, whose gradient is divided by the number of ranks and added over replicas.

    The incoming gradient is the sum over the losses of all ranks that sent tokens. The gradient of the whole batch is their
    mean, which DDP and FSDP2 take for all other parameters.
    """

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
    """Which tokens are sent to which rank. All ranks of the group plan it together."""

    order: Tensor  # (S,) the flat index in (T,R) of each row that is sent
    places: Tensor  # (T,R) the row of each token for each rank; S if it is not sent there
    sent: list[int]  # the number of rows sent to each rank
    received: list[int]  # the number of rows received from each rank
    slots: int  # how many slots of the received rows have an expert of this rank
    group: dist.ProcessGroup


def plan_exchange(slots: Tensor, group: dist.ProcessGroup) -> RowExchange:
    """Plan the exchange for `slots (T,R)`: how many experts of each rank a token has. It is sent to a rank if it has any.

    This synchronises with the device once, to read the numbers of rows and slots.
    """
    wanted = slots > 0
    sent = torch.stack([wanted.sum(0), slots.sum(0)], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    (to_each, _), (from_each, slots_from_each) = torch.stack([sent, received]).transpose(1, 2).tolist()
    by_rank = wanted.t().reshape(-1)
    going = by_rank.nonzero().squeeze(1)
    tokens, ranks = max(wanted.shape[0], 1), wanted.shape[1]
    order = going % tokens * ranks + going // tokens
    places = (by_rank.cumsum(0) - 1).where(by_rank, sum(to_each)).view(wanted.t().shape).t()
    return RowExchange(order, places.contiguous(), to_each, from_each, sum(slots_from_each), group)


def send_rows(values: Tensor, exchange: RowExchange) -> Tensor:
    """Send `values (T,n)` of this rank's tokens; return the received rows (S',n), sorted by the rank they come from."""
    return _Exchange.apply(values, exchange, True)


def return_rows(values: Tensor, exchange: RowExchange) -> Tensor:
    """Return `values (S',n)` of received rows to their ranks; return (T,n), the sum over the rows of each token."""
    return _Exchange.apply(values, exchange, False)


class _Exchange(torch.autograd.Function):
    """`send_rows` and `return_rows`: each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: RowExchange, sends: bool) -> Tensor:
        ctx.exchange, ctx.sends = exchange, sends
        order, places, sent, received, _, group = exchange
        used = torch.full((), sum(sent), device=values.device)
        coming, going = (received, sent) if sends else (sent, received)
        rows = gather_rows(values.contiguous(), order, places, used) if sends else values.contiguous()
        out = rows.new_empty(sum(coming), *rows.shape[1:])
        dist.all_to_all_single(out, rows, coming, going, group=group)
        return out if sends else combine_rows(out, places, None, used)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return (return_rows if ctx.sends else send_rows)(grad, ctx.exchange), None, None
