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
fields for them: DDP and `torch.compile` rebuild outputs from the fields that their class declares, and lose a field that is
not declared, or raise an error.
"""

import dataclasses
import sys
import typing
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families import text_config
from holdfast.kernels.torch_internals import has_gradient, running_backward
from holdfast.layers.losses import Losses, balance, single_process_mean
from holdfast.routing import Routing
from holdfast.routing.state import mean_over_ranks

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
class Forward:
    """A forward of the model, in one thread: what its layers must know (forwards.py), and the losses that they return."""

    in_model: bool = False  # the model's forward runs
    in_base: bool = False  # the forward of its base model runs by itself
    is_plain: bool = False  # it runs in evaluation, without recorded routes, and router logits are not requested
    with_gradient: bool = False
    may_have_backward: bool = True  # whether a backward may follow this forward
    learning: bool = True  # whether routers compute losses and update state
    generations: list[None] = dataclasses.field(default_factory=list)  # an entry for each `generation` around it
    token_ids: Tensor | None = None  # (B,N)
    routes: Tensor | None = None  # (B,N,L,K), the recorded routes to use again
    wants_router_logits: bool = False
    as_tuple: bool = False  # the caller wants a tuple, and router logits
    layer_losses: list[Tensor] | None = None  # None: this forward computes no losses
    requested_losses: list[Tensor] = dataclasses.field(default_factory=list)  # one per layer, only for `aux_loss`
    logits: list[Tensor] = dataclasses.field(default_factory=list)


class LossCollector:
    """Collects the layers' losses in a forward and puts them into the model's outputs.

    Losses are collected only while the model's forward runs: a recomputation during the backward adds none.

    native_coefficient   coefficient of the balance loss that the family adds to its loss if router logits are requested
    aux_loss_divisor     divides `outputs.aux_loss`, so that a trainer's coefficient times it is the routers' loss
    balance_on_request   compute a balance loss if router logits are requested, as the family does: no layer has losses
    adds_logits          add router logits to the outputs: the family does not
    has_losses           whether a layer has losses
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        native_coefficient: float,
        aux_loss_divisor: float,
        balance_on_request: bool,
        adds_logits: bool,
        has_losses: bool,
    ) -> None:
        self._config = text_config(model)
        self._native_coefficient, self._aux_loss_divisor = native_coefficient, aux_loss_divisor
        self._balance_on_request, self.adds_logits = balance_on_request, adds_logits
        self._replaces_balance = has_losses or balance_on_request  # if not, the family computes its own
        self._warned = False
        self._checked_backward = -1
        self.loss_scale: float | None = None  # gradient of a loss that the training loss does not contain
        # What each term has added to the training loss, on each device; None: not counted. The Trainer's callback logs it.
        self.sums: dict[tuple[str, torch.device], Tensor] | None = None
        prepare_output_classes(model)

    def collect(
        self, routing: Routing, weights: Tensor, losses: Any, token_mask: Tensor | None, k: int, forward: Forward
    ) -> Tensor:
        """Collect a layer's losses and logits; return the expert weights with the layer's loss attached.

        losses   the layer's `Losses`, used in evaluation, where routers compute no losses; None if the layer has none
        """
        if forward.wants_router_logits and (forward.in_model or not torch.compiler.is_compiling()):
            self._collect_requested(routing, losses, token_mask, k, forward)
        if not routing.losses or not forward.learning:
            return weights
        if forward.with_gradient and forward.in_model and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        loss = routing.loss
        if torch.is_grad_enabled() and loss.requires_grad:
            loss, weights = self._attach_to_weights(loss, weights, routing)
        if forward.layer_losses is not None:
            forward.layer_losses.append(loss)
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

    def _collect_requested(self, routing: Routing, losses: Any, token_mask: Tensor | None, k: int, forward: Forward) -> None:
        """Collect the logits, and a loss if the router computed none, for a caller that requested router logits."""
        if self._balance_on_request and forward.in_model and forward.with_gradient and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        # A recomputation must save the same tensors as the forward, but its results are not counted.
        requested, logits = (forward.requested_losses, forward.logits) if forward.in_model else ([], [])
        over_ranks = mean_over_ranks if torch.is_grad_enabled() and forward.learning else single_process_mean
        if self.adds_logits:
            logits.append(routing.logits)
        if self._balance_on_request:
            requested.append(k * balance(routing, token_mask, over_ranks))  # with equal load the family's is k, ours 1
        elif isinstance(losses, Losses) and not routing.losses:
            requested.append(
                torch.stack([*losses(routing, token_mask, single_process_mean).values(), routing.gates.new_zeros(())]).sum()
            )

    def begin(self, forward: Forward, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Start collecting; return the forward's options without a request for router logits that it must not get."""
        forward.layer_losses = [] if model.training and forward.learning else None
        requested = options.get(ROUTER_LOGITS)
        forward.wants_router_logits = bool(getattr(self._config, ROUTER_LOGITS, False) if requested is None else requested)
        forward.as_tuple = forward.wants_router_logits and options.get("return_dict") is False
        if not forward.wants_router_logits:
            return options
        if forward.as_tuple:  # in a tuple one cannot tell the loss from the `aux_loss`
            options = {**options, "return_dict": True}
        is_fused = options.get("fused_lm_head") and self._replaces_balance
        if not (self.adds_logits or is_fused):
            return options
        # A dense family does not know the option. TRL's own forward would compute the family's loss from the logits.
        others = {name: value for name, value in options.items() if name != ROUTER_LOGITS}
        return others | ({ROUTER_LOGITS: False} if is_fused else {})

    def end(self, forward: Forward, model: nn.Module, options: dict[str, Any], outputs: Any) -> Any:
        """Stop collecting, and return the outputs with what was collected; `outputs` is None if the forward has raised."""
        if outputs is not None and (forward.layer_losses or forward.wants_router_logits):
            outputs = self._add_to_outputs(model, options, outputs, forward)
            if forward.as_tuple:
                outputs = tuple(value for name, value in outputs.items() if name != "router_loss")
        forward.layer_losses = None
        if forward.requested_losses or forward.logits:  # they would keep the autograd graph alive
            forward.requested_losses, forward.logits = [], []
        return outputs

    def _add_to_outputs(self, model: nn.Module, options: dict[str, Any], outputs: Any, forward: Forward) -> Any:
        """Add the routers' losses to the loss in the outputs, and set `ROUTER_FIELDS`."""
        if isinstance(outputs, tuple):  # return_dict=False: the loss, if there is one, comes first and is the only scalar
            if outputs[0].dim() == 0:
                return outputs[0] + self._loss_to_add(model, options, outputs[0].device, forward), *outputs[1:]
            return outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = outputs.loss + self._loss_to_add(model, options, outputs.loss.device, forward)
        if dataclasses.is_dataclass(outputs) and isinstance(outputs, dict):  # as transformers' outputs are
            outputs = with_router_fields(outputs)
            self._set_router_fields(outputs, forward)
        return outputs

    def _loss_to_add(self, model: nn.Module, options: dict[str, Any], device: torch.device, forward: Forward) -> Any:
        """Return the routers' loss that is added to the model's own loss; 0 if there is none."""
        if forward.layer_losses:
            return _total(forward.layer_losses, device) * share_of_batch(model, options)
        if self._balance_on_request and forward.requested_losses and self._native_coefficient:
            return self._native_coefficient * _mean(forward.requested_losses, device) * share_of_batch(model, options)
        return 0.0

    def _set_router_fields(self, outputs: Any, forward: Forward) -> None:
        layer_losses, requested = forward.layer_losses, forward.requested_losses
        if layer_losses:
            outputs.router_loss = _total(layer_losses, layer_losses[-1].device)
        if not forward.wants_router_logits:
            return
        if self._balance_on_request:
            if requested:
                outputs.aux_loss = _mean(requested, requested[-1].device)
        elif layer_losses:
            outputs.aux_loss = outputs.router_loss / self._aux_loss_divisor
        elif requested:
            outputs.aux_loss = _total(requested, requested[-1].device) / self._aux_loss_divisor
        if self.adds_logits:
            outputs.router_logits = tuple(forward.logits)


def _accelerate_accumulates() -> bool:
    """Whether accelerate says that this backward is not the last one before the optimizer step."""
    module = sys.modules.get("accelerate.state")
    return module is not None and not module.GradientState().sync_gradients


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([term.to(device) for term in losses]).sum()


def _mean(losses: list[Tensor], device: torch.device) -> Tensor:
    return _total(losses, device) / len(losses)


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


ROUTER_FIELDS = ("router_loss", "aux_loss", "router_logits")

_classes_with_fields: dict[type, type] = {}


def class_with_router_fields(kind: type) -> type:
    """Return a subclass of the output class `kind` with `ROUTER_FIELDS`; the same one for every call."""
    if kind not in _classes_with_fields:
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = [(name, Any, dataclasses.field(default=None)) for name in ROUTER_FIELDS if name not in known]
        made = dataclasses.make_dataclass(
            kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__, "__reduce_ex__": _reduce}
        )
        made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
        _classes_with_fields[kind] = made
    return _classes_with_fields[kind]


def _reduce(outputs: Any, protocol: Any) -> tuple[Any, ...]:
    """Support copying and pickling: the class cannot be imported by its name, which is its base's, so it is made again."""
    return _rebuild, (type(outputs).__bases__[0], {name: getattr(outputs, name) for name in outputs})


def _rebuild(kind: type, values: dict[str, Any]) -> Any:
    return class_with_router_fields(kind)(**values)


def prepare_output_classes(model: Any) -> None:
    """Make the class with `ROUTER_FIELDS` for the model's outputs now: a compiler cannot trace the creation of a class."""
    from transformers.utils import ModelOutput

    try:
        returned = typing.get_type_hints(type(model).forward).get("return")
    except (NameError, TypeError, AttributeError):
        return
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
            class_with_router_fields(kind)


def with_router_fields(outputs: Any) -> Any:
    """Return the outputs as an instance of their class with `ROUTER_FIELDS`."""
    kind = type(outputs)
    if kind in _classes_with_fields.values():
        return outputs
    # Look into the dictionary first: a compiler cannot trace the creation of a class.
    return (
        _classes_with_fields[kind](**outputs) if kind in _classes_with_fields else class_with_router_fields(kind)(**outputs)
    )
