"""What the routing attack reads off a router or a model: for each layer, sets of experts and the keys they were chosen by.

T tokens, E experts, L layers
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.routing import Routing

Route = Callable[[Tensor], Routing | Sequence[Routing] | Tensor]  # tokens (..., d) to routings, or to scores (..., E)
TINY = torch.finfo(torch.float32).tiny


class Layer(NamedTuple):
    keys: Tensor  # (T,E), differentiable: what a higher value of makes an expert more likely to be chosen
    chosen: Tensor  # (T,E) bool


class Readings:
    """Reads `route` at tokens given as rows (T,d); sets are whole, or the first k slots of each token.

    Keys are the logits where gates follow their order, which is then what selection sorts by, unrounded; else log gates,
    what an informer or another rule made of them. Where the number of experts is free and gates are shares, a threshold on
    gates decides, and keys are log gates as well. Which it is, is decided once, at the clean tokens.
    """

    def __init__(self, route: Route, tokens: Tensor, k: int | None) -> None:
        self.route, self.shape, self.k = route, tokens.shape, k
        rows = tokens.detach().reshape(-1, tokens.shape[-1])
        with torch.no_grad():
            routings = self._routings(rows)
        self.ragged = [_is_ragged(routing) and k is None for routing in routings]
        self.by_logits = [_by_logits(routing, ragged) for routing, ragged in zip(routings, self.ragged, strict=True)]
        self.clean = [self._layer(index, routing) for index, routing in enumerate(routings)]

    def __call__(self, rows: Tensor) -> list[Layer]:
        routings = self._routings(rows)
        if len(routings) != len(self.clean):
            raise ValueError(f"the route gave {len(routings)} layers, {len(self.clean)} for the clean tokens.")
        return [self._layer(index, routing) for index, routing in enumerate(routings)]

    def changed(self, layers: list[Layer]) -> Tensor:
        """(L,T) bool: whose set is another one than for the clean tokens."""
        return torch.stack([(now.chosen != was.chosen).any(-1) for now, was in zip(layers, self.clean, strict=True)])

    def margins(self, layers: list[Layer]) -> Tensor:
        """(L,T): by how much the best expert outside the clean set is above the worst inside it; negative while it holds."""
        return torch.stack([_margin(now.keys, was.chosen) for now, was in zip(layers, self.clean, strict=True)])

    def _routings(self, rows: Tensor) -> list[Routing]:
        answer = self.route(rows.view(self.shape))
        if isinstance(answer, Tensor):
            answer = self._from_scores(answer)
        routings = [answer] if isinstance(answer, Routing) else list(answer)
        for routing in routings:
            if routing.gates.shape[0] != rows.shape[0]:
                got, expected = routing.gates.shape[0], rows.shape[0]
                raise ValueError(f"the route gave routes for {got} tokens, but {expected} were put in.")
        if not routings:
            raise ValueError("the route gave no routings: the model has no MoE layer, or none was recorded.")
        return routings

    def _from_scores(self, scores: Tensor) -> Routing:
        if self.k is None:
            raise ValueError("the route gives scores; say k, how many of the best experts a token uses.")
        scores = scores.flatten(0, -2).float()
        experts = top(scores, self.k)
        gates = scores.softmax(-1)
        return Routing(scores, gates, experts, gates.gather(-1, experts))

    def _layer(self, index: int, routing: Routing) -> Layer:
        keys = routing.logits if self.by_logits[index] else routing.gates.clamp_min(TINY).log()
        if self.k is None:
            return Layer(keys, routing.chosen)
        if self.k > routing.experts.shape[-1]:
            raise ValueError(f"k is {self.k}, but tokens have {routing.experts.shape[-1]} experts at most.")
        core = Routing(routing.logits, routing.gates, routing.experts[:, : self.k], routing.weights[:, : self.k])
        return Layer(keys, core.chosen)


def _is_ragged(routing: Routing) -> bool:
    """May the number of experts a token vary? It does, or there is a slot for every expert."""
    return bool((~routing.used).any()) or routing.experts.shape[-1] == routing.gates.shape[-1]


def _by_logits(routing: Routing, ragged: bool) -> bool:
    order = routing.logits.argsort(dim=-1, descending=True)
    follows = bool((routing.gates.gather(-1, order).diff(dim=-1) <= 0).all())
    shares = bool(((routing.gates.sum(-1) - 1).abs() < 1e-3).all())
    return follows and not (ragged and shares)


def _margin(keys: Tensor, chosen: Tensor) -> Tensor:
    """(T,): best outside minus worst inside; an empty side counts as 0, so that the other one can still be pushed."""
    outside = keys.masked_fill(chosen, -torch.inf).amax(-1)
    inside = keys.masked_fill(~chosen, torch.inf).amin(-1)
    return outside.where(~chosen.all(-1), 0.0) - inside.where(chosen.any(-1), 0.0)
