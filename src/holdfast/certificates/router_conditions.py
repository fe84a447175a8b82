"""From the declarations of a router, or from the weights of a gate, to the conditions under which tokens keep their sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.gates import MixedGates, SigmoidGates, SoftmaxGates
from holdfast.certificates.planes import PlaneDistances, RadiusProblem, ReluGates, at_a_time, with_threshold
from holdfast.certificates.score_geometry import LinearScoring, Scoring, score_geometry
from holdfast.kernels.select import top
from holdfast.routing import Context, Router, Scores
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import (
    SOFTMAX,
    Conditions,
    GateFunction,
    Mixing,
    NoCertificate,
    Order,
    Shares,
    Values,
    keep_always,
    keep_best,
)
from holdfast.routing.rules import Rule

MOST_ELEMENTS = 2**22  # of the largest tensor; more tokens are processed in several steps
MOST_STATIC_ELEMENTS = 2**25  # the same on a GPU in training, where many small steps take long


@final
@dataclass(frozen=True)
class Gate:
    """The weights of a native gate: logits = x W^T + b, and the rule that selects its k experts.

    Use it for models whose routers are not Holdfast's. `rule` is that of the family; None is the k best logits. The gate is
    assumed to sort gates, not logits, as the families do: where two gates round to the same number, nothing is certified.
    """

    weight: Tensor  # (E,d)
    k: int
    bias: Tensor | None = None  # (E,)
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or not self.weight.isfinite().all():
            raise ValueError(f"the weight has shape {tuple(self.weight.shape)}; expected finite numbers, (experts, width).")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            got, expected = tuple(self.bias.shape), tuple(self.weight.shape[:1])
            raise ValueError(f"the bias has shape {got}; expected one number per expert, {expected}.")
        if not 1 <= self.k <= len(self.weight):
            raise ValueError(f"k is {self.k}; it must be between 1 and the number of experts, {len(self.weight)}.")


@final
@dataclass(frozen=True)
class CertifiedRouter:
    """A router or a gate at some tokens: the geometry of its score, and the conditions that it declares.

    conditions   what a selector or a rule declares for scores (1,T,E); `declared_by` is its name
    real         (B,N) bool: which tokens are real
    gates        (T,E) as the router computed them, if tokens share gates
    sorts_gates  conditions on logits are decided by comparing rounded gates
    chosen       (T,E) bool: the router's own sets, to check the declaration
    core         how many of the best experts are certified; None: the whole set
    shares       how weights follow from scores, as a selector or a rule declares it
    """

    scoring: Scoring
    conditions: Callable[[Scores], Conditions | None] | None
    declared_by: str
    gate: GateFunction
    real: Tensor
    graph: Tensor | None = None  # (E,E) of an informer on the expert side
    mixing: Mixing | None = None  # of an informer on the token side
    gates: Tensor | None = None
    sorts_gates: bool = False
    chosen: Tensor | None = None
    core: int | None = None
    shares: Callable[[], Shares | None] | None = None

    def __post_init__(self) -> None:
        if self.mixing is not None and self.gate.name != "softmax":
            raise self._refusal("tokens share its gates, which are not a softmax")

    @property
    def about(self) -> str:
        if self.core is not None:
            return f"the hard core of a smooth router: the {self.core} best experts of each token"
        return "the set of experts of each token"

    def problems(self) -> Iterator[tuple[slice, RadiusProblem]]:
        """Yield the conditions of all tokens, a slice of tokens at a time."""
        tokens, most = len(self.scoring.planes.points), MOST_STATIC_ELEMENTS if self.scoring.static else MOST_ELEMENTS
        step = tokens if self.mixing is not None or tokens == 0 else max(1, most // self._elements())
        for start in range(0, tokens, max(1, step)):
            rows = slice(start, start + step)
            yield rows, self._problem(rows)

    def _elements(self) -> int:
        """Return the elements per token of the largest tensor."""
        experts, width = self.scoring.planes.weight.shape
        first = self._conditions_at(self.scoring.rows(slice(0, 1)))
        conditions = max(first.ahead[0].numel(), 2 * experts)
        informed = self.graph is not None or (first.compares == "gates" and self.gate.name == "softmax")
        simple = conditions * (experts if informed else 4)
        tight = at_a_time(self.scoring.static) * max(width, experts**2 if informed else experts)
        return max(simple, tight, (experts + 1) ** 2 if self.scoring.planes.scales is not None else 0)

    def _problem(self, rows: slice) -> RadiusProblem:
        if self.mixing is not None:
            assert self.gates is not None
            keys = self.gates.double()
            conditions = self._require_simple(self._declared_conditions(Scores.from_gates(keys.unsqueeze(0))))
            keys, graph = with_threshold(keys, conditions.threshold), self._graph_with_threshold(conditions)
            return MixedGates(self.scoring, conditions, keys, graph, self.mixing, self.real)
        scoring = self.scoring.rows(rows)
        conditions = self._conditions_at(scoring)
        if conditions.compares == "logits":
            return self._plane_distances(scoring, conditions)
        if self.gate.name == "softmax":
            graph = self._graph_with_threshold(conditions)
            return SoftmaxGates(scoring, self._require_simple(conditions, sums=True), graph)
        if self.gate.name == "sigmoid":
            return self._sigmoid_gates(scoring, conditions)
        if self.gate.name == "relu":
            return self._relu_gates(scoring, conditions)
        raise self._refusal(f"it compares gates, and the gate function {self.gate.name!r} has no known bound")

    def _conditions_at(self, scoring: Scoring) -> Conditions:
        logits = scoring.values.logits if scoring.has_values or self.graph is not None else scoring.planes.logits
        gates = self.gate(logits)
        if self.graph is not None:
            informed = (gates @ self.graph.t()).unsqueeze(0)
            return self._declared_conditions(Scores.from_gates(informed, raw=logits.unsqueeze(0)))
        found = self._conditions_without_informers(logits, gates)
        if found.compares == "logits":  # then only the order of the logits matters
            return self._conditions_without_informers(scoring.planes.logits, gates)
        return found

    def _conditions_without_informers(self, logits: Tensor, gates: Tensor) -> Conditions:
        logits = logits.unsqueeze(0)
        return self._declared_conditions(Scores(logits, gates.unsqueeze(0), informed=False, raw=logits))

    def _declared_conditions(self, scores: Scores) -> Conditions:
        found = None if self.conditions is None else self.conditions(scores)
        if found is None:
            raise self._refusal("it declares no conditions")
        if found.compares == "logits" and scores.informed:
            raise self._refusal("it compares logits, but an informer changes the gates")
        return found

    def _refusal(self, reason: str) -> NoCertificate:
        return NoCertificate(f"no certificate is known for {self.declared_by}: {reason}")

    def _require_simple(self, conditions: Conditions, *, sums: bool = False) -> Conditions:
        """Return the conditions; raise NoCertificate if they have a bias or, unless `sums`, compare sums of keys."""
        if (conditions.ahead.shape[-1] > 1 and not sums) or conditions.bias is not None or conditions.threshold < 0:
            raise self._refusal(f"it compares sums or biased keys, or a negative threshold, of {conditions.compares}")
        return conditions

    def _require_known_shift(self, scoring: Scoring) -> None:
        if scoring.shifted:
            reads = f"it declares the differences of its logits, and {self.declared_by} reads the logits themselves"
            raise NoCertificate(f"no certificate is known for {scoring.name} here: {reads}")

    def _plane_distances(self, scoring: Scoring, conditions: Conditions) -> RadiusProblem:
        if conditions.ahead.shape[-1] > 1 or conditions.bias is not None:
            raise self._refusal("it compares sums of logits or logits with a bias")
        only_zero = conditions.threshold != 0 and not isinstance(scoring, LinearScoring)
        if (scoring.shifted or only_zero) and _has_threshold(conditions):
            self._require_known_shift(scoring)
            only = f"only with 0, not with {conditions.threshold:g}"
            raise self._refusal(f"it may compare the logits of {scoring.name} {only}")
        if self.sorts_gates and self.gate.name not in ("softmax", "sigmoid"):
            raise self._refusal(f"the gate function {self.gate.name!r} has no known bound")
        return PlaneDistances(scoring, conditions, self.gate.name if self.sorts_gates else "logits")

    def _sigmoid_gates(self, scoring: Scoring, conditions: Conditions) -> RadiusProblem:
        self._require_known_shift(scoring)
        bias = conditions.bias
        same = bias is None or (bool((bias == bias[0]).all()) and float(bias[0].abs()) <= 1)
        plain = conditions.ahead.shape[-1] == 1 and conditions.way is None and not _has_threshold(conditions)
        if same and plain and self.graph is None and isinstance(scoring, LinearScoring):
            logits = scoring.planes.logits  # which have the order of their sigmoids
            return PlaneDistances(scoring, self._conditions_without_informers(logits, logits), "sigmoid")
        return SigmoidGates(scoring, conditions, self.graph)

    def _relu_gates(self, scoring: Scoring, conditions: Conditions) -> RadiusProblem:
        self._require_known_shift(scoring)
        experts = torch.arange(conditions.experts, device=conditions.ahead.device)
        sides = torch.minimum(conditions.ahead, conditions.behind).squeeze(-1)
        each = sides.shape[1:] == experts.shape and bool((sides == experts).all()) and conditions.way is None
        if not each or not _has_threshold(conditions) or self._require_simple(conditions).threshold != 0:
            raise self._refusal("ReLU gates may only be compared with 0, each on its own")
        return ReluGates(scoring, conditions, self._graph_with_threshold(conditions)[:-1])

    def _graph_with_threshold(self, conditions: Conditions) -> Tensor:
        """Return A (E+1,E) of keys = gates A^T; the last row is the threshold."""
        weight = self.scoring.planes.weight
        graph = torch.eye(len(weight), dtype=weight.dtype, device=weight.device) if self.graph is None else self.graph
        return torch.cat([graph, torch.full_like(graph[:1], conditions.threshold)])


def _has_threshold(conditions: Conditions) -> bool:
    """Return whether an expert is compared with the threshold."""
    ahead, behind = conditions.ahead[..., 0] == conditions.experts, conditions.behind[..., 0] == conditions.experts
    return bool(((ahead != behind) & conditions.valid).any())


def describe_router(router: Router, tokens: Tensor, context: Context, norm: Norm) -> CertifiedRouter:
    """Describe a Router at tokens (B,N,d); raise NoCertificate if one of its parts does not declare what is needed."""
    name = type(router.score).__name__
    if router.fixed_sets:  # they do not depend on the tokens: there is no condition, and the radius is infinite
        router(tokens, context)  # raises ValueError if the context lacks what the router reads
        scoring = score_geometry(name, Order(tokens.new_zeros(router.experts, tokens.shape[-1])), tokens, norm)
        real, by = context.real_tokens(tokens), type(router.select).__name__
        shares = router.select.declares.shares
        return CertifiedRouter(scoring, lambda scores: keep_always(scores.key), by, SOFTMAX, real, shares=shares)
    described = describe_parts(router, tokens, context, norm)
    routing = router(tokens, context)
    return replace(described, gates=None if described.mixing is None else routing.gates, chosen=routing.chosen)


def describe_parts(router: Router, tokens: Tensor, context: Context, norm: Norm, static: bool = False) -> CertifiedRouter:
    """Describe what the parts of a Router declare at tokens (B,N,d), without its own routing of them.

    It is differentiable in tokens and weights. `static` as in `Scoring`
    """
    name = type(router.score).__name__
    order = router.order(tokens, context)
    if order is None:
        raise NoCertificate(f"no certificate is known for {name}: it declares no order")
    scoring = score_geometry(name, order, tokens, norm, static)
    graph, mixing = None, None
    for informer in router.informers:
        if informer.inert:
            continue
        missing, of_informer = None, informer.declares
        if informer.side == "expert":
            graph = None if of_informer.graph is None else of_informer.graph().to(tokens.device).double()
            is_negative = graph is not None and not static and bool((graph < 0).any())
            missing = "graph" if graph is None else "graph without negative entries" if is_negative else None
        elif of_informer.mixing is None:
            missing = "mixing"
        else:
            mixing = of_informer.mixing(tokens, context, norm)
        if missing is not None:
            raise NoCertificate(f"no certificate is known for {type(informer).__name__}: it declares no {missing}")
    select, of_select = router.select, router.select.declares
    return CertifiedRouter(
        scoring,
        of_select.conditions,
        type(select).__name__ if of_select.rule is None else f"{type(select).__name__} under the rule {of_select.rule}",
        select.gate,
        context.real_tokens(tokens),
        graph,
        mixing,
        core=of_select.core,
        shares=of_select.shares,
    )


def describe_gate(gate: Gate, tokens: Tensor, norm: Norm) -> CertifiedRouter:
    """Describe a native gate at tokens (B,N,d)."""
    scoring = score_geometry("the gate", Order(gate.weight, gate.bias, values=Values()), tokens, norm)
    real = torch.ones(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
    if gate.rule is None:
        best_logits = lambda scores: keep_best(scores.logits, gate.k, "logits")  # noqa: E731
        return CertifiedRouter(scoring, best_logits, "the gate", SOFTMAX, real, sorts_gates=True)
    logits = scoring.values.logits
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top(native_keys(gate.rule, logits), gate.k), True)
    conditions = partial(gate.rule.conditions, k=gate.k)
    described = CertifiedRouter(scoring, conditions, gate.rule.name, gate.rule.gate, real, sorts_gates=True, chosen=chosen)
    return replace(described, shares=partial(gate.rule.shares, gate.k))


def native_keys(rule: Rule, logits: Tensor) -> Tensor:
    """Return what a native gate with this rule sorts, in float32, at logits (T,E)."""
    logits = logits.float().unsqueeze(0)
    return rule.ranks(Scores(logits, rule.gate(logits), informed=False, raw=logits)).squeeze(0)
