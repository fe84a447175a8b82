"""Random routings for the tests of routing metrics: ragged slots, sentinels, gates that do not sum to 1."""

import math
from typing import Any

import torch
from torch import Tensor

from holdfast.routing import Routing


def random_routing(tokens: int = 63, experts: int = 7, slots: int = 3, seed: int = 0, *, ragged: bool = False) -> Routing:
    """The `slots` best of random logits, softmax weights; ragged: a random number of them, perhaps none."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, experts, generator=generator)
    gates = logits.softmax(-1)
    weights, chosen = gates.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :slots].clone(), chosen[:, :slots].clone()
    if ragged:
        counts = torch.randint(0, slots + 1, (tokens, 1), generator=generator)
        unused = torch.arange(slots) >= counts
        chosen, weights = chosen.masked_fill(unused, experts), weights.masked_fill(unused, 0.0)
    return Routing(logits, gates, chosen, weights)


def rows(routing: Routing, which: slice | Tensor) -> Routing:
    return Routing(routing.logits[which], routing.gates[which], routing.experts[which], routing.weights[which])


def padded(routing: Routing, seed: int = 0) -> tuple[Routing, Tensor]:
    """The same tokens with others strewn in between, NaN and wildly routed, and the mask that tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts = routing.gates.shape
    real = torch.zeros(2 * tokens, dtype=torch.bool)
    real[torch.randperm(2 * tokens, generator=generator)[:tokens]] = True
    nan = torch.full((2 * tokens, experts), math.nan)
    slots = torch.zeros(2 * tokens, routing.experts.shape[1])
    strewn = Routing(nan.clone(), nan.clone(), slots.long(), slots + 1e6)
    for name in ("logits", "gates", "experts", "weights"):
        getattr(strewn, name)[real] = getattr(routing, name)
    return strewn, real.view(2, tokens)


def updated(metric: Any, *given: Any) -> Any:
    """Return the metric after one update with these arguments."""
    metric.update(*given)
    return metric


def sets(routing: Routing) -> list[set[int]]:
    experts = routing.gates.shape[1]
    return [{e for e in row if e < experts} for row in routing.experts.tolist()]


def leaves(result: Any) -> list[float | None]:
    """All numbers of a result, whatever it is made of, in order."""
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in leaves(value)]
    if isinstance(result, list | tuple):
        return [leaf for value in result for leaf in leaves(value)]
    if hasattr(result, "__dataclass_fields__"):
        return leaves([getattr(result, name) for name in result.__dataclass_fields__])
    return [result]
