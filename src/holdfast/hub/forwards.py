"""The forwards of a changed model: what its layers must know about the one that runs, and the losses that they return.

`ForwardHooks` are hooks around the forward of the model, and of its base model, which may also be called by itself. They
note what the layers inside must know in a `Forward`, one for each thread: token ids, whether router logits are requested,
recorded routes. `routed_experts` is taken off the arguments: trainers shuffle, split and pad batches, and only what is in
the batch follows, but no family's forward knows this argument.

A backward with activation checkpointing runs layers again outside of any forward. They then read the `Forward` that is
recomputed: the last one that may have a backward.

**Losses.** The routers' losses are added to a model's training exactly once, whatever computes the training loss. There are
two kinds of trainers. One uses `outputs.loss`, `outputs.router_loss` or `outputs.aux_loss`, which contain the routers'
losses. The other computes its own loss from logits and ignores them, as TRL and sentence-transformers do. Both work because
each layer's loss is also attached to that layer's expert weights (`AttachLoss`):

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
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from holdfast.hub.families import text_config
from holdfast.hub.second_view import (
    NO_IDS,
    View,
    consistency_of,
    first_with_gradient,
    require_second_view,
    require_views_differ,
    second_inputs,
    with_noise,
    with_output,
    word_noise_of,
)
from holdfast.hub.specs import NATIVE, LayerSpec
from holdfast.kernels.torch_internals import has_gradient, is_recomputing, running_backward
from holdfast.layers.losses import Losses, balance, single_process_mean
from holdfast.routing import Router, Routing
from holdfast.routing.state import mean_over_ranks

State = TypeVar("State")
ROUTED_EXPERTS = "routed_experts"  # the argument of a model with recorded routes, named as in vLLM and SGLang
DATA_PARALLEL = (
    "nn.DataParallel runs copies of the model in threads, whose routes and router state are lost: use "
    "DistributedDataParallel (torchrun), or one device (CUDA_VISIBLE_DEVICES=0)."
)
TWO_THREADS = (
    "two threads run this model at once in training mode, in which its routers have one state and one set of losses: train "
    "in one thread, and run the others on a copy of the model or in evaluation mode."
)
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # entries of a config
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


class PerThread(threading.local, Generic[State]):
    """`current`, which `make` makes, is another object in every thread. So it is in a copy or a loaded pickle.

    Change attributes of `current` and do not replace it: a compiler does not see changes of this object's own attributes.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self.make, self.current = make, make()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.make,)


SECOND_VIEW = object()  # entered in the second forward of the loss consistency: hooks that record routing leave it out
_entered: ContextVar[tuple[object, ...]] = ContextVar("holdfast_entered", default=())


@contextmanager
def entered(key: object) -> Iterator[None]:
    """Inside the `with`, `key` is in `entered_keys()` of this thread or asyncio task, and where its context is copied to."""
    _entered.set((*_entered.get(), key))
    try:
        yield
    finally:  # not by the token of `set`: a generator may be closed in another context
        _entered.set(tuple(other for other in _entered.get() if other is not key))


def entered_keys() -> tuple[object, ...]:
    """Return the keys of every `entered` around the running code, the innermost last. A compiler cannot trace this."""
    return _entered.get()


def is_called_alone(gate: Any) -> bool:
    """Whether this thread calls `gate` inside `entered(gate)`: not in a forward of its layer, with tokens of its own."""
    return not torch.compiler.is_compiling() and gate in entered_keys()


@contextmanager
def one_more(entries: list[None]) -> Iterator[None]:
    """Inside the `with`, the list has one more entry: a count that several threads may change."""
    entries.append(None)
    try:
        yield
    finally:
        entries.pop()


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
    further_views: list[None] = dataclasses.field(default_factory=list)  # an entry for each `further_view` around it
    token_ids: Tensor | None = None  # (B,N)
    routes: Tensor | None = None  # (B,N,L,K), the recorded routes to use again
    wants_router_logits: bool = False
    as_tuple: bool = False  # the caller wants a tuple, and router logits
    layer_losses: list[Tensor] | None = None  # None: this forward computes no losses
    requested_losses: list[Tensor] = dataclasses.field(default_factory=list)  # one per layer, only for `aux_loss`
    logits: list[Tensor] = dataclasses.field(default_factory=list)
    view: View | None = None  # the layers' routings, for the loss consistency; None: no layer asks for it


def require_no_copies(model: nn.Module) -> None:
    """Raise ValueError for `nn.DataParallel` and for the copies of modules that it makes."""
    if isinstance(model, nn.DataParallel) or model.__dict__.get("_is_replica", False):
        raise ValueError(DATA_PARALLEL)


class _RoutesOnce:
    def __init__(self, hooks: "ForwardHooks", routes: Any) -> None:
        self.hooks, self.routes = hooks, [routes]  # empty when a forward has taken them


class ForwardHooks:
    """Hooks around the forwards of a model and of its base.

    A forward in training mode without gradients (a reference model, old log-probabilities, a rollout) computes no losses and
    updates no router state. A call of `model.forward` bypasses the hooks: there a forward without gradients does update
    state, since a backward may recompute it later (GradCache).

    layers   L, how many layers of the model can replay
    """

    def __init__(self, model: Any, routers: Sequence[Router], collector: "LossCollector", layers: int) -> None:
        self._model, self._routers, self.collector, self.layers = model, routers, collector, layers
        self.image_tokens = image_tokens(model)
        self._views_differ = False  # it was checked
        self.on_forward_end: list[Callable[[], None]] = []  # called when the data of a forward are no longer needed
        self.thread = PerThread(Forward)  # where `is_plain`, its `current` is `forward`
        self._recomputed = Forward()  # what a recomputation reads
        self._training: dict[str, Forward] = {}  # the forward in training mode that runs, under "forward"
        self._calibrations: list[None] = []  # an entry for each `calibration` that is entered
        base, first = getattr(model, "base_model", model), {"with_kwargs": True, "prepend": True}
        self._handles = [model.register_forward_pre_hook(self._begin, **first)]
        self._handles.append(model.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        if base is not model:  # it may be called directly, or by the model
            self._handles.append(base.register_forward_pre_hook(self._begin_base, **first))
            self._handles.append(base.register_forward_hook(self._end_base, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def forward(self) -> Forward:
        """The forward that runs in this thread, or the one that a backward recomputes."""
        current = self.thread.current
        if current.in_model or current.in_base or not (torch.compiler.is_compiling() or is_recomputing()):
            return current
        return self._recomputed

    @contextmanager
    def once(self, routes: Any) -> Iterator[None]:
        """Inside the `with`, one forward of this thread or asyncio task gets these routes.

        Raise ValueError at a second forward, and if there was none. A compiled forward does not get them.
        """
        once = _RoutesOnce(self, routes)
        with entered(once):
            yield
        if once.routes:
            raise ValueError("no forward took the routes of holdfast.replay: run the model in the `with` and in its thread.")

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Inside the `with`, forwards of this thread without gradients update no state, even during calibration.

        Nor does an encoder (of images, speech or texts), which `generate` runs before the first forward of the model.
        """
        current = self.thread.current
        with one_more(current.generations):
            if self._model.training:
                self._enable_learning(current, False)
            try:
                yield
            finally:
                if len(current.generations) == 1:
                    self._enable_learning(current, True)

    def further_view(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards of this thread compute no router losses, draw no router noise and update no state.

        They may have gradients: a training step runs such forwards on perturbed views of its batch.
        """
        return one_more(self.thread.current.further_views)

    def calibration(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards without gradients update router state too, in all threads."""
        return one_more(self._calibrations)

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note what the forward is given; return the arguments without what the model does not know."""
        require_no_copies(model)
        current = self.thread.current
        if model.training and self._training.setdefault("forward", current) is not current:
            raise ValueError(TWO_THREADS)
        current.in_model = True
        options = self._take_routes(current, options)
        current.token_ids = as_token_ids(options.get("input_ids", inputs[0] if inputs else None))
        current.with_gradient = torch.is_grad_enabled()
        current.may_have_backward = current.with_gradient or not model.training
        if model.training:
            calibrates = bool(self._calibrations) and not current.generations
            self._enable_learning(current, not current.further_views and (current.with_gradient or calibrates))
        options = self.collector.begin(current, model, options)
        current.is_plain = not (model.training or current.wants_router_logits or current.routes is not None)
        return inputs, options

    def _begin_base(self, base: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.collector.adds_logits and ROUTER_LOGITS in options:  # a dense family does not know this option
            options = {name: value for name, value in options.items() if name != ROUTER_LOGITS}
        current = self.thread.current
        if not current.in_model:
            current.in_base = True
            options = self._take_routes(current, options)
            current.is_plain = not base.training and current.routes is None
        return inputs, options

    def _take_routes(self, current: Forward, options: dict[str, Any]) -> dict[str, Any]:
        """Note the recorded routes (B,N,L,K) that the caller gave; return the options without them."""
        given: Any = options.get(ROUTED_EXPERTS)
        if ROUTED_EXPERTS in options:
            options = {name: value for name, value in options.items() if name != ROUTED_EXPERTS}
        for once in () if torch.compiler.is_compiling() else entered_keys():
            if isinstance(once, _RoutesOnce) and once.hooks is self:
                if given is not None or not once.routes:
                    raise ValueError(f"holdfast.replay gives routes to one forward; pass {ROUTED_EXPERTS}= to this one.")
                given = once.routes.pop()
        if hasattr(given, "require_model"):  # a `Routes`, which knows what model it is of
            given.require_model(self._model)
            given = given.experts
        if given is not None and (not isinstance(given, Tensor) or given.dim() != 4):
            kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{ROUTED_EXPERTS} is {kind}; expected a tensor (B, N, L, K) or a holdfast.Routes.")
        if given is not None and given.shape[2] != self.layers:
            raise ValueError(
                f"{ROUTED_EXPERTS} has {given.shape[2]} layers, but {self.layers} of this model can replay; a layer that "
                'was not rerouted can after holdfast.reroute(model, "native@1"), here MoE layer 1, which changes no number.'
            )
        current.routes = given
        return options

    def _enable_learning(self, current: Forward, enabled: bool) -> None:
        if current.learning != enabled:
            current.learning = enabled
            for router in self._routers:
                router.learning = enabled

    def _end(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs with what was collected; `outputs` is None if the forward has raised."""
        current = self.thread.current
        if not current.in_model:  # `_begin` has refused it
            return outputs
        try:
            if current.view and outputs is not None:
                outputs = self._add_second_view(current, model, inputs, options, outputs)
        except BaseException:
            self._finish(current, model, options, None)
            raise
        return self._finish(current, model, options, outputs)

    def _finish(self, current: Forward, model: nn.Module, options: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs with what was collected, and forget this forward."""
        self._enable_learning(current, not (current.generations and model.training))
        outputs = self.collector.end(current, model, options, outputs)
        self._keep_for_recomputation(current, model, outputs)
        current.in_model = False
        return outputs

    def _add_second_view(
        self, current: Forward, model: Any, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any
    ) -> Any:
        """Run a second forward for the loss consistency, collect the loss, and return the outputs with it attached."""
        first, ids, requested = current.view, current.token_ids, current.wants_router_logits
        assert first is not None
        require_second_view(model, options)
        share = word_noise_of(first)
        if not self._views_differ:
            require_views_differ(model, share)
            self._views_differ = True
        noised = None
        if share:
            if ids is None:
                raise ValueError(NO_IDS)
            noised = with_noise(ids, share, options.get("attention_mask"), self.image_tokens)
            current.token_ids = noised
        given, named = second_inputs(model, inputs, options, noised)
        current.view, current.wants_router_logits = [], False
        self._enable_learning(current, False)
        with entered(SECOND_VIEW):
            model.forward(*given, **named)
        self._enable_learning(current, True)
        second, current.view = current.view, None
        current.token_ids, current.wants_router_logits = ids, requested
        loss = consistency_of(first, second, first[-1][0].gates.device)
        key = first_with_gradient(outputs)
        if key is None:
            assert current.layer_losses is not None
            current.layer_losses.append(loss)
            return outputs
        attached = self.collector.attach({"consistency": loss}, loss, outputs[key], current)
        return with_output(outputs, key, attached)

    def _end_base(self, base: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        current = self.thread.current
        if current.in_base:
            self._keep_for_recomputation(current, base, outputs)
            current.in_base = False

    def _keep_for_recomputation(self, current: Forward, model: nn.Module, outputs: Any) -> None:
        """Keep what a backward needs to run layers again, and forget it after a forward in evaluation.

        A forward in training without gradients may run between another one and its backward; so may one that has raised.
        """
        if not model.training:
            self._recomputed.token_ids = self._recomputed.routes = None
            for clear in self.on_forward_end:
                clear()
        elif outputs is not None and torch.is_grad_enabled():
            kept = self._recomputed
            kept.token_ids, kept.routes = current.token_ids, current.routes
            kept.wants_router_logits = current.wants_router_logits
        current.token_ids = current.routes = current.view = None
        current.is_plain = current.wants_router_logits = False
        current.may_have_backward = True
        if self._training.get("forward") is current:
            del self._training["forward"]


def image_tokens(model: Any) -> list[int]:
    """Return the token ids in whose place a vision and language model puts the parts of an image or a video."""
    found = (getattr(model.config, name, None) for name in IMAGE_TOKENS)
    return sorted({token for token in found if isinstance(token, int) and not isinstance(token, bool)})


def modality_of(ids: Tensor | None, image_tokens: list[int]) -> Tensor | None:
    """Return (B,N): 1 for token `ids (B,N)` that stand for a part of an image, 0 for text; None if that is not known."""
    if ids is None or not image_tokens:
        return None
    return torch.stack([ids == token for token in image_tokens]).any(0).long()


def as_token_ids(given: Any) -> Tensor | None:
    """Return a model's first argument if it is token ids (B,N); None if it is pixels or embeddings."""
    return given if isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point() else None


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


class LossCollector:
    """Collects the layers' losses in a forward and puts them into the model's outputs.

    Losses are collected only while the model's forward runs: a recomputation during the backward adds none.

    adds_logits   add router logits to the outputs: the family does not
    """

    def __init__(self, model: nn.Module, specs: Mapping[str, LayerSpec], adds_logits: bool) -> None:
        self._config, self.adds_logits = text_config(model), adds_logits
        # The coefficient of the balance loss that the family adds to its loss if router logits are requested.
        self._native_coefficient = float(model.__dict__.get("_native_balance", 0.0))
        # Divides `outputs.aux_loss`, so that a trainer's coefficient times it is the routers' loss.
        self._aux_loss_divisor = float(getattr(self._config, "router_aux_loss_coef", 1.0)) or 1.0
        has_losses = any(spec.losses for spec in specs.values())
        # Compute a balance loss if router logits are requested, as the family does: no layer has losses.
        self.balance_on_request = not has_losses and any(spec.router != NATIVE for spec in specs.values())
        self._compares_views = any(spec.losses is not None and spec.losses.consistency for spec in specs.values())
        self._replaces_balance = has_losses or self.balance_on_request  # if not, the family computes its own
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
        if forward.view is not None:
            forward.view.append((routing, losses, token_mask))
        if forward.wants_router_logits and (forward.in_model or not torch.compiler.is_compiling()):
            self._collect_requested(routing, losses, token_mask, k, forward)
        if not routing.losses or not forward.learning:
            return weights
        return self.attach(routing.losses, routing.loss, weights, forward)

    def attach(self, losses: Mapping[str, Tensor], loss: Tensor, weights: Tensor, forward: Forward) -> Tensor:
        """Collect `loss`, the sum of `losses`; return `weights`, or another tensor of the forward, with it attached."""
        if forward.with_gradient and forward.in_model and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        device = loss.device.type
        if torch.is_grad_enabled() and loss.requires_grad:
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            is_fp16 = torch.float16 in (weights.dtype, autocast)
            if not torch.compiler.is_compiling():
                terms = {} if self.sums is None else {name: value.detach() for name, value in losses.items()}
                loss, weights = AttachLoss.apply(loss, weights, self, is_fp16, terms)
            elif is_fp16 and self.loss_scale is None:  # compiled code does not know whether the training loss contains it
                raise ValueError(FP16)
            else:
                scale = 1.0 if self.loss_scale is None else self.loss_scale
                loss, weights = CompiledAttachLoss.apply(loss, weights, scale)
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
            accelerate = sys.modules.get("accelerate.state")
            is_last = accelerate is None or accelerate.GradientState().sync_gradients  # before the optimizer step
            if not is_last or has_gradient(node):
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

    def _collect_requested(self, routing: Routing, losses: Any, token_mask: Tensor | None, k: int, forward: Forward) -> None:
        """Collect the logits, and a loss if the router computed none, for a caller that requested router logits."""
        if self.balance_on_request and forward.in_model and forward.with_gradient and not torch.is_grad_enabled():
            raise ValueError(REENTRANT)
        # A recomputation must save the same tensors as the forward, but its results are not counted.
        requested, logits = (forward.requested_losses, forward.logits) if forward.in_model else ([], [])
        over_ranks = mean_over_ranks if torch.is_grad_enabled() and forward.learning else single_process_mean
        if self.adds_logits:
            logits.append(routing.logits)
        if self.balance_on_request:
            requested.append(k * balance(routing, token_mask, over_ranks))  # with equal load the family's is k, ours 1
        elif isinstance(losses, Losses) and not routing.losses:
            terms = losses(routing, token_mask, single_process_mean).values()
            requested.append(torch.stack([*terms, routing.gates.new_zeros(())]).sum())

    def begin(self, forward: Forward, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Start collecting; return the forward's options without a request for router logits that it must not get."""
        forward.layer_losses = [] if model.training and forward.learning else None
        has_views = self._compares_views and forward.layer_losses is not None and forward.with_gradient
        forward.view = [] if has_views else None
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
        if not (dataclasses.is_dataclass(outputs) and isinstance(outputs, dict)):  # as transformers' outputs are
            return outputs
        if type(outputs) not in _classes_with_fields.values():
            outputs = class_with_router_fields(type(outputs))(**outputs)
        layer_losses, requested = forward.layer_losses, forward.requested_losses
        if layer_losses:
            outputs.router_loss = _total(layer_losses, layer_losses[-1].device)
        if not forward.wants_router_logits:
            return outputs
        if self.balance_on_request:
            outputs.aux_loss = _mean(requested, requested[-1].device) if requested else outputs.aux_loss
        elif layer_losses:
            outputs.aux_loss = outputs.router_loss / self._aux_loss_divisor
        elif requested:
            outputs.aux_loss = _total(requested, requested[-1].device) / self._aux_loss_divisor
        if self.adds_logits:
            outputs.router_logits = tuple(forward.logits)
        return outputs

    def _loss_to_add(self, model: nn.Module, options: dict[str, Any], device: torch.device, forward: Forward) -> Any:
        """Return the routers' loss that is added to the model's own loss; 0 if there is none."""
        if forward.layer_losses:
            return _total(forward.layer_losses, device) * share_of_batch(model, options)
        if self.balance_on_request and forward.requested_losses and self._native_coefficient:
            return self._native_coefficient * _mean(forward.requested_losses, device) * share_of_batch(model, options)
        return 0.0


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
        if isinstance(labels, Tensor):
            from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

            # The Trainer decides in the same way, when it counts items, that the first label is never a target.
            is_shifted = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
            labels = labels[..., 1:] if is_shifted else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    return mean_over_ranks((labels != IGNORED_LABEL).sum() / items)


ROUTER_FIELDS = ("router_loss", "aux_loss", "router_logits")

_classes_with_fields: dict[type, type] = {}


def class_with_router_fields(kind: type) -> type:
    """Return a subclass of the output class `kind` with `ROUTER_FIELDS`; the same one for every call."""
    if kind not in _classes_with_fields:
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = [(name, Any, dataclasses.field(default=None)) for name in ROUTER_FIELDS if name not in known]
        namespace = {"__doc__": kind.__doc__, "__reduce_ex__": _reduce}
        made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace=namespace)
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
