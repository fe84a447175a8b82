"""Train and save a model on several ranks, and control its routers from a training loop.

shard_experts        expert parallelism: distribute the experts of a model over ranks
set_progress         set the training progress of the routers
router_loss_scale    set the factor of the routers' losses
calibrate            update router state without training
trainer_callback     set progress and loss scale in `transformers.Trainer`, and log the routers' losses
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.hub.install import ModelHooks, hooks_of
from holdfast.hub.layers import is_moe, moe_layers
from holdfast.hub.replacements import has_foreign_forward, has_known_layout, use_holdfast_experts
from holdfast.layers import Experts
from holdfast.layers.expert_parallel import ExpertShards
from holdfast.routing import Router
from holdfast.routing.state import several_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(model: Any, mesh: "DeviceMesh") -> Any:
    """Distribute the experts of every MoE layer evenly over the ranks of `mesh`, in place.

    On a mesh of one dimension each expert is on one rank. On a mesh of two dimensions, experts are sharded along the last
    dimension and replicated along the first; gradients of replicas are averaged. Each rank runs its own batch, and tokens
    are sent to the ranks that hold their experts. Wrap the rest of the model with DDP or FSDP2 afterwards. DDP then ignores
    the experts automatically; for `fully_shard`, pass their parameters as `ignored_params`.

    The experts' parameters keep their names and become DTensors, which torch.distributed.checkpoint and `holdfast.save`
    support. After this call every rank must run the same number of forwards, in evaluation too.
    """
    from torch.nn.parallel import DistributedDataParallel

    _require_usable_mesh(model, mesh)
    for module in model.modules():
        if isinstance(module, Router) and module.select.layer_kind == "smear":
            raise ValueError(f"{module.layer}: SMEAR merges all experts, so every rank needs them; use DDP or FSDP2.")
    found = _expert_modules(model)
    for name, experts in found.items():
        _require_shardable(name, experts, mesh)
    ignored = []
    for name, experts in found.items():
        experts.shards = ExpertShards(mesh, next(experts.parameters()).shape[0])
        experts.shards.shard(experts)
        ignored += [f"{name}.{parameter}".lstrip(".") for parameter, _ in experts.named_parameters(recurse=False)]
        if not isinstance(experts, Experts):
            use_holdfast_experts(experts)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model


def _expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return by name all modules of class `Experts`, and the experts of MoE layers of a supported family."""
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    for moe_layer in moe_layers(model) if is_moe(model) else []:
        if moe_layer.family is not None:
            found[f"{moe_layer.name}.{moe_layer.family.experts}"] = moe_layer.experts
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts to shard; give an MoE model, or call sparsify first.")
    return found


def _require_usable_mesh(model: nn.Module, mesh: "DeviceMesh") -> None:
    if not several_ranks():
        raise ValueError("there is no process group; start with torchrun and call torch.distributed.init_process_group.")
    if hasattr(model, "module") and isinstance(model.module, nn.Module):
        raise ValueError(f"{type(model).__name__} wraps the model; shard the experts of the one inside, before wrapping.")
    if mesh.ndim > 2:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions; give one, or two of which the first is for replicas.")
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks; use a mesh of all ranks, with a first dimension "
            "for replicas if experts are sharded over fewer."
        )


def _require_shardable(name: str, experts: Any, mesh: "DeviceMesh") -> None:
    from torch.distributed.tensor import DTensor

    if getattr(experts, "shards", None) is not None:
        raise ValueError(f"{name}: these experts are already sharded over ranks.")
    if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
        raise ValueError(f"{name}: its weights are already sharded; call shard_experts before fully_shard.")
    if not isinstance(experts, Experts) and not has_known_layout(experts):
        raise ValueError(f"{name}: {type(experts).__name__} of this transformers cannot be sharded; update transformers.")
    if has_foreign_forward(experts):
        raise ValueError(f"{name}: another library has replaced the forward of these experts; load the model without it.")
    weight = next(experts.parameters())
    if weight.device.type not in (mesh.device_type, "meta"):
        raise ValueError(f"{name}: its weights are on {weight.device.type}, the mesh on {mesh.device_type}; move the model.")
    count, ranks = weight.shape[0], mesh.size(-1)
    if count % ranks:
        raise ValueError(f"{name}: cannot split {count} experts evenly over {ranks} ranks; choose a divisor of {count}.")


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank has only a part of some weight (FSDP2, `shard_experts`, tensor parallelism)."""
    if not several_ranks():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def on_first_rank(action: Callable[[], object]) -> None:
    """Call `action` on the first rank only. If it raises an error, all ranks raise it, so that no rank waits for ever."""
    error: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:
            error = [raised]
    dist.broadcast_object_list(error)
    if error[0] is not None:
        raise error[0]


def set_progress(model: nn.Module, fraction: float) -> None:
    """Set the training progress of every router, from 0 to 1; for routers that change a budget or k during training."""
    for module in model.modules():
        if isinstance(module, Router):
            module.progress(fraction)


def router_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of the routers' losses, for training loops that compute their loss from logits alone.

    If the training loss contains `outputs.loss`, `outputs.router_loss` or `outputs.aux_loss`, the routers' losses are scaled
    with it, and `scale` is not used. Otherwise the backward adds the gradients of these losses, multiplied by `scale`.
    Set it to the factor that multiplies the training loss before its backward: 1 / n if gradients are accumulated over n
    batches, times `scaler.get_scale()` if a gradient scaler is used.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}; it multiplies losses and must be finite and not negative.")
    for hooks in _require_hooks(model):
        hooks.collector.loss_scale = float(scale)


@contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, forwards of a model in training mode update router state even without gradients.

    Use it for a model that is not trained further: it computes the width of `smooth`, the graph of `symphony` and the
    statistics of `ac` from the texts that the model is run on. Outside the `with`, a forward without gradients (for example
    of a reference model, or for a metric) updates no state.
    """
    with ExitStack() as stack:
        for hooks in _require_hooks(model):
            stack.enter_context(hooks.forwards.calibration())
        yield


def trainer_callback() -> Any:
    """Return the callback that `transformers.Trainer` and trainers derived from it (TRL, sentence-transformers) get anyway.

    Pass it only to a trainer from which the default callbacks were removed; a second one changes nothing. It sets the
    training progress of the model's routers and the scale of their losses, and logs these losses (`RouterCallback`).
    """
    return callback_class()()


@cache
def callback_class() -> Any:
    """Return the class of `trainer_callback`, always the same one; made here because it imports transformers."""
    from transformers import TrainerCallback

    class RouterCallback(TrainerCallback):  # type: ignore[misc]
        """Set the progress of routers and the scale of their losses before each step, and log these losses by name.

        The scale is the factor by which the Trainer multiplies its loss: 1 / accumulated batches, times the gradient
        scaler's factor. The log has `router/balance`, `router/z`, ...: what each has added to the training loss, the sum
        of all layers and the mean over the steps since the last log. All ranks log the same numbers: each has the losses
        of the whole batch.

        `transformers.trainer.DEFAULT_CALLBACKS` has this class (checkpoint.py), so every Trainer runs it. Of two in one
        Trainer the first one counts. It does nothing for a model that Holdfast has not changed.
        """

        def __init__(self) -> None:
            self._sums: dict[tuple[str, torch.device], Tensor] = {}
            self._steps, self._scaler_factor = 0, 1.0

        def __reduce__(self) -> tuple[Any, ...]:
            return trainer_callback, ()  # a Trainer can be pickled, although this class has no name in its module

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Forget the steps of an earlier training that no log has shown."""
            self._sums.clear()
            self._steps = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Set progress and loss scale."""
            model = given.get("model")
            if model is None:
                return
            if state.max_steps > 0:
                set_progress(model, min(1.0, state.global_step / state.max_steps))
            changed = _all_hooks(model)
            if changed:
                scaler = getattr(given.get("optimizer"), "scaler", None)
                self._scaler_factor = float(scaler.get_scale()) if scaler is not None else 1.0
                steps, data = args.gradient_accumulation_steps, given.get("train_dataloader")
                batches = _accumulated_batches(steps, state.global_step, data)
                router_loss_scale(model, self._scaler_factor / batches)
            for hooks in changed:
                hooks.collector.sums = {}

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """Count the losses of this step."""
            self._steps += 1
            for hooks in _all_hooks(model):
                for key, value in (hooks.collector.sums or {}).items():
                    self._sums[key] = self._sums.get(key, 0) + value / self._scaler_factor
                hooks.collector.sums = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            """Add the losses to a log of the training loss; the Trainer has copied it to its history already."""
            if logs is None or "loss" not in logs or not self._sums:
                return
            means: defaultdict[str, float] = defaultdict(float)
            for (name, _device), value in self._sums.items():
                means[f"router/{name}"] += float(value) / self._steps
            logs.update(means)
            state.log_history[-1].update(means)
            self._sums.clear()
            self._steps = 0

        def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
            """Forget the scale: a loop that trains the model further has its own."""
            for hooks in _all_hooks(model):
                hooks.collector.loss_scale = hooks.collector.sums = None

    return RouterCallback


def _accumulated_batches(steps: int, done: int, batches: Any) -> int:
    """Return how many batches the next optimiser step accumulates: the last step of an epoch may have fewer."""
    try:
        count = len(batches)
    except TypeError:  # a stream has no length
        return steps
    updates = math.ceil(count / steps)
    is_last = updates > 0 and done % updates == updates - 1
    return count % steps or steps if is_last else steps


def _all_hooks(model: nn.Module | None) -> list[ModelHooks]:
    """Return the hooks of every model inside `model` that sparsify or reroute has changed; `model` may be a wrapper."""
    return [] if model is None else [hooks for module in model.modules() if (hooks := hooks_of(module)) is not None]


def _require_hooks(model: nn.Module) -> list[ModelHooks]:
    found = _all_hooks(model)
    if not found:
        raise ValueError(f"{type(model).__name__} contains no model that sparsify or reroute has changed.")
    return found
