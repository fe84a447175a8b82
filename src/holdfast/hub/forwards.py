"""The forwards of a changed model: which one a layer runs in, and what the caller has given to it.

`ForwardHooks` are hooks around the forward of the model, and of its base model, which may also be called by itself. They
note what the layers inside must know in a `Forward`, one for each thread: token ids, whether router logits are requested,
recorded routes. `routed_experts` is taken off the arguments: trainers shuffle, split and pad batches, and only what is in
the batch follows, but no family's forward knows this argument.

A backward with activation checkpointing runs layers again outside of any forward. They then read the `Forward` that is
recomputed: the last one that may have a backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families import as_token_ids, image_tokens
from holdfast.hub.losses import ROUTER_LOGITS, Forward, LossCollector
from holdfast.kernels.torch_internals import is_recomputing
from holdfast.routing import Router
from holdfast.routing.threads import PerThread, entered, entered_keys, one_more

ROUTED_EXPERTS = "routed_experts"  # the argument of a model with recorded routes, named as in vLLM and SGLang
DATA_PARALLEL = (
    "nn.DataParallel runs copies of the model in threads, whose routes and router state are lost: use "
    "DistributedDataParallel (torchrun), or one device (CUDA_VISIBLE_DEVICES=0)."
)
TWO_THREADS = (
    "two threads run this model at once in training mode, in which its routers have one state and one set of losses: train "
    "in one thread, and run the others on a copy of the model or in evaluation mode."
)


def require_no_copies(model: nn.Module) -> None:
    """Raise ValueError for `nn.DataParallel` and for the copies of modules that it makes."""
    if isinstance(model, nn.DataParallel) or model.__dict__.get("_is_replica", False):
        raise ValueError(DATA_PARALLEL)


class _ThreadForward(PerThread):
    def __init__(self) -> None:
        self.current = Forward()  # never replaced: a compiler does not see changes of this thread's own attributes


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

    def __init__(self, model: Any, routers: Sequence[Router], collector: LossCollector, layers: int) -> None:
        self._model, self._routers, self.collector, self.layers = model, routers, collector, layers
        self.image_tokens = image_tokens(model)
        self.on_forward_end: list[Callable[[], None]] = []  # called when the data of a forward are no longer needed
        self.thread = _ThreadForward()  # where `is_plain`, its `current` is `forward`
        self._recomputed = Forward()  # what a recomputation reads
        self._training: dict[str, Forward] = {}  # the forward in training mode that runs, under "forward"
        self._calibrations: list[None] = []  # an entry for each `calibration` that is entered
        self._captures = 0  # how many layers asked for their place
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

    def next_layer(self) -> int:
        """Return the place in recorded routes of the next layer: captures are made in the order of the layers."""
        self._captures += 1
        return self._captures - 1

    @contextmanager
    def once(self, routes: Any) -> Iterator[None]:
        """Inside the `with`, one forward of this thread or asyncio task gets these routes.

        Raise ValueError at a second forward, and if there was none. A compiled forward does not get them.
        """
        once = _RoutesOnce(self, routes)
        with entered(once):
            yield
        if once.routes:
            raise ValueError(
                "no forward took the routes of holdfast.replay: run the model inside the `with`, in the same thread."
            )

    def generation(self) -> AbstractContextManager[None]:
        """Inside the `with`, forwards of this thread without gradients update no state, even during calibration."""
        return one_more(self.thread.current.generations)

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
            self._enable_learning(current, current.with_gradient or (bool(self._calibrations) and not current.generations))
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
        given = options.get(ROUTED_EXPERTS)
        if ROUTED_EXPERTS in options:
            options = {name: value for name, value in options.items() if name != ROUTED_EXPERTS}
        for once in () if torch.compiler.is_compiling() else entered_keys():
            if isinstance(once, _RoutesOnce) and once.hooks is self:
                if given is not None or not once.routes:
                    raise ValueError(
                        f"holdfast.replay gives routes to one forward; to this one, pass {ROUTED_EXPERTS}= alone."
                    )
                given = once.routes.pop()
        current.routes = None if given is None else self._checked(given)
        return options

    def _checked(self, given: Any) -> Tensor:
        """Return what the caller gave as a tensor (B,N,L,K). Raise ValueError if it is none, or has other layers."""
        if hasattr(given, "require_model"):  # a `Routes`, which knows what model it is of
            given.require_model(self._model)
            given = given.experts
        if not isinstance(given, Tensor) or given.dim() != 4:
            kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{ROUTED_EXPERTS} is {kind}; expected a tensor (B, N, L, K) or a holdfast.Routes.")
        if given.shape[2] != self.layers:
            raise ValueError(
                f"{ROUTED_EXPERTS} has {given.shape[2]} layers, but {self.layers} of this model can replay; a layer that "
                'was not rerouted can after holdfast.reroute(model, "native@1"), here MoE layer 1, which changes no number.'
            )
        return given

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
        self._enable_learning(current, True)
        outputs = self.collector.end(current, model, options, outputs)
        self._keep_for_recomputation(current, model, outputs)
        current.in_model = False
        return outputs

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
        current.token_ids = current.routes = None
        current.is_plain = current.wants_router_logits = False
        current.may_have_backward = True
        if self._training.get("forward") is current:
            del self._training["forward"]
