"""From a router, or the plain weights of a gate, to the conditions under which tokens keep their sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.certificates.mixing import Mixed, Mixing, read_mixing
from holdfast.certificates.odds import Odds
from holdfast.certificates.pairs import (
    HIGHEST_OF_GROUP,
    Pairs,
    along,
    best,
    contests,
    crossings,
    joined,
    kept_groups,
    swaps,
)
from holdfast.certificates.planes import Planes, Supports
from holdfast.certificates.problem import AT_A_TIME, Problem
from holdfast.certificates.scoring import LinearScoring, NoBound, Scoring, linear_score, read_score
from holdfast.certificates.sigmoids import Sigmoids, sigmoid_keys
from holdfast.kernels.topk import top
from holdfast.routing import Context, ExpertGraph, ReLU, Router, Scores, SmoothTopK, TopK, TopP
from holdfast.routing.bounds import Norm
from holdfast.routing.rules import Rule

GateKind = Literal["softmax", "sigmoid", "relu"]
GATES: dict[GateKind, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
}
HELD = 2**22  # elements of the largest tensor over some tokens and all their conditions


@dataclass(frozen=True)
class Gate:
    """A gate without its module: logits = x W^T + b, and the rule by which its k experts are chosen.

    For families that are not ours. `rule` is that of the family (`holdfast.routing.rules.Rule`); None is the k best logits.
    It is taken to sort gates, as the families do: where two gates round to the same number, nothing is certified.
    """

    weight: Tensor  # (E,d)
    k: int
    bias: Tensor | None = None  # (E,)
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or not self.weight.isfinite().all():
            raise ValueError(f"the weight has shape {tuple(self.weight.shape)}; expected finite numbers, (experts, width).")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"the bias has shape {tuple(self.bias.shape)}; expected one number an expert, {len(self.weight)}."
            )
        if not 1 <= self.k <= len(self.weight):
            raise ValueError(f"k is {self.k}; it must be between 1 and the number of experts, {len(self.weight)}.")


@dataclass(frozen=True)
class Correction:
    """What is added to sigmoid gates before they are sorted, and the groups of experts that compete first."""

    bias: Tensor  # (E,)
    groups: int = 1
    kept: int = 1

    @property
    def grouped(self) -> bool:
        return self.kept < self.groups


@dataclass(frozen=True)
class Reading:
    """A router at some tokens, taken apart."""

    scoring: Scoring
    select: Literal["best", "above", "positive"]
    k: int = 0
    threshold: float = 0.0
    gate: GateKind | None = None  # None where nothing reads gates
    graph: Tensor | None = None  # (E,E)
    mixing: Mixing | None = None
    gates: Tensor | None = None  # (T,E) as the router had them, where tokens are mixed
    correction: Correction | None = None
    sorts_gates: bool = False
    chosen: Tensor | None = None  # (T,E) bool: the router's own sets
    core: bool = False  # of which only the k best are certified

    def __post_init__(self) -> None:
        correction, experts = self.correction, self.scoring.planes.experts
        if correction is not None and correction.grouped and self.k > correction.kept * (experts // correction.groups):
            raise NoBound(f"it takes {self.k} experts, more than there are in the groups it keeps")
        known: dict[str, tuple[GateKind, ...]] = {
            "best": ("softmax", "sigmoid"),
            "above": ("softmax",),
            "positive": ("relu",),
        }
        if self.gate is not None and self.gate not in known[self.select]:
            raise NoBound(f"nothing is known about {self.gate} gates under this selector")
        if self.mixing is not None and self.gate != "softmax":
            raise NoBound("its tokens share gates that are not a softmax")

    @property
    def about(self) -> str:
        if self.core:
            return f"the hard core of a smooth router: the {self.k} best experts of each token"
        return "the set of experts of each token"

    def problems(self) -> Iterator[tuple[slice, Problem]]:
        """The conditions of all tokens, some tokens at a time."""
        tokens = len(self.scoring.planes.points)
        step = tokens if self.mixing is not None else max(1, HELD // self._elements())
        for start in range(0, tokens, max(1, step)):
            rows = slice(start, start + step)
            yield rows, self._problem(rows)

    def _elements(self) -> int:
        """For each token, of the largest tensor."""
        experts, width = self.scoring.planes.weight.shape
        conditions = self.k * (experts - self.k) if self.select == "best" else 2 * experts
        if self.correction is not None and self.correction.grouped:
            kept, groups = self.correction.kept, self.correction.groups
            teams = len(list(combinations(range(experts // groups), min(HIGHEST_OF_GROUP, experts // groups))))
            conditions += HIGHEST_OF_GROUP * kept * (groups - kept) * teams + self.k * experts
        informed = self.graph is not None or self.select == "above"
        scaled = (experts + 1) ** 2 if self.scoring.planes.scales is not None else 0
        return max(
            conditions * (experts if informed else 4), AT_A_TIME * max(width, experts**2 if informed else experts), scaled
        )

    def _problem(self, rows: slice) -> Problem:
        if self.mixing is not None:
            return self._mixed(self.mixing)
        scoring = self.scoring.rows(rows)
        if self.select == "positive":
            return self._positive(scoring)
        if self.graph is None and self.correction is None and self.select == "best":
            chosen = best(scoring.planes.logits, self.k)
            return Planes(scoring, swaps(chosen), chosen, "softmax" if self.sorts_gates else "logits")
        if self.gate == "sigmoid":
            return self._sigmoids(scoring)
        graph = self._rows_of_graph(scoring)  # of a softmax: that is all that is left
        keys = scoring.values.logits.softmax(-1) @ graph[:-1].t()
        chosen, pairs = self._sets(keys)
        return Odds(scoring, pairs, chosen, graph)

    def _positive(self, scoring: Scoring) -> Problem:
        if self.graph is None:
            chosen = scoring.planes.logits > 0
            return Planes(scoring, crossings(chosen), chosen)
        chosen = scoring.values.logits.clamp_min(0) @ self.graph.t() > 0
        return Supports(scoring, crossings(chosen), chosen, self.graph)

    def _sigmoids(self, scoring: Scoring) -> Problem:
        correction = self.correction or Correction(torch.zeros_like(scoring.planes.bias))
        same = bool((correction.bias == correction.bias[0]).all()) and float(correction.bias[0].abs()) <= 1
        plain = same and not correction.grouped
        if plain and self.graph is None and isinstance(scoring, LinearScoring):
            chosen = best(scoring.planes.logits, self.k)
            return Planes(scoring, swaps(chosen), chosen, "sigmoid")
        keys = sigmoid_keys(scoring.values.logits, self.graph, correction.bias)
        if not correction.grouped:
            chosen = best(keys, self.k)
            return Sigmoids(scoring, swaps(chosen), chosen, self.graph, correction.bias)
        kept = kept_groups(keys, correction.groups, correction.kept)
        allowed = kept.repeat_interleave(keys.shape[1] // correction.groups, dim=1)
        chosen = best(keys.where(allowed, -torch.inf), self.k)
        pairs = joined(swaps(chosen, allowed), contests(keys, kept, chosen))
        return Sigmoids(scoring, pairs, chosen, self.graph, correction.bias)

    def _mixed(self, mixing: Mixing) -> Problem:
        assert self.gates is not None
        keys = self.gates.double()
        chosen, pairs = self._sets(keys)
        keys = torch.cat([keys, torch.full_like(keys[:, :1], self.threshold)], dim=1)
        return Mixed(self.scoring, pairs, chosen, keys, self._rows_of_graph(self.scoring), mixing)

    def _rows_of_graph(self, scoring: Scoring) -> Tensor:
        """(E+1,E): how each key is made of gates; nobody's is the threshold."""
        planes = scoring.planes
        graph = (
            torch.eye(planes.experts, dtype=torch.float64, device=planes.weight.device) if self.graph is None else self.graph
        )
        return torch.cat([graph, torch.full_like(graph[:1], self.threshold)])

    def _sets(self, keys: Tensor) -> tuple[Tensor, Pairs]:
        if self.select == "best":
            chosen = best(keys, self.k)
            return chosen, swaps(chosen)
        first, above = best(keys, 1), keys > self.threshold
        chosen = above | first
        # The best expert is chosen while it is above the threshold, and also while it is the best.
        return chosen, joined(along(crossings(chosen), first.long()), along(swaps(first), 2))


def read_router(router: Router, tokens: Tensor, context: Context, norm: Norm) -> Reading:
    """A Router at tokens (B,N,d); `NoBound` where a part of it is not understood."""
    scoring = read_score(router.score, tokens, context, norm)
    routing = router(tokens, context)
    graph, mixing = None, None
    for informer in router.informers:
        if informer.inert:
            continue
        if isinstance(informer, ExpertGraph):
            graph = informer.expert_graph().detach().double()
        elif informer.side == "token":
            mixing = read_mixing(informer, tokens, context, norm)
        else:
            raise NoBound(f"nothing is known about the expert-side informer {type(informer).__name__}")
    select = router.select
    sorts_logits = isinstance(select, TopK | SmoothTopK) and graph is None and mixing is None
    gate = None if sorts_logits else _gate(select.gate)
    reading: dict[str, Any] = {"scoring": scoring, "gate": gate, "graph": graph, "mixing": mixing, "chosen": routing.chosen}
    if mixing is not None:
        reading["gates"] = routing.gates
    if isinstance(select, TopK | SmoothTopK):
        k, core = _k(select), isinstance(select, SmoothTopK)
        correction = read_rule(select.rule, scoring.values.logits)
        if correction is not None:
            reading["gate"] = "sigmoid"
        found = Reading(select="best", k=k, core=core, correction=correction, **reading)
    elif isinstance(select, TopP):
        found = Reading(select="above", threshold=float(select.threshold()), **reading)
    elif isinstance(select, ReLU):
        found = Reading(select="positive", **reading)
    else:
        raise NoBound(f"nothing is known about the selector {type(select).__name__}")
    return found


def read_gate(gate: Gate, tokens: Tensor, norm: Norm) -> Reading:
    """Plain weights at tokens (T,d)."""
    scoring = linear_score(gate.weight, gate.bias, tokens, norm)
    logits = scoring.values.logits
    if gate.rule is None:
        return Reading(scoring, "best", gate.k, sorts_gates=True)
    kind, correction = _gate(gate.rule.gate), read_rule(gate.rule, logits)
    if kind == "sigmoid" and correction is None:
        correction = Correction(torch.zeros_like(scoring.planes.bias))
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top(_ranks(gate.rule, logits), gate.k), True)
    return Reading(scoring, "best", gate.k, gate=kind, correction=correction, sorts_gates=True, chosen=chosen)


def read_rule(rule: Rule, logits: Tensor) -> Correction | None:
    """None for a rule that sorts by logits, or by gates after an informer; otherwise it must be a corrected sigmoid's.

    Known by what it does: its ranks must be the sigmoids plus the bias it names, and -inf outside the groups it keeps.
    """
    if type(rule).ranks is Rule.ranks:
        return None
    owner, groups, kept = (getattr(rule, name, None) for name in ("owner", "groups", "groups_kept"))
    bias = None if owner is None else getattr(owner, "e_score_correction_bias", None)
    if not isinstance(bias, Tensor) or not isinstance(groups, int) or not isinstance(kept, int):
        raise NoBound(f"nothing is known about how the rule {type(rule).__name__} ranks experts")
    ranks = _ranks(rule, logits)
    corrected = logits.float().sigmoid() + bias.float().to(logits.device)
    allowed = ranks > -torch.inf
    if (
        not (ranks == corrected)[allowed].all()
        or not (allowed.sum(1) == logits.shape[1] * min(kept, groups) // groups).all()
    ):
        raise NoBound(f"the rule {type(rule).__name__} does not rank by sigmoids and a bias")
    return Correction(bias.detach().double().to(logits.device), groups, kept)


def _ranks(rule: Rule, logits: Tensor) -> Tensor:
    logits = logits.float().unsqueeze(0)
    return rule.ranks(Scores(logits, rule.gate(logits), informed=False, raw=logits)).squeeze(0)


def _k(select: TopK | SmoothTopK) -> int:
    grows = isinstance(select, TopK) and select.k_final is not None
    return int(select.active) if grows else select.k  # type: ignore[union-attr, arg-type]


def _gate(gate: Callable[[Tensor], Tensor]) -> GateKind:
    """Which function of the logits gates are, asked at some logits."""
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).mul(4)
    for name, function in GATES.items():
        if torch.equal(gate(logits), function(logits)):
            return name
    raise NoBound("nothing is known about how its gates are made of logits")
