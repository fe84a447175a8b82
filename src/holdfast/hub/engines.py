"""Models whose weights are spread over processes, made whole for writing: every process takes part, the first one writes.

Expert parallelism: the experts of a model spread over processes.

What a training loop tells the routers of a model: how far it has come, how it scales its loss, what calibrates them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from holdfast.hub.install import Wiring, wiring
from holdfast.hub.layers import is_moe, sites
from holdfast.hub.replacements import is_known, is_replaced, runs_ours
from holdfast.layers import Experts
from holdfast.layers.expert_parallel import Owners
from holdfast.routing import Router
from holdfast.routing.state import several_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_spread(model: nn.Module) -> bool:
    """Does this process hold only a part of some weight (FSDP2, `shard_experts`, tensor parallelism)?"""
    if not several_ranks():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's state with whole weights, on the first process; empty on the others. All of them call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def on_first_process(action: Callable[[], object]) -> None:
    """Act on the first process only; where that fails, all raise its error, and none waits for ever."""
    problem: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:
            problem = [raised]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


@contextmanager
def as_if_whole(model: Any) -> Iterator[None]:
    """Inside the `with`, transformers does not gather a model that it has distributed itself: the first process is alone."""
    config = model.config
    plan = config.__dict__.pop("distributed_config", None)
    try:
        yield
    finally:
        if plan is not None:
            config.distributed_config = plan


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


def tell_progress(model: nn.Module, fraction: float) -> None:
    """Tell every router how far training has come, from 0 to 1; annealing and growing routers follow it."""
    for module in model.modules():
        if isinstance(module, Router):
            module.progress(fraction)


def router_loss_scale(model: nn.Module, scale: float) -> None:
    """Say by how much the training loss is multiplied before its backward, for loops that compute it from logits alone.

    Where the loss contains `outputs.loss`, `outputs.router_loss` or `outputs.aux_loss`, the routers' losses are scaled with
    it and this number is not used. Otherwise their gradients are added in the backward, multiplied by `scale`: 1 / n under
    accumulation over n batches, times `scaler.get_scale()` under a gradient scaler.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}; it multiplies losses and must be finite and not negative.")
    for changed in _changed_models(model):
        changed.ledger.loss_scale = float(scale)


@contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, a model in training mode teaches its routers without gradients too.

    For a model that is not trained further: the width of `smooth`, the graph of `symphony`, the statistics of `ac` come
    from the texts that it is run on. Elsewhere a forward without gradients (a reference, a metric) teaches nothing.
    """
    with ExitStack() as stack:
        for changed in _changed_models(model):
            stack.enter_context(changed.ledger.calibration())
        yield


def trainer_callback() -> Any:
    """Return a callback for `transformers.Trainer` and what derives from it (TRL, sentence-transformers).

    Before every step it tells the model's routers how far training has come, and by how much the Trainer scales its loss:
    1 / accumulated batches, times the gradient scaler's factor.
    """
    from transformers import TrainerCallback

    class RouterCallback(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(
            self,
            args: Any,
            state: Any,
            control: Any,
            model: nn.Module | None = None,
            optimizer: Any = None,
            train_dataloader: Any = None,
            **_: Any,
        ) -> None:
            if model is None:
                return
            if state.max_steps > 0:
                tell_progress(model, min(1.0, state.global_step / state.max_steps))
            if any(True for _ in _wirings(model)):
                batches = _accumulated(args.gradient_accumulation_steps, state.global_step, train_dataloader)
                router_loss_scale(model, _scaler_factor(optimizer) / batches)

    return RouterCallback()


def _accumulated(steps: int, done: int, batches: Any) -> int:
    """Return how many batches the coming update accumulates: the last one of an epoch may have fewer."""
    try:
        count = len(batches)
    except TypeError:  # a stream
        return steps
    updates = math.ceil(count / steps)
    is_last = updates > 0 and done % updates == updates - 1
    return count % steps or steps if is_last else steps


def _scaler_factor(optimizer: Any) -> float:
    scaler = getattr(optimizer, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _wirings(model: nn.Module) -> Iterator[Wiring]:
    for module in model.modules():
        found = wiring(module)
        if found is not None:
            yield found


def _changed_models(model: nn.Module) -> list[Wiring]:
    found = list(_wirings(model))
    if not found:
        raise ValueError(f"{type(model).__name__} holds no model that sparsify or reroute has changed.")
    return found
