"""One forward, observed: what every MoE layer was given, chose and returned, and what the model predicted.

T tokens, L layers, R predictions (one a token for language models, one a picture for classifiers)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.auditing.subject import Audited, Sample
from holdfast.hub import Call, calls, trace
from holdfast.metrics.tasks import IGNORED, token_nll
from holdfast.routing import Routing

Moved = Callable[[int, Tensor], Tensor]  # (layer, router's input) -> what the router gets instead


@final
@dataclass(frozen=True)
class LayerRecord:
    """One MoE layer in one forward."""

    routing: Routing
    tokens: Tensor  # (T,d): what its experts were given
    routed: Tensor  # (T,d): what they returned, weighted and summed
    output: Tensor  # (T,d): of the whole layer, shared experts included
    weights: torch.dtype  # in which the experts were given their weights


@final
@dataclass(frozen=True)
class Predictions:
    best: Tensor  # (R,) int64
    nll: Tensor  # (R,) float64
    labels: Tensor  # (R,) int64, -100 where there is nothing to predict
    per_token: bool


@final
@dataclass(frozen=True)
class Observation:
    layers: list[LayerRecord]
    calls: list[Call]
    token_mask: Tensor | None  # (T,) bool, True where a token is real
    predictions: Predictions | None
    sequences: int

    def real(self, layer: int) -> Tensor:
        """(R,) the rows of a layer that are no padding."""
        rows = torch.arange(len(self.layers[layer].tokens), device=self.layers[layer].tokens.device)
        return rows if self.token_mask is None else rows[self.token_mask.to(rows.device)]

    def require_finite(self) -> None:
        """Weights may be finite and their products overflow, in float16 above all."""
        for layer, call in enumerate(self.calls):
            if not bool(_rows(call.tokens)[self.real(layer)].isfinite().all()):
                raise ValueError(f"{call.name}: its inputs are NaN or infinite; audit the model in another dtype.")


def observe(audited: Audited, sample: Sample, *, moved: Moved | None = None) -> Observation:
    """A forward of the sample, with the routers' inputs `moved` if that is given."""
    with ExitStack() as stack:
        if moved is not None:
            stack.enter_context(_moving(audited, moved))
        heard = stack.enter_context(calls(audited.model))
        routes = stack.enter_context(trace(audited.model))
        seen = stack.enter_context(_watching(audited))
        out = audited.forward(sample.inputs)
        routings = list(routes)
        token_mask = None if routes.token_mask is None else routes.token_mask.reshape(-1)
    layers = [LayerRecord(routing, **kept) for routing, kept in zip(routings, seen, strict=True)]
    return Observation(layers, list(heard), token_mask, _predictions(out, sample.labels), sample.size)


@contextmanager
def _watching(audited: Audited) -> Iterator[list[dict[str, Any]]]:
    """The inputs and outputs of every layer's experts, and of the layer."""
    seen: list[dict[str, Any]] = [{} for _ in audited.sites]
    handles = []
    for place, site in enumerate(audited.sites):
        handles.append(site.experts.register_forward_hook(partial(_note_experts, seen[place])))
        handles.append(site.block.register_forward_hook(partial(_note_output, seen[place])))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _note_experts(into: dict[str, Any], module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
    into.update(tokens=_rows(given[0]), routed=_rows(output), weights=given[2].dtype)


def _note_output(into: dict[str, Any], module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
    into["output"] = _rows(output[0] if isinstance(output, tuple) else output)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


@contextmanager
def _moving(audited: Audited, moved: Moved) -> Iterator[None]:
    def move(layer: int, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (moved(layer, given[0]), *given[1:])

    handles = [route.register_forward_pre_hook(partial(move, layer)) for layer, route in enumerate(audited.routes)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _predictions(out: Any, labels: Tensor | None) -> Predictions | None:
    """None for a model that neither predicts tokens nor classifies."""
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        return None
    best = logits.argmax(-1)
    targets = torch.full_like(best, IGNORED) if labels is None or labels.shape != best.shape else labels.to(best.device)
    nll = token_nll(logits, targets).double()
    return Predictions(best.reshape(-1), nll.reshape(-1), targets.reshape(-1), per_token=logits.dim() == 3)
