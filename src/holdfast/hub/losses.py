"""Add the routers' losses to a model's training exactly once, whatever computes the training loss.

There are two kinds of trainers. One uses `outputs.loss`, `outputs.router_loss` or `outputs.aux_loss`, which contain the
routers' losses. The other computes its own loss from logits and ignores them, as TRL and sentence-transformers do. Both work
because each layer's loss is also attached to that layer's expert weights (`AttachLoss`):

    backward                                 gradient of a layer's loss
    the training loss contains it            the gradient that arrives at the loss
    the training loss does not contain it    `LossCollector.loss_scale`, once a gradient arrives at the expert weights

`loss_scale` is the factor by which a training loop multiplies its loss, 1 / n if it accumulates gradients over n batches.
The callback of transformers' Trainer sets it (engines.py), other loops call `holdfast.router_loss_scale`. Where it is not
set and gradients are visibly accumulated, the backward raises an error (`LossCollector.unread_gradient`).

`LossCollector` collects the losses of all layers in a forward and puts them into the model's outputs. The output classes get
fields for them (outputs.py).
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families import as_token_ids, image_tokens, text_config
from holdfast.hub.outputs import prepare_output_classes, with_router_fields
from holdfast.hub.replacements import replaying_layers
from holdfast.kernels.torch_internals import has_gradient, is_recomputing, running_backward
from holdfast.layers.losses import Losses, balance, single_process_mean
from holdfast.routing import Router, Routing
from holdfast.routing.forward_routes import RouteReplay
from holdfast.routing.state import mean_over_ranks
from holdfast.routing.threads import PerThread, one_more

ROUTER_LOGITS = "output_router_logits"  # the option and config entry with which trainers request `outputs.aux_loss`
IGNORED_LABEL = -100  # transformers' losses skip it
REENTRANT = (
    "reentrant activation checkpointing drops the gradient of the routers' losses; call "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
)
FP16 = (
    "the loss was computed in float16 without the routers' losses (outputs.loss, outputs.router_loss or outputs.aux_loss), "
    "and its scale is not known: call holdfast.router_loss_scale(model, scaler.get_scale()) before each step."
)
ACCUMULATED = (
    "gradients are accumulated over several backwards, and the loss was computed without the routers' losses "
    "(outputs.loss, outputs.router_loss or outputs.aux_loss), so each backward would add them in full: call "
    "holdfast.router_loss_scale(model, 1 / n) to accumulate over n batches, or holdfast.router_loss_scale(model, 1.0) if "
    "each backward should add them in full."
)
TWICE = (
    "this is a second backward through one forward, and the first one has added the routers' losses, which its loss did not "
    "contain: run one backward of the sum, or add outputs.router_loss to the loss that trains the routers and "
    "0 * outputs.router_loss to the others."
)
UNREAD = (
    "the loss was computed without the routers' losses (outputs.loss, outputs.router_loss or outputs.aux_loss), "
    "so their gradients were added without scaling. That is right for one backward per step; for gradient "
    "accumulation over n batches call holdfast.router_loss_scale(model, 1 / n)."
)


class AttachLoss(torch.autograd.Function):
    """Return `loss` and `weights` unchanged, and give `loss` its gradient exactly once.

    If the training loss contains the returned loss, its gradient is passed on. If not, the gradient is
    `collector.unread_gradient`, added when a gradient arrives at the returned weights. A second backward through the same
    forward adds nothing if the first training loss contained the loss. Otherwise it would count the loss twice, and raises
    ValueError.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: Tensor, weights: Tensor, collector: "LossCollector", is_fp16: bool, terms: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.collector, ctx.is_fp16, ctx.device, ctx.terms = collector, is_fp16, loss.device, terms
        ctx.was_read = ctx.was_added = False
        return loss.view_as(loss), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_weights: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.was_added:
            raise ValueError(TWICE)
        if of_loss is not None:
            ctx.was_read = True
        elif not ctx.was_read:
            of_loss = torch.full((), ctx.collector.unread_gradient(ctx), device=ctx.device)
            ctx.was_added = True
        if of_loss is not None:
            ctx.collector.add_to_sums(of_loss, ctx.terms)
        return of_loss, of_weights, None, None, None


class CompiledAttachLoss(torch.autograd.Function):
    """`AttachLoss` for a compiler, which passes a gradient of 0 for a loss that the training loss does not contain."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.scale = scale
        return loss.clone(), weights.clone()

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return torch.where(of_loss != 0, of_loss, ctx.scale), of_weights, None


@dataclasses.dataclass
class _Forward:
    """The current forward of the model, in one thread."""

    is_running: bool = False
    with_gradient: bool = False
    may_have_backward: bool = True  # whether a backward may follow this forward
    generations: list[None] = dataclasses.field(default_factory=list)  # an entry for each `generation` around it
    wants_router_logits: bool = False
    as_tuple: bool = False  # the caller wants a tuple, and router logits
    token_ids: Tensor | None = None
    layer_losses: list[Tensor] | None = None  # None: this forward computes no losses
    requested_losses: list[Tensor] = dataclasses.field(default_factory=list)  # one per layer, only for `aux_loss`
    logits: list[Tensor] = dataclasses.field(default_factory=list)


class _Forwards(PerThread):
    def __init__(self) -> None:
        self.current = _Forward()


class LossCollector:
    """Hooks around a model's forward that collect the layers' losses and put them into the model's outputs.

    Losses are collected only while the model's forward runs: a recomputation during the backward adds none. A forward in
    training mode without gradients (a reference model, old log-probabilities, a rollout) computes no losses and updates no
    router state. A call of `model.forward` bypasses the hooks: there a forward without gradients does update state, since a
    backward may recompute it later (GradCache).

    native_coefficient   coefficient of the balance loss that the family adds to its loss if router logits are requested
    aux_loss_divisor     divides `outputs.aux_loss`, so that a trainer's coefficient times it is the routers' loss
    balance_on_request   compute a balance loss if router logits are requested, as the family does: no layer has losses
    adds_logits          add router logits to the outputs: the family does not
    has_losses           whether a layer has losses
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[Router] = (),
        *,
        native_coefficient: float = 0.0,
        aux_loss_divisor: float = 1.0,
        balance_on_request: bool = False,
        adds_logits: bool = False,
        has_losses: bool = True,
    ) -> None:
        self._routers, self._config = routers, text_config(model)
        self._native_coefficient, self._aux_loss_divisor = native_coefficient, aux_loss_divisor
        self._balance_on_request, self._adds_logits, self._forwards = balance_on_request, adds_logits, _Forwards()
        self._replaces_balance = has_losses or balance_on_request  # if not, the family computes its own
        self._warned = False
        self._calibrations: list[None] = []  # an entry for each `calibration` that is entered
        self._checked_backward = -1
        self.image_tokens = image_tokens(model)
        self.loss_scale: float | None = None  # gradient of a loss that the training loss does not contain
        # What each term has added to the training loss, on each device; None: not counted. The Trainer's callback logs it.
        self.sums: dict[tuple[str, torch.device], Tensor] | None = None
        self.learning_enabled = True  # whether routers compute losses and update state
        # The next two are from the last forward that a backward may recompute.
        self._latest_wants_logits = False
        self._latest_ids: Tensor | None = None
        self.on_forward_end: list[Callable[[], None]] = []  # called when the data of a forward are no longer needed
        prepare_output_classes(model)
        self.replay = RouteReplay(model, replaying_layers(model))
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward, with_kwargs=True, always_call=True),
        ]
        inner: Any = getattr(model, "base_model", model)
        if adds_logits and inner is not model:
            self._handles.append(inner.register_forward_pre_hook(_drop_router_logits_option, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks."""
        self.replay.remove()
        for handle in self._handles:
            handle.remove()

    @property
    def _current(self) -> _Forward:
        return self._forwards.current

    @property
    def wants_router_logits(self) -> bool:
        """Whether router logits are requested, in the current forward or in the one that a backward recomputes."""
        return self._current.wants_router_logits if self._current.is_running else self._latest_wants_logits

    @property
    def token_ids(self) -> Tensor | None:
        """Return the token ids of the current forward, or of the one that a backward recomputes; None if there are none."""
        latest = self._latest_ids if torch.compiler.is_compiling() or is_recomputing() else None
        return self._current.token_ids if self._current.is_running else latest

    @property
    def may_have_backward(self) -> bool:
        """Whether a backward may follow the current forward."""
        return self._current.may_have_backward

    def generation(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards of this thread without gradients update no state, even during calibration."""
        return one_more(self._current.generations)

    def calibration(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards without gradients update router state too, in all threads."""
        return one_more(self._calibrations)

    def collect(self, routing: Routing, weights: Tensor, losses: Any, token_mask: Tensor | None, k: int) -> Tensor:
        """Collect a layer's losses and logits; return the expert weights with the layer's loss attached.

        losses   the layer's `Losses`, used in evaluation, where routers compute no losses; None if the layer has none
        """
        if self.wants_router_logits and (
            self._current.is_running or (not torch.compiler.is_compiling() and is_recomputing())
        ):
            self._collect_requested(routing, losses, token_mask, k)
        if not routing.losses or not self.learning_enabled:
            return weights
        if self._current.with_gradient and self._current.is_running and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        loss = routing.loss
        if torch.is_grad_enabled() and loss.requires_grad:
            loss, weights = self._attach_to_weights(loss, weights, routing)
        if self._current.layer_losses is not None:
            self._current.layer_losses.append(loss)
        return weights

    def unread_gradient(self, node: Any) -> float:
        """Return the gradient of a loss that the training loss does not contain; `node` is its `AttachLoss`.

        It is `loss_scale`. If that is not set, raise ValueError under float16 and where gradients are accumulated, and
        else warn once and return 1.
        """
        if self.loss_scale is not None:
            return self.loss_scale
        if node.is_fp16:
            raise ValueError(FP16)
        backward = running_backward()
        if backward != self._checked_backward:
            # Once, in the last layer: in this backward, later parameters have their new gradients by then.
            self._checked_backward = backward
            if _accelerate_accumulates() or has_gradient(node):
                raise ValueError(ACCUMULATED)
        if not self._warned:
            self._warned = True
            warnings.warn(UNREAD, stacklevel=2)
        return 1.0

    def add_to_sums(self, gradient: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Count what a layer's loss, of which `terms` are the parts, has added to the training loss."""
        if self.sums is None:
            return
        for name, value in terms.items():
            key = name, value.device  # each device has a thread of its own in a backward
            added = gradient.detach() * value
            self.sums[key] = self.sums[key] + added if key in self.sums else added

    def _attach_to_weights(self, loss: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        device = routing.logits.device.type
        is_fp16 = weights.dtype == torch.float16 or (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        )
        if not torch.compiler.is_compiling():
            terms = {} if self.sums is None else {name: value.detach() for name, value in routing.losses.items()}
            attached: tuple[Tensor, Tensor] = AttachLoss.apply(loss, weights, self, is_fp16, terms)
            return attached
        if is_fp16 and self.loss_scale is None:  # compiled code does not know whether the training loss contains it
            raise ValueError(FP16)
        traced: tuple[Tensor, Tensor] = CompiledAttachLoss.apply(
            loss, weights, 1.0 if self.loss_scale is None else self.loss_scale
        )
        return traced

    def _collect_requested(self, routing: Routing, losses: Any, token_mask: Tensor | None, k: int) -> None:
        """Collect the logits, and a loss if the router computed none, for a caller that requested router logits."""
        current = self._current
        if self._balance_on_request and current.is_running and current.with_gradient and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        # A recomputation must save the same tensors as the forward, but its results are not counted.
        requested, logits = (current.requested_losses, current.logits) if current.is_running else ([], [])
        over_ranks = mean_over_ranks if torch.is_grad_enabled() and self.learning_enabled else single_process_mean
        if self._adds_logits:
            logits.append(routing.logits)
        if self._balance_on_request:
            requested.append(k * balance(routing, token_mask, over_ranks))  # with equal load the family's is k, ours 1
        elif isinstance(losses, Losses) and not routing.losses:
            requested.append(
                torch.stack([*losses(routing, token_mask, single_process_mean).values(), routing.gates.new_zeros(())]).sum()
            )

    def _begin_forward(
        self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Start collecting; return changed arguments if the model must not get the request for router logits."""
        current = self._current
        current.token_ids = as_token_ids(options.get("input_ids", inputs[0] if inputs else None))
        current.with_gradient, current.is_running = torch.is_grad_enabled(), True
        current.may_have_backward = current.with_gradient or not model.training
        if current.may_have_backward:
            self._latest_ids = current.token_ids
        if model.training:
            self._enable_learning(current.with_gradient or (bool(self._calibrations) and not current.generations))
        current.layer_losses = [] if model.training and self.learning_enabled else None
        current.requested_losses, current.logits = [], []
        requested = options.get(ROUTER_LOGITS)
        current.wants_router_logits = bool(getattr(self._config, ROUTER_LOGITS, False) if requested is None else requested)
        if current.with_gradient:
            self._latest_wants_logits = current.wants_router_logits
        current.as_tuple = current.wants_router_logits and options.get("return_dict") is False
        if current.as_tuple:  # in a tuple one cannot tell the loss from the `aux_loss`
            options = {**options, "return_dict": True}
        is_fused = options.get("fused_lm_head") and self._replaces_balance
        if not current.wants_router_logits or not (self._adds_logits or is_fused):
            return (inputs, options) if current.as_tuple else None
        # A dense family does not know the option. TRL's own forward would compute the family's loss from the logits.
        others = {name: value for name, value in options.items() if name != ROUTER_LOGITS}
        return inputs, others | ({ROUTER_LOGITS: False} if is_fused else {})

    def _enable_learning(self, enabled: bool) -> None:
        if self.learning_enabled != enabled:
            self.learning_enabled = enabled
            for router in self._routers:
                router.learning = enabled

    def _end_forward(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        """Stop collecting, and return the outputs with what was collected."""
        current = self._current
        if not current.is_running:  # `RouteReplay` has refused it
            return outputs
        layer_losses, current.layer_losses = current.layer_losses, None
        self._enable_learning(True)
        current.is_running, current.may_have_backward = False, True
        if not model.training:  # in training, this forward may run between another one and its backward
            current.token_ids = self._latest_ids = None
            for clear in self.on_forward_end:
                clear()
        if outputs is not None and (layer_losses or current.wants_router_logits):  # None: the forward has raised
            outputs = self._add_to_outputs(model, layer_losses, options, outputs)
            if current.as_tuple:
                outputs = tuple(value for name, value in outputs.items() if name != "router_loss")
        current.requested_losses, current.logits = [], []  # they would keep the autograd graph alive
        return outputs

    def _add_to_outputs(
        self, model: nn.Module, layer_losses: list[Tensor] | None, options: dict[str, Any], outputs: Any
    ) -> Any:
        """Add the routers' losses to the loss in the outputs, and set `ROUTER_FIELDS`."""
        if isinstance(outputs, tuple):  # return_dict=False: the loss, if there is one, comes first and is the only scalar
            if outputs[0].dim() == 0:
                return (outputs[0] + self._loss_to_add(model, layer_losses, options, outputs[0].device), *outputs[1:])
            return outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = outputs.loss + self._loss_to_add(model, layer_losses, options, outputs.loss.device)
        if dataclasses.is_dataclass(outputs) and isinstance(outputs, dict):  # as transformers' outputs are
            outputs = with_router_fields(outputs)
            self._set_router_fields(outputs, layer_losses)
        return outputs

    def _loss_to_add(
        self, model: nn.Module, layer_losses: list[Tensor] | None, options: dict[str, Any], device: torch.device
    ) -> Any:
        """Return the routers' loss that is added to the model's own loss; 0 if there is none."""
        if layer_losses:
            return _total(layer_losses, device) * share_of_batch(model, options)
        if self._balance_on_request and self._current.requested_losses and self._native_coefficient:
            return self._native_coefficient * self._mean_requested(device) * share_of_batch(model, options)
        return 0.0

    def _set_router_fields(self, outputs: Any, layer_losses: list[Tensor] | None) -> None:
        requested = self._current.requested_losses
        if layer_losses:
            outputs.router_loss = _total(layer_losses, layer_losses[-1].device)
        if not self._current.wants_router_logits:
            return
        if self._balance_on_request:
            if requested:
                outputs.aux_loss = self._mean_requested(requested[-1].device)
        elif layer_losses:
            outputs.aux_loss = outputs.router_loss / self._aux_loss_divisor
        elif requested:
            outputs.aux_loss = _total(requested, requested[-1].device) / self._aux_loss_divisor
        if self._adds_logits:
            outputs.router_logits = tuple(self._current.logits)

    def _mean_requested(self, device: torch.device) -> Tensor:
        return _total(self._current.requested_losses, device) / len(self._current.requested_losses)


def _accelerate_accumulates() -> bool:
    """Whether accelerate says that this backward is not the last one before the optimizer step."""
    module = sys.modules.get("accelerate.state")
    return module is not None and not module.GradientState().sync_gradients


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([term.to(device) for term in losses]).sum()


def _drop_router_logits_option(
    model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Remove the request for router logits from the arguments of a dense family, which does not know it."""
    if ROUTER_LOGITS not in options:
        return None
    return inputs, {name: value for name, value in options.items() if name != ROUTER_LOGITS}


def share_of_batch(model: nn.Module, options: dict[str, Any]) -> Tensor | float:
    """Return the number of targets of this forward divided by `num_items_in_batch`; 1 if that is not given.

    A trainer that accumulates gradients divides the summed loss of each micro-batch by `num_items_in_batch`. The routers'
    losses are means, so each is multiplied by the share of its micro-batch; the shares sum to 1. Both are over all ranks.
    """
    items, labels = options.get("num_items_in_batch"), options.get("shift_labels")
    if labels is None:
        labels = options.get("labels")
        labels = labels[..., 1:] if isinstance(labels, Tensor) and _shifts_labels(model) else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    return mean_over_ranks((labels != IGNORED_LABEL).sum() / items)


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the first label is never a target. The Trainer decides in the same way when it counts items."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
