"""From what a router, or the plain weights of a gate, declares to the conditions under which tokens keep their sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.gates import Odds, Sigmoids
from holdfast.certificates.planes import AT_A_TIME, Planes, Problem, Read, Supports
from holdfast.certificates.score_geometry import LinearScoring, Scoring, score_geometry
from holdfast.certificates.token_mixing import Mixed
from holdfast.kernels.topk import top
from holdfast.routing import Context, Router, Scores
from holdfast.routing.bounds import Norm
from holdfast.routing.conditions import keep_best
from holdfast.routing.declarations import SOFTMAX, Conditions, GateFunction, Mixing, NoBound, Order, Values
from holdfast.routing.parts import Rule

MOST_ELEMENTS = 2**22  # of the largest tensor over some tokens and all their conditions
SORTED_GATES: dict[str, Read] = {"softmax": "softmax", "sigmoid": "sigmoid"}


@final
@dataclass(frozen=True)
class Gate:
    """A gate without its module: logits = x W^T + b, and the rule by which its k experts are chosen.

    For models whose routers are not Holdfast's. `rule` is that of the family; None is the k best logits. It is taken to sort
    gates, as the families do: where two gates round to the same number, nothing is certified.
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


@final
@dataclass(frozen=True)
class Subject:
    """What is certified, at some tokens: how they are scored, and the conditions that the router declares.

    conditions  what a selector or a rule declares for scores (1,T,E); `declared_by` is its name
    real        (B,N) bool: which tokens are real
    gates       (T,E) as the router had them, where tokens are mixed
    sorts_gates conditions on logits are decided by gates, which round
    chosen      (T,E) bool: the router's own sets, to compare the declaration with
    core        how many of the best experts are certified; None: the whole set
    """

    scoring: Scoring
    conditions: Callable[[Scores], Conditions | None]
    declared_by: str
    gate: GateFunction
    real: Tensor
    graph: Tensor | None = None  # (E,E) of an informer on the expert side
    mixing: Mixing | None = None  # of an informer on the token side
    gates: Tensor | None = None
    sorts_gates: bool = False
    chosen: Tensor | None = None
    core: int | None = None

    def __post_init__(self) -> None:
        if self.mixing is not None and self.gate.name != "softmax":
            raise self._none("its tokens share gates that are not a softmax")

    @property
    def about(self) -> str:
        if self.core is not None:
            return f"the hard core of a smooth router: the {self.core} best experts of each token"
        return "the set of experts of each token"

    def problems(self) -> Iterator[tuple[slice, Problem]]:
        """The conditions of all tokens, some tokens at a time."""
        tokens = len(self.scoring.planes.points)
        step = tokens if self.mixing is not None or tokens == 0 else max(1, MOST_ELEMENTS // self._elements())
        for start in range(0, tokens, max(1, step)):
            rows = slice(start, start + step)
            yield rows, self._problem(rows)

    def _elements(self) -> int:
        """The size, for each token, of the largest tensor."""
        experts, width = self.scoring.planes.weight.shape
        first = self._declared(self.scoring.rows(slice(0, 1)))
        conditions = max(first.ahead[0].numel(), 2 * experts)
        informed = self.graph is not None or (first.compares == "gates" and self.gate.name == "softmax")
        scaled = (experts + 1) ** 2 if self.scoring.planes.scales is not None else 0
        return max(
            conditions * (experts if informed else 4), AT_A_TIME * max(width, experts**2 if informed else experts), scaled
        )

    def _problem(self, rows: slice) -> Problem:
        if self.mixing is not None:
            return self._mixed(self.mixing)
        scoring = self.scoring.rows(rows)
        conditions = self._declared(scoring)
        if conditions.compares == "logits":
            return self._planes(scoring, conditions)
        if self.gate.name == "softmax":
            return Odds(scoring, self._simple(conditions), self._rows_of_graph(conditions))
        if self.gate.name == "sigmoid":
            return self._sigmoids(scoring, conditions)
        if self.gate.name == "relu":
            return self._supports(scoring, conditions)
        raise self._none(f"it compares gates, and nothing is known about the gate function {self.gate.name!r}")

    def _declared(self, scoring: Scoring) -> Conditions:
        logits = scoring.values.logits if scoring.has_values or self.graph is not None else scoring.planes.logits
        gates = self.gate(logits)
        if self.graph is not None:
            return self._ask(Scores.from_gates((gates @ self.graph.t()).unsqueeze(0), raw=logits.unsqueeze(0)))
        found = self._ask_plain(logits, gates)
        if found.compares == "logits":  # then only their order counts
            return self._ask_plain(scoring.planes.logits, gates)
        return found

    def _ask_plain(self, logits: Tensor, gates: Tensor) -> Conditions:
        logits = logits.unsqueeze(0)
        return self._ask(Scores(logits, gates.unsqueeze(0), informed=False, raw=logits))

    def _ask(self, scores: Scores) -> Conditions:
        found = self.conditions(scores)
        if found is None:
            raise self._none("it declares no conditions")
        if found.compares == "logits" and scores.informed:
            raise self._none("it compares logits, and an informer made other gates of them")
        return found

    def _none(self, reason: str) -> NoBound:
        return NoBound(f"no certificate is known for {self.declared_by}: {reason}")

    def _simple(self, conditions: Conditions) -> Conditions:
        """The conditions, if they compare one key with another, without a bias."""
        if conditions.ahead.shape[-1] > 1 or conditions.bias is not None or conditions.threshold < 0:
            raise self._none(f"it compares sums or biased keys, or a negative threshold, of {conditions.compares}")
        return conditions

    def _known_shift(self, scoring: Scoring) -> None:
        if scoring.shifted:
            raise NoBound(
                f"no certificate is known for {scoring.name} here: it declares the differences of its logits, and "
                f"{self.declared_by} reads the logits themselves"
            )

    def _planes(self, scoring: Scoring, conditions: Conditions) -> Problem:
        if conditions.ahead.shape[-1] > 1 or conditions.bias is not None:
            raise self._none("it compares sums of logits or logits with a bias")
        if _has_threshold(conditions):
            self._known_shift(scoring)
            if conditions.threshold != 0 and not isinstance(scoring, LinearScoring):
                raise self._none(f"of {scoring.name} it must compare logits with 0, not with {conditions.threshold:g}")
        if not self.sorts_gates:
            return Planes(scoring, conditions)
        if self.gate.name not in SORTED_GATES:
            raise self._none(f"nothing is known about the gate function {self.gate.name!r}")
        return Planes(scoring, conditions, SORTED_GATES[self.gate.name])

    def _sigmoids(self, scoring: Scoring, conditions: Conditions) -> Problem:
        self._known_shift(scoring)
        bias = conditions.bias
        same = bias is None or (bool((bias == bias[0]).all()) and float(bias[0].abs()) <= 1)
        plain = conditions.ahead.shape[-1] == 1 and not conditions.way.any() and not _has_threshold(conditions)
        if same and plain and self.graph is None and isinstance(scoring, LinearScoring):
            logits = scoring.planes.logits  # sigmoids have their order
            return Planes(scoring, self._ask_plain(logits, logits), "sigmoid")
        return Sigmoids(scoring, conditions, self.graph)

    def _supports(self, scoring: Scoring, conditions: Conditions) -> Problem:
        self._known_shift(scoring)
        experts = torch.arange(conditions.experts, device=conditions.way.device)
        sides = torch.minimum(conditions.ahead, conditions.behind).squeeze(-1)
        each = sides.shape[1:] == experts.shape and bool((sides == experts).all()) and not conditions.way.any()
        if not each or not _has_threshold(conditions) or self._simple(conditions).threshold != 0:
            raise self._none("of ReLU gates, only that each is or is not above 0 is known")
        return Supports(scoring, conditions, self._rows_of_graph(conditions)[:-1])

    def _mixed(self, mixing: Mixing) -> Problem:
        assert self.gates is not None
        keys = self.gates.double()
        conditions = self._simple(self._ask(Scores.from_gates(keys.unsqueeze(0))))
        keys = torch.cat([keys, torch.full_like(keys[:, :1], conditions.threshold)], dim=1)
        return Mixed(self.scoring, conditions, keys, self._rows_of_graph(conditions), mixing, self.real)

    def _rows_of_graph(self, conditions: Conditions) -> Tensor:
        """(E+1,E): how each key is made of gates; the last row is the threshold."""
        weight = self.scoring.planes.weight
        graph = torch.eye(len(weight), dtype=weight.dtype, device=weight.device) if self.graph is None else self.graph
        return torch.cat([graph, torch.full_like(graph[:1], conditions.threshold)])


def _has_threshold(conditions: Conditions) -> bool:
    """Is an expert compared with a threshold?"""
    ahead, behind = conditions.ahead[..., 0] == conditions.experts, conditions.behind[..., 0] == conditions.experts
    return bool(((ahead != behind) & conditions.valid).any())


def router_subject(router: Router, tokens: Tensor, context: Context, norm: Norm) -> Subject:
    """A Router at tokens (B,N,d); `NoBound` where a part of it does not declare what is needed."""
    name = type(router.score).__name__
    order = router.score.order(tokens, context)
    if order is None:
        raise NoBound(f"no certificate is known for {name}: it declares no order")
    scoring = score_geometry(name, order, router.score.values(tokens, context), tokens, norm)
    routing = router(tokens, context)
    graph, mixing = None, None
    for informer in router.informers:
        if informer.inert:
            continue
        if informer.side == "expert":
            graph = informer.expert_graph()
            missing = "graph" if graph is None else "graph without negative entries" if (graph < 0).any() else None
        else:
            mixing = informer.mixing(tokens, context, norm)
            missing = "mixing" if mixing is None else None
        if missing is not None:
            raise NoBound(f"no certificate is known for {type(informer).__name__}: it declares no {missing}")
    if graph is not None:
        graph = graph.detach().to(tokens.device).double()
    select = router.select
    return Subject(
        scoring,
        select.conditions,
        type(select).__name__ if select.rule is None else f"{type(select).__name__} under the rule {select.rule.name}",
        select.gate,
        context.real_or_all(tokens),
        graph,
        mixing,
        None if mixing is None else routing.gates,
        chosen=routing.chosen,
        core=select.core,
    )


def gate_subject(gate: Gate, tokens: Tensor, norm: Norm) -> Subject:
    """Plain weights at tokens (B,N,d)."""
    scoring = score_geometry("the gate", Order(gate.weight, gate.bias), Values(), tokens, norm)
    real = torch.ones(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
    if gate.rule is None:
        plain = partial(_best_logits, gate.k)
        return Subject(scoring, plain, "the gate", SOFTMAX, real, sorts_gates=True)
    logits = scoring.values.logits
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top(ranks(gate.rule, logits), gate.k), True)
    declared = partial(gate.rule.conditions, k=gate.k)
    return Subject(scoring, declared, gate.rule.name, gate.rule.gate, real, sorts_gates=True, chosen=chosen)


def ranks(rule: Rule, logits: Tensor) -> Tensor:
    """What a native gate with this rule sorts, in float32, at logits (T,E)."""
    logits = logits.float().unsqueeze(0)
    return rule.ranks(Scores(logits, rule.gate(logits), informed=False, raw=logits)).squeeze(0)


def _best_logits(k: int, scores: Scores) -> Conditions:
    return keep_best(scores.logits, k, "logits")
