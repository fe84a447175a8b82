"""Model outputs with fields for what routers add: `router_loss`, `aux_loss`, `router_logits`.

A field that its class does not declare gets lost, or stops DDP and `torch.compile`, which take outputs apart and build them
again from the class.


The routers' losses in a model's training: counted once, whoever computes the loss.

A trainer reads the routers' losses (`outputs.loss`, `outputs.router_loss`, `outputs.aux_loss`), or it computes its own loss
from logits and ignores them, as TRL and sentence-transformers do. `Junction` serves both: each layer's loss hangs on that
layer's routing weights too, and its gradient comes from what was read, or else from there.
"""

import dataclasses
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.replacements import PerThread
from holdfast.kernels.backward import recomputing
from holdfast.layers.losses import Losses, alone, balance
from holdfast.routing import Router, Routing
from holdfast.routing.state import mean_over_ranks

FIELDS = ("router_loss", "aux_loss", "router_logits")
_extended: dict[type, type] = {}


def extended(kind: type) -> type:
    """Return the output class `kind` with the fields; always the same one."""
    if kind not in _extended:
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = [(name, Any, dataclasses.field(default=None)) for name in FIELDS if name not in known]
        made = dataclasses.make_dataclass(
            kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__, "__reduce_ex__": _reduce}
        )
        made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
        _extended[kind] = made
    return _extended[kind]


def _reduce(outputs: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: the class cannot be found by its name, which is another's, but made again."""
    return _made_again, (type(outputs).__bases__[0], {name: getattr(outputs, name) for name in outputs})


def _made_again(kind: type, values: dict[str, Any]) -> Any:
    return extended(kind)(**values)


def extend_annotated(model: Any) -> None:
    """Make the extended class of what the model's forward returns now: a compiler cannot make one while it traces."""
    from transformers.utils import ModelOutput

    try:
        returned = typing.get_type_hints(type(model).forward).get("return")
    except (NameError, TypeError, AttributeError):
        return
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
            extended(kind)


def with_fields(outputs: Any) -> Any:
    """Return the outputs as an instance of their extended class."""
    kind = type(outputs)
    if kind in _extended.values():
        return outputs
    return _extended[kind](**outputs) if kind in _extended else extended(kind)(**outputs)


IGNORED = -100  # a label that transformers' losses leave out
ASK = "output_router_logits"  # the option and config entry with which trainers ask for `outputs.aux_loss`
REENTRANT = (
    "reentrant activation checkpointing drops the gradient of the routers' losses; call "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
)
FP16 = (
    "the loss was computed in float16 without the routers' losses (outputs.loss, outputs.router_loss or outputs.aux_loss), "
    "and by how much it is scaled is not known: pass callbacks=[holdfast.trainer_callback()] to the Trainer, or call "
    "holdfast.router_loss_scale(model, scaler.get_scale()) before each step."
)
TWICE = (
    "this is a second backward through one forward, and the first one has added the routers' losses, which its loss did not "
    "contain: take one backward of the sum, or add outputs.router_loss to the loss that shall train routers and "
    "0 * outputs.router_loss to the others."
)


class Junction(torch.autograd.Function):
    """Return `loss` and `weights` unchanged, and give `loss` its gradient once.

    The gradient of the returned loss where it was read, else `ledger.unread_gradient`, when a gradient arrives at the
    returned weights. After a backward that has read the loss, a second one through the same forward adds nothing to it;
    after one that has not, a second one would count the loss twice, and is refused.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weights: Tensor, ledger: "Ledger", half: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.ledger, ctx.half, ctx.device = ledger, half, loss.device
        ctx.was_read = ctx.was_added = False
        return loss.view_as(loss), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, read: Tensor | None, weights: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.was_added:
            raise ValueError(TWICE)
        if read is not None:
            ctx.was_read = True
        elif not ctx.was_read:
            read = torch.full((), ctx.ledger.unread_gradient(ctx.half), device=ctx.device)
            ctx.was_added = True
        return read, weights, None, None


class CompiledJunction(torch.autograd.Function):
    """`Junction` for a compiler, which hands in a gradient of 0 for what was not read."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.scale = scale
        return loss.clone(), weights.clone()

    @staticmethod
    def backward(ctx: Any, read: Tensor, weights: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return torch.where(read != 0, read, ctx.scale), weights, None


@dataclasses.dataclass
class _Forward:
    """A forward of the model under way."""

    under_way: bool = False
    with_gradient: bool = False
    asked: bool = False  # for router logits
    as_tuple: bool = False  # asked for router logits, it is to return a tuple
    ids: Tensor | None = None
    read: list[Tensor] | None = None  # None: it makes no losses
    requested: list[Tensor] = dataclasses.field(default_factory=list)
    logits: list[Tensor] = dataclasses.field(default_factory=list)


class _Forwards(PerThread):
    def __init__(self) -> None:  # by every thread
        self.now = _Forward()


class Ledger:
    """The losses of the forward under way, and the hooks that put them into the model's outputs.

    Open only while the model's forward runs: what a recomputation collects during the backward is not counted again. A
    forward without gradients (a reference model, old log-probabilities, a rollout) makes no losses and changes no state.
    Calls of `model.forward` bypass the hooks: there a forward without gradients changes state, since it may be the first
    half of one that a backward runs again (GradCache).

    own_coefficient  of the balance loss that the family adds to its loss when it is asked for router logits
    unit             what `outputs.aux_loss` is divided by, so that a trainer's coefficient times it is the routers' loss
    on_request       no layer has losses: compute a balance loss where router logits are asked for, as the family does
    lists_logits     the family does not record router logits itself
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[Router] = (),
        *,
        own_coefficient: float = 0.0,
        unit: float = 1.0,
        on_request: bool = False,
        lists_logits: bool = False,
    ) -> None:
        self._routers, self._config = routers, text_config(model)
        self._own_coefficient, self._unit = own_coefficient, unit
        self._on_request, self._lists_logits = on_request, lists_logits
        self._forwards = _Forwards()
        self._generating = self._calibrating = self._warned = False
        self.loss_scale: float | None = None  # of losses that were not read; None: not set
        self._latest_asked = False  # for router logits, in the last forward that a backward may recompute
        self.has_backward = True  # the forward under way, as far as one can tell
        self.learning = True
        self._latest_ids: Tensor | None = None  # of the last forward that a backward may recompute
        self.when_done: list[Callable[[], None]] = []  # called when nothing of a forward is needed any more
        extend_annotated(model)
        self._handles = [
            model.register_forward_pre_hook(self._open, with_kwargs=True),
            model.register_forward_hook(self._close, with_kwargs=True, always_call=True),
        ]
        inner: Any = getattr(model, "base_model", model)
        if lists_logits and inner is not model:
            self._handles.append(inner.register_forward_pre_hook(_without_request, with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def _now(self) -> "_Forward":
        return self._forwards.now

    @property
    def asked(self) -> bool:
        """Whether router logits were asked for, in the forward under way or in the one that a backward recomputes."""
        return self._now.asked if self._now.under_way else self._latest_asked

    @property
    def token_ids(self) -> Tensor | None:
        """The tokens of the forward under way, or of the one that a backward recomputes."""
        return self._now.ids if self._now.under_way else self._latest_ids

    def collect(self, routing: Routing, weights: Tensor, losses: Any, token_mask: Tensor | None, k: int) -> Tensor:
        """Collect what a layer's router did; return the weights for its experts, on which the layer's loss hangs.

        losses   the layer's `Losses`, for evaluation, where routers compute none; None where it has none
        """
        if self.asked and (self._now.under_way or (not torch.compiler.is_compiling() and recomputing())):
            self._collect_requested(routing, losses, token_mask, k)
        if not routing.losses or not self.learning:
            return weights
        if self._now.with_gradient and self._now.under_way and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        loss = routing.loss
        if torch.is_grad_enabled() and loss.requires_grad:
            loss, weights = self._join(loss, weights, routing.logits.device.type)
        if self._now.read is not None:
            self._now.read.append(loss)
        return weights

    def unread_gradient(self, half: bool) -> float:
        """Return the gradient of a loss that was not read; refuse to guess it under float16, and warn of a guess of 1."""
        if self.loss_scale is not None:
            return self.loss_scale
        if half:
            raise ValueError(FP16)
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the loss was computed without the routers' losses (outputs.loss, outputs.router_loss or outputs.aux_loss), "
                "so their gradients were added as they are. That is right for one backward a step; under gradient "
                "accumulation pass callbacks=[holdfast.trainer_callback()] to the Trainer, or call "
                "holdfast.router_loss_scale(model, scale).",
                stacklevel=2,
            )
        return 1.0

    def generation(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards are those of a rollout."""
        return self._with("_generating")

    def calibration(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards without gradients teach routers too."""
        return self._with("_calibrating")

    @contextmanager
    def _with(self, flag: str) -> Iterator[None]:
        before = getattr(self, flag)
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, before)

    def _join(self, loss: Tensor, weights: Tensor, device: str) -> tuple[Tensor, Tensor]:
        half = weights.dtype == torch.float16 or (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        )
        if not torch.compiler.is_compiling():
            joined: tuple[Tensor, Tensor] = Junction.apply(loss, weights, self, half)
            return joined
        if half and self.loss_scale is None:  # a compiler does not tell what was read
            raise ValueError(FP16)
        traced: tuple[Tensor, Tensor] = CompiledJunction.apply(
            loss, weights, 1.0 if self.loss_scale is None else self.loss_scale
        )
        return traced

    def _collect_requested(self, routing: Routing, losses: Any, token_mask: Tensor | None, k: int) -> None:
        if self._on_request and self._now.under_way and self._now.with_gradient and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        # A recomputation must save the tensors that the forward did, but its results are not counted again.
        requested, logits = (self._now.requested, self._now.logits) if self._now.under_way else ([], [])
        over_ranks = mean_over_ranks if torch.is_grad_enabled() and self.learning else alone
        if self._lists_logits:
            logits.append(routing.logits)
        if self._on_request:
            requested.append(k * balance(routing, token_mask, over_ranks))  # the family's own is k where ours is 1
        elif isinstance(losses, Losses) and not routing.losses:
            requested.append(torch.stack([*losses(routing, token_mask, alone).values(), routing.gates.new_zeros(())]).sum())

    def _open(
        self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._now.ids = options.get("input_ids", inputs[0] if inputs else None)
        self._now.with_gradient, self._now.under_way = torch.is_grad_enabled(), True
        self.has_backward = self._now.with_gradient or not model.training
        if self.has_backward:
            self._latest_ids = self._now.ids
        if model.training:
            self._let_learn(self._now.with_gradient or (self._calibrating and not self._generating))
        self._now.read = [] if model.training and self.learning else None
        self._now.requested, self._now.logits = [], []
        asked = options.get(ASK)
        self._now.asked = bool(getattr(self._config, ASK, False) if asked is None else asked)
        if self._now.with_gradient:
            self._latest_asked = self._now.asked
        self._now.as_tuple = self._now.asked and options.get("return_dict") is False
        if self._now.as_tuple:  # in a tuple, which value is the loss and which the `aux_loss` cannot be told
            options = {**options, "return_dict": True}
        if not self._now.asked or not (self._lists_logits or options.get("fused_lm_head")):
            return (inputs, options) if self._now.as_tuple else None
        # A dense family knows no such option. TRL's own forward would compute the family's loss from the logits.
        return inputs, {name: value for name, value in options.items() if name != ASK} | (
            {} if self._lists_logits and not options.get("fused_lm_head") else {ASK: False}
        )

    def _let_learn(self, learning: bool) -> None:
        if self.learning != learning:
            self.learning = learning
            for router in self._routers:
                router.learning = learning

    def _close(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        read, self._now.read = self._now.read, None
        self._let_learn(True)
        self._now.under_way, self.has_backward = False, True
        if not model.training:  # a forward without gradients in training may stand between another and its backward
            self._now.ids = self._latest_ids = None
            for forget in self.when_done:
                forget()
        if outputs is not None and (read or self._now.asked):  # None: the forward has raised
            outputs = self._complete(model, read, options, outputs)
            if self._now.as_tuple:
                outputs = tuple(value for name, value in outputs.items() if name != "router_loss")
        self._now.requested, self._now.logits = [], []  # they hold the graph
        return outputs

    def _complete(self, model: nn.Module, read: list[Tensor] | None, options: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs with what routers add to them."""
        if isinstance(outputs, tuple):  # return_dict=False: the loss comes first, if there is one, and only it is a scalar
            if outputs[0].dim() == 0:
                return (outputs[0] + self._added(model, read, options, outputs[0].device), *outputs[1:])
            return outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = outputs.loss + self._added(model, read, options, outputs.loss.device)
        if dataclasses.is_dataclass(outputs) and isinstance(outputs, dict):  # as transformers' outputs are
            outputs = with_fields(outputs)
            self._expose(outputs, read)
        return outputs

    def _added(self, model: nn.Module, read: list[Tensor] | None, options: dict[str, Any], device: torch.device) -> Any:
        """Return what the model's own loss must be increased by."""
        if read:
            return _total(read, device) * share_of_batch(model, options)
        if self._on_request and self._now.requested and self._own_coefficient:
            return self._own_coefficient * self._mean_request(device) * share_of_batch(model, options)
        return 0.0

    def _expose(self, outputs: Any, read: list[Tensor] | None) -> None:
        if read:
            outputs.router_loss = _total(read, read[-1].device)
        if not self._now.asked:
            return
        if self._on_request:
            if self._now.requested:
                outputs.aux_loss = self._mean_request(self._now.requested[-1].device)
        elif read:
            outputs.aux_loss = outputs.router_loss / self._unit
        elif self._now.requested:
            outputs.aux_loss = _total(self._now.requested, self._now.requested[-1].device) / self._unit
        if self._lists_logits:
            outputs.router_logits = tuple(self._now.logits)

    def _mean_request(self, device: torch.device) -> Tensor:
        return _total(self._now.requested, device) / len(self._now.requested)


def _without_request(
    model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take the request for router logits away from a dense family, which does not know it."""
    if ASK not in options:
        return None
    return inputs, {name: value for name, value in options.items() if name != ASK}


def text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([term.to(device) for term in losses]).sum()


def share_of_batch(model: nn.Module, options: dict[str, Any]) -> Tensor | float:
    """The share that this forward has of the items that the whole batch's loss is divided by; 1 where it is its own mean.

    A trainer that accumulates gradients divides each part's summed loss by `num_items_in_batch`: the routers' losses, which
    are means, then count by their part's share, and once in all. They are of the tokens of all processes, as is the share.
    """
    items, labels = options.get("num_items_in_batch"), options.get("shift_labels")
    if labels is None:
        labels = options.get("labels")
        labels = labels[..., 1:] if isinstance(labels, Tensor) and _shifts_labels(model) else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    return mean_over_ranks((labels != IGNORED).sum() / items)


def _shifts_labels(model: nn.Module) -> bool:
    """Is the first label never a target? As the Trainer decides when it counts."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
