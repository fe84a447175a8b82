"""Expert parallelism: the experts of a model spread over processes."""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from holdfast.hub.backends import is_known, is_replaced, runs_ours
from holdfast.hub.sites import is_moe, sites
from holdfast.layers import Experts
from holdfast.layers.sharding import Owners
from holdfast.routing.state import several_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(model: Any, mesh: "DeviceMesh") -> Any:
    """Spread the experts of every MoE layer over the processes of `mesh`, in place: each holds an equal part of them.

    A mesh of one dimension holds each expert once. Of two, the last spreads experts, and along the first are copies, whose
    gradients are averaged. Each process runs its own batch, and tokens travel to the experts they chose. The rest of the
    model is for DDP or FSDP2, afterwards; DDP leaves the experts alone by itself, `fully_shard` takes `ignored_params`.

    The experts' parameters keep their names and become DTensors, which torch.distributed.checkpoint and `holdfast.save`
    understand. From now on every process runs the same number of forwards, in evaluation too.
    """
    from torch.nn.parallel import DistributedDataParallel

    _require_processes(model, mesh)
    found = _experts(model)
    for name, experts in found.items():
        _require_shardable(name, experts, mesh)
    ignored = []
    for name, experts in found.items():
        experts.owners = Owners(mesh, next(experts.parameters()).shape[0])
        experts.owners.take(experts)
        ignored += [f"{name}.{parameter}".lstrip(".") for parameter, _ in experts.named_parameters(recurse=False)]
        if not isinstance(experts, Experts):
            runs_ours(experts, ragged=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model


def _experts(model: nn.Module) -> dict[str, Any]:
    """By name: ours, wherever they are, and those of a family we know."""
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    for site in sites(model) if is_moe(model) else []:
        if site.family is not None:
            found[f"{site.name}.{site.family.experts}"] = site.experts
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts to shard; sparsify makes some, and an MoE must be of a family that "
            "reroute knows."
        )
    return found


def _require_processes(model: nn.Module, mesh: "DeviceMesh") -> None:
    if not several_ranks():
        raise ValueError("there is no process group: start with torchrun and call torch.distributed.init_process_group.")
    if hasattr(model, "module") and isinstance(model.module, nn.Module):
        raise ValueError(f"{type(model).__name__} wraps the model; shard the experts of the one inside, before wrapping.")
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions; experts are spread along one, or copied and spread along two."
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh holds {mesh.size()} of {dist.get_world_size()} processes; give one of them all, with a first "
            "dimension for copies where experts are spread over fewer."
        )


def _require_shardable(name: str, experts: Any, mesh: "DeviceMesh") -> None:
    from torch.distributed.tensor import DTensor

    if getattr(experts, "owners", None) is not None:
        raise ValueError(f"{name}: these experts are spread over processes already.")
    if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
        raise ValueError(f"{name}: its weights are sharded already; call shard_experts before fully_shard.")
    if not isinstance(experts, Experts) and not is_known(experts):
        raise ValueError(f"{name}: {type(experts).__name__} of this transformers cannot be spread; update transformers.")
    if is_replaced(experts):
        raise ValueError(f"{name}: another library has replaced the forward of these experts; load the model without that.")
    weight = next(experts.parameters())
    if weight.device.type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"{name}: its weights are on {weight.device.type}, the mesh is of {mesh.device_type}; move the model first."
        )
    count, ranks = weight.shape[0], mesh.size(-1)
    if count % ranks:
        raise ValueError(
            f"{name}: {count} experts do not part among {ranks} processes; choose a number that divides {count}."
        )
