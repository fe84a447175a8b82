"""Capacity: a limit for the number of tokens of each expert, around any selector.

    C = ceil(factor * slots / E), with slots the number of experts that the wrapped selector chose for all real tokens; an
    expert may have a factor of its own

What a token asked for is in `Routing.requested`, how many experts it lost in `Routing.dropped`. Losses of the load count the
former: the limit would hide overload from them. The limit holds in training and in evaluation. A token's experts depend on
the other tokens of the batch, also on later ones, so a causal model cannot generate with it.

**Several ranks.** In training the limit is over the tokens of all ranks, so that two ranks route as one process with both
batches does. Each rank sends the gates and the preferences of its tokens to all others, (2 E + 1) numbers per token, and the
host waits for the device. In evaluation, where ranks may run different numbers of forwards, each rank limits its own tokens.

T tokens, E experts, K slots per token, C places per expert, the same for all or (E,)
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from holdfast.checked import as_ratio
from holdfast.errors import require_known
from holdfast.kernels.operators import operator
from holdfast.kernels.select import ordered_keys, top
from holdfast.routing.balanced import BATCH_WIDE, places_of_each
from holdfast.routing.declarations import FLOAT, ActiveExperts, Conditions, Cost, LayerSizes, NoCertificate
from holdfast.routing.parts import Noise, Selector, SelectorDeclarations, Traits
from holdfast.routing.records import Context
from holdfast.routing.rules import EXCLUDED, Scores, Selection
from holdfast.routing.state import gather_over_ranks, several_ranks

Policy = Literal["drop", "next", "reroute"]
Order = Literal["gate", "position"]
POLICIES: tuple[Policy, ...] = ("drop", "next", "reroute")
ORDERS: tuple[Order, ...] = ("gate", "position")
ROUNDS_PER_CHECK = 8  # on a GPU, after how many rounds the host reads whether a token still asks for an expert
LOWEST = torch.iinfo(torch.int64).min


class Capacity(Selector):
    """Limit the wrapped selector `base` to C tokens per expert.

    factor          C over the mean number of tokens of an expert; one number, or one for each expert, in brackets as
                    1:0.5:2
    eval_factor     the factor of all experts in evaluation, if it is another one (V-MoE: 1.05 in training, 4 in evaluation)
    policy          what a token does that an expert has no place for. "drop": it goes without (Switch, GShard). "next": in
                    rounds, it asks its next best expert that has a place left; no token loses the place that it has.
                    "reroute": it asks its next best expert, and a better token takes the place of a worse one, which asks
                    further (deferred acceptance). What finds no place is dropped. An expert whose gate is 0 is never asked
    order           which tokens an expert prefers. "gate": those with the largest gates. "position": first choices before
                    second choices, and then in the order of the batch, as in Switch. Of equal tokens the earlier one comes
                    first

    Weights are those of the wrapped selector for the experts that are left: renormalised if its rule does that. Tokens that
    keep their experts keep their weights exactly. Padding takes no places and keeps its experts. With `policy="next"` or
    "reroute", the host reads on a GPU whether the rounds have ended, once in `ROUNDS_PER_CHECK` rounds.
    """

    ratios: Tensor | None  # (2,E): numerators and denominators of the factors, if every expert has its own

    def __init__(
        self,
        base: Selector,
        experts: int,
        *,
        factor: float | list[float] = 1.25,
        eval_factor: float | None = None,
        policy: Policy = "drop",
        order: Order = "gate",
    ) -> None:
        super().__init__()
        factors = factor if isinstance(factor, list) else [factor]
        for given in (*factors, *(() if eval_factor is None else (eval_factor,))):
            if not 0 < given < math.inf:
                raise ValueError(f"a factor is {given}; the capacity of an expert must be positive and finite.")
        if isinstance(factor, list) and len(factor) != experts:
            raise ValueError(f"factor has {len(factor)} numbers; give one number, or one for each of the {experts} experts.")
        require_known("policy", policy, POLICIES)
        require_known("order", order, ORDERS)
        if (reason := base.declares.not_limited) is not None:
            raise ValueError(f"a capacity cannot limit {type(base).__name__}: {reason}; remove one of them.")
        self.base, self.experts, self.factor, self.policy, self.order = base, experts, factor, policy, order
        self.factors, self.eval_factor = factors, eval_factor
        # On the device from the start: a GPU that replays a graph cannot copy from the host.
        ratios = torch.tensor([as_ratio(each) for each in factors]).t().contiguous() if isinstance(factor, list) else None
        self.register_buffer("ratios", ratios)
        self.ratio = as_ratio(factors[0])  # of all experts, if there are no `ratios`; torch 2.11 cannot compile the function
        self.eval_ratio = None if eval_factor is None else as_ratio(eval_factor)
        self.traits = BATCH_WIDE & base.traits
        self.gate = base.gate

    @property
    def wrapped(self) -> tuple[Selector, ...]:
        return (*self.base.wrapped, self.base)  # type: ignore[arg-type]

    @property
    def training_traits(self) -> Traits:
        return BATCH_WIDE & self.base.training_traits

    def ranks(self, scores: Scores) -> Tensor:
        return self.base.ranks(scores)

    def adjusted(self, logits: Tensor, tokens: Tensor, context: Context, informed: bool) -> Tensor:
        return self.base.adjusted(logits, tokens, context, informed)

    def with_noise(self, noise: Noise, scores: Scores, tokens: Tensor) -> Scores:
        return self.base.with_noise(noise, scores, tokens)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return self.base.held_weights(experts, scores, live)

    def replayed_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return self.base.replayed_weights(experts, scores, live)

    @property
    def declares(self) -> SelectorDeclarations:
        base = self.base.declares
        return replace(
            base,
            cost=lambda sizes: Cost("capacity", gathered=FLOAT * (2 * self.experts + 1)),
            active=None if base.active is None else partial(_less_dropped, base.active),
            conditions=_no_conditions,
            snapshot=dict,
            fixed_sets=False,
            asks_others=self.policy != "drop",
            in_onnx=False,
        )

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        live: Selection = self.base(scores, tokens, context)
        real = context.real_tokens(tokens)
        requested = torch.zeros_like(live.gates, dtype=torch.bool)
        requested = _with_unused(requested).scatter(-1, live.experts, True)[..., :-1]
        preferences = self._preferences(live, requested, self.base.ranks(scores))
        chosen = self._limit(live.gates.detach(), preferences, requested, real)
        lost = requested.sum(-1) - chosen.sum(-1)
        experts, weights = self._weigh(scores, live, chosen)
        same = (chosen == requested).all(-1, keepdim=True)
        dropped = lost if live.dropped is None else lost + live.dropped
        return live._replace(
            experts=live.experts.where(same, experts),
            weights=live.weights.where(same, weights),
            requested=live.experts,
            dropped=dropped,
        )

    def _preferences(self, live: Selection, requested: Tensor, ranks: Tensor) -> Tensor:
        """Return (B,N,E): the place of each expert in the list of a token, from 0; E for experts that it never asks.

        Requested experts come first, by slot, then all others with a positive gate that the selector allows, best first.
        """
        slot = torch.arange(live.experts.shape[-1], device=live.experts.device).expand_as(live.experts)
        places = torch.full_like(live.gates, self.experts, dtype=torch.int64)
        places = _with_unused(places).scatter(-1, live.experts, slot)[..., :-1]
        if self.policy == "drop":
            return places
        others = ~requested & (live.gates > 0) & (ranks > EXCLUDED)
        order = top(ranks.detach().where(others, -torch.inf), self.experts)
        after = torch.zeros_like(order).scatter(-1, order, torch.arange(self.experts, device=order.device).expand_as(order))
        after = (after + requested.sum(-1, keepdim=True)).clamp_max(self.experts)
        return torch.where(requested, places, after.where(others, self.experts))

    def _limit(self, gates: Tensor, preferences: Tensor, requested: Tensor, real: Tensor) -> Tensor:
        """Return (B,N,E) bool: the experts that each token gets. Padding keeps those that it requested."""
        rows = [each.flatten(0, 1) for each in (gates, preferences, requested)]
        over_ranks = self.sees_batch and several_ranks()
        by_position = self.order == "position"
        ratio, factors = self.ratio if self.ratios is None else self.ratios.unbind(), self.factors
        if not self.training and self.eval_factor is not None and self.eval_ratio is not None:
            ratio, factors = self.eval_ratio, [self.eval_factor]
        if self.policy == "drop" and not over_ranks:  # in plain operations, without reading a number on the host
            wanted = rows[2] & real.flatten().unsqueeze(1)
            places = places_of_each(wanted.sum(), ratio, self.experts)
            kept = _keep_best(wanted, _priorities(rows[0], rows[1], by_position), places)
        else:
            kept = _assign(*rows, real.flatten(), factors, POLICIES.index(self.policy), by_position, over_ranks)
        return kept.view(requested.shape).where(real.unsqueeze(-1), requested)

    def _weigh(self, scores: Scores, live: Selection, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots (B,N,K) of the sets `chosen (B,N,E)` and their weights, best first."""
        if live.gates is not scores.gates:  # the wrapped selector has added noise
            scores = Scores.from_gates(live.gates, scores.raw)
        by_index = torch.arange(self.experts, device=chosen.device).expand(chosen.shape)
        experts = by_index.where(chosen, self.experts).sort(dim=-1).values[..., : live.experts.shape[-1]]
        in_use = experts < self.experts
        # A rule cannot weigh an empty set: it weighs the requested one, and the weights are 0 below.
        any_left = in_use.any(-1, keepdim=True)
        weights = self.base.held_weights(experts.where(any_left, live.experts), scores, live).where(in_use, 0.0)
        order = top(weights.detach().where(in_use, -1.0), weights.shape[-1])
        return experts.gather(-1, order), weights.gather(-1, order)


def _less_dropped(active: Callable[[LayerSizes], ActiveExperts], sizes: LayerSizes) -> ActiveExperts:
    asked = active(sizes)
    return replace(asked, about=f"{asked.about}{'; ' if asked.about else ''}less what the capacity drops", rows=None)


def _no_conditions(scores: Scores) -> Conditions:
    raise NoCertificate("no certificate is known for a capacity limit: other tokens of the batch change the selection")


def _with_unused(values: Tensor) -> Tensor:
    """Return `values (..., E)` with one more column, which unused slots write to."""
    return torch.nn.functional.pad(values, (0, 1))


def _priorities(gates: Tensor, preferences: Tensor, by_position: bool) -> Tensor:
    """Return (E,T) int64, all different in a row: the larger, the more an expert prefers the token."""
    if not by_position:
        return ordered_keys(gates.t())
    tokens = gates.shape[0]
    return -(preferences.t() * tokens + torch.arange(tokens, device=gates.device))


def _keep_best(asking: Tensor, priorities: Tensor, places: Tensor) -> Tensor:
    """Return (T,E) bool: of the tokens that are `asking (T,E)`, those that each expert has `places`, () or (E,), for."""
    asking = asking.t()
    order = priorities.where(asking, LOWEST).argsort(dim=1, descending=True)
    is_first = torch.arange(order.shape[1], device=order.device) < places.reshape(-1, 1)
    return (torch.zeros_like(asking).scatter(1, order, is_first.expand_as(order)) & asking).t()


def _limit_rows(
    gates: Tensor,
    preferences: Tensor,
    requested: Tensor,
    real: Tensor,
    factors: list[float],
    policy: int,
    by_position: bool,
    over_ranks: bool,
) -> Tensor:
    """Return (T,E) bool: the experts that each real token gets; False for padding."""
    rows = torch.cat([gates, preferences.float(), requested.sum(1, keepdim=True).float()], dim=1)[real]
    rows, mine = gather_over_ranks(rows) if over_ranks else (rows, slice(None))
    gates, preferences, wanted = rows.split([gates.shape[1], gates.shape[1], 1], dim=1)
    preferences, wanted = preferences.long(), wanted.long()
    ratios = [as_ratio(factor) for factor in factors]
    ratio = ratios[0] if len(ratios) == 1 else torch.tensor(ratios, device=rows.device).unbind(1)
    places = places_of_each(wanted.sum(), ratio, gates.shape[1])
    priorities = _priorities(gates, preferences, by_position)
    if POLICIES[policy] == "drop":
        limited = _keep_best(preferences < wanted, priorities, places)
    else:
        limited = (_next if POLICIES[policy] == "next" else _reroute)(preferences, wanted, priorities, places)
    return torch.zeros_like(requested).index_put((real,), limited[mine])


def _next(preferences: Tensor, wanted: Tensor, priorities: Tensor, places: Tensor) -> Tensor:
    """Ask in rounds for the next best expert with a free place; a token keeps what it has."""
    asked = preferences < wanted
    held = _keep_best(asked, priorities, places)
    while True:
        for _ in range(_rounds_per_check(held)):
            free = (places - held.sum(0)).clamp_min(0)
            asking = _best_places(preferences, ~asked & (free > 0), wanted - held.sum(1, keepdim=True))
            asked, held = asked | asking, held | _keep_best(asking, priorities, free)
        if not bool(asking.any()):
            return held


def _reroute(preferences: Tensor, wanted: Tensor, priorities: Tensor, places: Tensor) -> Tensor:
    """Deferred acceptance: an expert keeps the best of those that it has and those that ask."""
    asked = held = torch.zeros_like(preferences, dtype=torch.bool)
    while True:
        for _ in range(_rounds_per_check(held)):
            asking = _best_places(preferences, ~asked, wanted - held.sum(1, keepdim=True))
            asked, held = asked | asking, _keep_best(held | asking, priorities, places)
        if not bool(asking.any()):
            return held


def _best_places(preferences: Tensor, allowed: Tensor, lacking: Tensor) -> Tensor:
    """Return (T,E) bool: the first `lacking (T,1)` of the `allowed (T,E)` experts in the list of each token."""
    experts = preferences.shape[1]
    allowed = allowed & (preferences < experts)
    order = preferences.where(allowed, experts).argsort(dim=1, stable=True)
    is_first = torch.arange(experts, device=order.device) < lacking
    return torch.zeros_like(allowed).scatter(1, order, is_first) & allowed


def _rounds_per_check(held: Tensor) -> int:
    return ROUNDS_PER_CHECK if held.is_cuda else 1


_assign = operator(
    "limit_experts(Tensor gates, Tensor preferences, Tensor requested, Tensor real, float[] factors, int policy, "
    "bool by_position, bool over_ranks) -> Tensor",
    _limit_rows,
    lambda gates, preferences, requested, *_: torch.empty_like(requested),
)
