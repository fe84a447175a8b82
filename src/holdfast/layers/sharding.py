"""Experts spread over processes: each holds some of them, and tokens travel to the experts they chose.

A token goes once to every process that has one of its experts, with its weights, and comes home as the sum over them. What a
process receives is an ordinary batch for its own experts, in which the slots of others are unused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.kernels import double_backward
from holdfast.kernels.exchange import come_home, go_out, journey

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
        way = journey(wanted, self.mesh.get_group(last))
        came = go_out(experts, way)
        here = came // self.each == me
        came = (came - me * self.each).where(here, self.each)
        return come_home(run(go_out(tokens, way), came, go_out(weights, way).where(here, 0.0)), way)


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
        grad = double_backward.refuse(grad, NO_SECOND_DERIVATIVES) / mesh.size()
        if mesh.ndim > 1:
            dist.all_reduce(grad, group=mesh.get_group(0))
        return grad, None
