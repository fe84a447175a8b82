"""What can be done against the mismatch of rollout and training: three remedies beside the live router, and how a model gets
each of them.

live       nothing: the model's own router on both sides
replay     training uses the experts of the rollout, with live weights
smooth     both sides use `smooth`, whose output does not jump where experts change; without training, after calibration
float32    both sides compute scores in float32, with router weights that are not rounded

`replay` is a change of the trainer alone. The two others change the rollout as well, so they need a rollout of their own.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.auditing.model_and_data import AuditedModel, evaluation_mode
from holdfast.auditing.run import is_rerouted
from holdfast.hub import calibrate, reroute, restore
from holdfast.hub.context import NOT_CAUSAL
from holdfast.hub.install import hooks_of
from holdfast.hub.layers import moe_layers

LIVE, REPLAY, SMOOTH, FLOAT32 = "live", "replay", "smooth", "float32"
REMEDIES = (LIVE, REPLAY, SMOOTH, FLOAT32)
ABOUT = {
    LIVE: "the model's own router, live",
    REPLAY: "the rollout's experts, replayed",
    SMOOTH: "another router on both sides, live",
    FLOAT32: "routing in float32 on both sides, live",
}
SAME_RULE = "smoe"  # the checkpoint's scores and its rule, computed in float32


def reason_against(remedy: str, model: Any) -> str | None:
    """Return why a model cannot have a remedy; None if it can."""
    layers, hooks = moe_layers(model), hooks_of(model)
    own = [layer.router is not None for layer in layers]
    if remedy == REPLAY and hooks is not None and hooks.forwards.layers < len(layers):
        return 'some layers were not rerouted and cannot replay; holdfast.reroute(model, "native@...") makes them able to.'
    if remedy == SMOOTH and is_rerouted(layers):
        return "the model is already rerouted, and its routers could not be put back afterwards."
    if remedy == FLOAT32 and is_rerouted(layers) and not all(own):
        return "some layers are rerouted and others have the family's own gate, which computes in the model's dtype."
    return None


def require_router(model: Any, router: str, *, decode: bool) -> None:
    """Raise ValueError if the model cannot have the router of `smooth`, or cannot decode with its own router or this one."""
    _require_decoding(model, decode)
    if reason_against(SMOOTH, model) is None:
        with warnings.catch_warnings(action="ignore"), with_router(model, router):
            _require_decoding(model, decode)


def _require_decoding(model: Any, decode: bool) -> None:
    hooks = hooks_of(model)
    if decode and hooks is not None and hooks.breaks_causality:
        raise ValueError(f"{NOT_CAUSAL}; its rollout cannot be one token at a time (rollout_decode).")


@contextmanager
def with_replay(model: Any) -> Iterator[None]:
    """Give an unchanged model the hooks that take recorded routes, without a change of any number."""
    if hooks_of(model) is not None:
        yield
        return
    with _rerouted(model, "native"):
        yield


@contextmanager
def with_router(model: Any, router: str, seed: int = 0) -> Iterator[None]:
    """Give the model another router on the same weights. New weights of a router are drawn from `seed`."""
    with _rerouted(model, router, seed):
        yield


@contextmanager
def with_float32_routing(model: Any) -> Iterator[None]:
    """Let the model compute its own rule in float32; Holdfast's routers do so already."""
    if all(layer.router is not None for layer in moe_layers(model)):
        yield
        return
    with _rerouted(model, SAME_RULE):
        yield


@contextmanager
def _rerouted(model: Any, router: str, seed: int = 0) -> Iterator[None]:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        reroute(model, router)
    try:
        with evaluation_mode(model):
            yield
    finally:
        restore(model)


@torch.no_grad()
def calibrate_routers(audited: AuditedModel, forwards: Callable[[], Any]) -> None:
    """Let the routers learn their state, such as the width of `smooth`, from `forwards`. The rest of the model stays in
    evaluation mode: dropout would change what routers read."""
    routers = [layer.router for layer in moe_layers(audited.model) if layer.router is not None]
    with calibrate(audited.model):
        for router in routers:
            router.train()
        try:
            forwards()
        finally:
            for router in routers:
                router.eval()  # commits what the last batch has staged
