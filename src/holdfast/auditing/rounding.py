"""What shorter numbers do to routes: which tokens rounding could send elsewhere, and which of them it does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.auditing.observing import Observation
from holdfast.auditing.subject import Audited, weights_as
from holdfast.metrics import set_changes
from holdfast.metrics.accumulator import Accumulator
from holdfast.routing import Router, Routing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Undecided(Accumulator[dict[str, Any]]):
    """The share of tokens that are undecided at a dtype, and of these and of the others the share that it really flips.

    The flips are of one router asked again, the same inputs and the router's weights rounded; not of a whole forward, where
    inputs change as well. No decided token may be among them.
    """

    def update(self, alarm: Tensor, flips: Tensor) -> None:
        flips = flips.to(alarm.device)
        self._add(tokens=len(alarm), alarm=alarm.sum(), among=(alarm & flips).sum(), others=(~alarm & flips).sum())

    def result(self) -> dict[str, Any]:
        alarm, tokens = float(self._sums["alarm"]), self._per("tokens")
        return {
            "share": alarm / tokens,
            "of_undecided_flip": float(self._sums["among"]) / alarm if alarm else None,
            "decided_that_flip": int(self._sums["others"]),
        }


def rounded(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return tokens.to(dtype).to(tokens.dtype)


def ask_rounded(audited: Audited, layer: int, seen: Observation, dtype: torch.dtype) -> Tensor:
    """(T,) bool: whose set changes when this layer's router is asked again with inputs and weights rounded to `dtype`."""
    call = seen.calls[layer]
    with weights_as([audited.scorers()[layer]], dtype, only_rounded=True):
        asked = ask(call, rounded(call.tokens, dtype))
    return set_changes(seen.layers[layer].routing, asked, audited.core(layer))


def in_its_dtype(gate: Callable[[Tensor], Routing], dtype: torch.dtype, tokens: Tensor) -> Routing:
    """A family's gate asked with tokens of another dtype, as attacks and votes move them in float32."""
    return gate(tokens.to(dtype))


def ask(call: Any, tokens: Tensor) -> Routing:
    """The router of a call once more, about other tokens in the same context."""
    routing: Routing = call.route(tokens, call.context) if isinstance(call.route, Router) else call.route(tokens)
    return routing
