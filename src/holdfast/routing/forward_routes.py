"""Recorded routes in a model's forward: take `routed_experts` off its arguments, and give each layer its part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.torch_internals import is_recomputing
from holdfast.routing.threads import PerThread, entered, entered_keys

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
    if isinstance(model, nn.DataParallel) or getattr(model, "_is_replica", False):
        raise ValueError(DATA_PARALLEL)


class _ReplayedForward:
    def __init__(self) -> None:
        self.routes: Tensor | None = None  # (B,N,L,K), the recorded routes
        self.in_model = self.in_base = False  # which forwards run: the model's, its base's by itself


class _ReplayedForwards(PerThread):
    def __init__(self) -> None:
        self.current = _ReplayedForward()  # a compiler does not see changes of this thread's own attributes


class _RoutesOnce:
    def __init__(self, replay: "RouteReplay", routes: Any) -> None:
        self.replay, self.routes = replay, [routes]  # empty when a forward has taken them


class RouteReplay:
    """Hooks around a model's forward that take `routed_experts`, the recorded routes (B,N,L,K), off its arguments.

    A recomputation by activation checkpointing reads those of the last forward that may have a backward.
    """

    def __init__(self, model: Any, layers: int) -> None:
        self._model = model
        self.layers = layers  # L: how many layers of the model can replay
        self._forwards = _ReplayedForwards()
        self._latest: Tensor | None = None
        self._training: dict[str, _ReplayedForward] = {}  # the forward in training mode that runs, under "forward"
        self._captures = 0  # how many layers asked for their place
        base, own = getattr(model, "base_model", model), {"with_kwargs": True, "prepend": True}
        self._handles = [model.register_forward_pre_hook(self._begin_forward, **own)]
        self._handles.append(model.register_forward_hook(self._end_forward, always_call=True))
        if base is not model:  # it may be called directly, or by the model
            self._handles.append(base.register_forward_pre_hook(self._begin_base, **own))
            self._handles.append(base.register_forward_hook(self._end_base, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

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

    @property
    def _current(self) -> _ReplayedForward:
        return self._forwards.current

    @property
    def routes(self) -> Tensor | None:
        """The routes (B,N,L,K) of the current forward, or of the one that a backward recomputes; None if all is live."""
        if self._current.in_model or self._current.in_base:
            return self._current.routes
        return self._latest if torch.compiler.is_compiling() or is_recomputing() else None

    def _begin_forward(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        require_no_copies(model)
        if model.training and self._training.setdefault("forward", self._current) is not self._current:
            raise ValueError(TWO_THREADS)
        self._current.in_model = True
        return self._take_routes(model, inputs, options)

    def _begin_base(self, base: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._current.in_model:
            return None
        self._current.in_base = True
        return self._take_routes(base, inputs, options)

    def _take_routes(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given, options = options.get(ROUTED_EXPERTS), {name: options[name] for name in options if name != ROUTED_EXPERTS}
        for once in () if torch.compiler.is_compiling() else entered_keys():
            if isinstance(once, _RoutesOnce) and once.replay is self:
                if given is not None or not once.routes:
                    raise ValueError(
                        f"holdfast.replay gives routes to one forward; to this one, pass {ROUTED_EXPERTS}= alone."
                    )
                given = once.routes.pop()
        self._current.routes = None if given is None else self._checked(model, given)
        return inputs, options

    def _checked(self, model: nn.Module, given: Any) -> Tensor:
        """Return what the caller gave as a tensor (B,N,L,K). Raise ValueError if it is none, or has other layers."""
        if hasattr(given, "require_model"):  # a `Routes`, which knows what model it is of
            given.require_model(self._model)
            given = given.experts
        if not isinstance(given, Tensor) or given.dim() != 4:
            found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{ROUTED_EXPERTS} is {found}; expected a tensor (B, N, L, K) or a holdfast.Routes.")
        if given.shape[2] != self.layers:
            raise ValueError(
                f"{ROUTED_EXPERTS} has {given.shape[2]} layers, but {self.layers} of this model can replay; a layer that "
                'was not rerouted can after holdfast.reroute(model, "native@1"), here MoE layer 1, which changes no number.'
            )
        return given

    def _end_forward(self, model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        # A forward in training without gradients may run between another one and its backward; so may one that has raised.
        if not model.training:
            self._latest = None
        elif outputs is not None and torch.is_grad_enabled():
            self._latest = self._current.routes
        self._current.in_model, self._current.routes = False, None
        if self._training.get("forward") is self._current:
            del self._training["forward"]

    def _end_base(self, base: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        if self._current.in_base:
            self._current.in_base = False
            self._end_forward(base, inputs, outputs)
