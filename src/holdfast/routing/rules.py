"""What a selector reads and returns, and the rules by which experts are ranked and weighted.

Scores      the same scores as logits and as gates
Rule        how logits become gates, how experts are ranked, how selected experts are weighted; `Softmax` is the usual one
Selection   the experts and weights that a selector returns
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.select import TINY, Amounts, top, weigh
from holdfast.routing.declarations import SOFTMAX, Compared, Conditions, GateFunction, Shares, keep_best
from holdfast.routing.records import Routing

EXCLUDED = torch.finfo(torch.float32).min  # a rank; not -inf, because ONNX cannot sort infinities
LOST = EXCLUDED / 2  # the logit of an expert that is taken out: differences from it are finite


@dataclass(eq=False)
class Scores:
    """What a selector reads: the same scores as logits and as gates.

    Without informers, gates are computed from logits; after an informer, logits are computed from its gates. Select by `key`
    and weigh by `gates`. `key` is the one of the two that was computed first: both have the same order, but an exp or a log
    rounds and saturates, so that experts tie in one which differ in the other. `gates` are what weights follow from.
    `raw` is for rules that need the scale of the score's logits after an informer (phimoe), `slots` for SoftMoE only.
    `lost` are experts that are taken out (`without`), and `whole` the scores before that.
    """

    _logits: Tensor | None  # (B,N,E); None after an informer
    gates: Tensor  # (B,N,E), non-negative
    informed: bool
    raw: Tensor | None = None  # (B,N,E), the logits before any informer
    slots: Tensor | None = None  # (B,N,E,p), the logits of slots; None: the score has logits of experts
    lost: Tensor | None = None  # (E,) or (B,N,E) bool; None: no expert
    whole: "Scores | None" = None

    @property
    def logits(self) -> Tensor:
        """(B,N,E); after an informer log(max(gates, tiny)), computed only when read."""
        return self.gates.clamp_min(TINY).log() if self._logits is None else self._logits

    @property
    def key(self) -> Tensor:
        """(B,N,E): what to sort by. It was computed first, so no exp or log has rounded or saturated it."""
        return self.gates if self.informed else self.logits

    @property
    def compares(self) -> Compared:
        """Whether `key` is the logits or the gates."""
        return "gates" if self.informed else "logits"

    def without(self, lost: Tensor, gate: GateFunction) -> "Scores":
        """Return the scores in which experts that are `lost`, (E,) or (B,N,E) bool, have the gate 0 and the lowest logit.

        Other gates stay, unless the `gate` function shares them out among the experts that are left.
        """
        gates = self.gates.where(~lost, 0.0)
        if self.informed:
            return replace(self, gates=gates, lost=lost, whole=self)
        logits = self.logits.where(~lost, LOST)
        return replace(self, _logits=logits, gates=gate(logits) if gate.shares else gates, lost=lost, whole=self)

    def rank_lost_last(self, ranks: Tensor) -> Tensor:
        """Return `ranks (B,N,E)`, -inf for lost experts: a rule may rank by more than logits and gates."""
        return ranks if self.lost is None else ranks.where(~self.lost, -torch.inf)

    @classmethod
    def from_gates(cls, gates: Tensor, raw: Tensor | None = None, slots: Tensor | None = None) -> "Scores":
        return cls(None, gates, informed=True, raw=raw, slots=slots)

    @classmethod
    def from_routing(cls, routing: Routing, *, informed: bool) -> "Scores":
        """Return the scores (1,T,E) that the selector read when its router returned `routing`.

        informed    whether an informer of that router changed the gates
        """
        logits, gates = routing.logits.unsqueeze(0), routing.gates.unsqueeze(0)
        return cls.from_gates(gates, logits) if informed else cls(logits, gates, informed=False, raw=logits)


class Rule(ABC):
    """How logits become gates, how experts are ranked, and how selected experts are weighted (abstract).

    A model keeps its rule when its router is replaced: pretrained experts expect weights of the kind they were trained with.
    """

    gate: GateFunction = SOFTMAX  # computes the gates that informers and selectors read
    ordered = True  # a larger rank means a larger weight
    renormalise = True  # a token's weights have about the same sum, whichever experts it uses
    weights_option: Literal["softmax", "switch"] | None = None  # the option `weights` of `TopK` that gives this rule
    strip = 0.1  # the width of the strip if `smooth` gets eps=None, in levels; with softmax gates, 10% of the k-th gate

    @property
    def name(self) -> str:
        """The name of this rule in messages."""
        return type(self).__name__

    def ranks(self, scores: Scores) -> Tensor:
        """Return (B,N,E): what experts are sorted by. Experts that may not be selected have the rank `EXCLUDED` or -inf."""
        return scores.key

    def levels(self, scores: Scores) -> Tensor:
        """Return (B,N,E): the values whose differences are the gaps between experts, in the same order as the ranks."""
        return scores.logits

    def amounts(self, scores: Scores) -> Amounts | None:
        """Return the values that `weigh` computes weights from, if a fused kernel can replace it; None if none can."""
        return None

    @abstractmethod
    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        """Return (B,N,K): the weight of each slot of `experts (B,N,K)`, sorted by rank; 0 where not `in_use`.

        The first k slots are the hard core. `fade` is the logarithm of a factor for each slot; None means no factor.
        """

    def best(self, scores: Scores, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best experts (B,N,K) by rank, lost ones last, and their weights."""
        experts = top(scores.rank_lost_last(self.ranks(scores)), k)
        return experts, self.weigh(scores, experts, torch.ones_like(experts, dtype=torch.bool), None, k)

    def held_weights(self, experts: Tensor, scores: Scores, live: "Selection") -> Tensor:
        """Return (B,N,K): the weights of the held set `experts (B,N,K)` under `scores`; see `Selector.held_weights`."""
        in_use = experts < scores.gates.shape[-1]
        slots = experts.where(in_use, 0)
        # `weigh` needs sorted slots: in Phi-MoE the weight of an expert depends on the experts ranked before it.
        ranks = self.ranks(scores).gather(-1, slots).where(in_use, -torch.inf)
        order = ranks.argsort(dim=-1, descending=True, stable=True)
        weights = self.weigh(scores, slots.gather(-1, order), in_use.gather(-1, order), None, slots.shape[-1])
        return live.weights_if_same_set(experts, torch.zeros_like(weights).scatter(-1, order, weights))

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        """Declare the conditions under which tokens keep their k experts; None if no certificate is known."""
        return None

    def shares(self, k: int) -> Shares | None:
        """Declare how the weights of k experts follow from scores; None if no bound of a layer's output is known."""
        return None


class Softmax(Rule):
    """Gates are a softmax of the logits; weights are the gates, divided by their sum if `renormalise`."""

    def __init__(self, renormalise: bool) -> None:
        self.renormalise = renormalise
        self.weights_option = "softmax" if renormalise else "switch"

    def amounts(self, scores: Scores) -> Amounts:
        if self.renormalise and not scores.informed:
            return Amounts(scores.logits, "softmax")
        return Amounts(scores.gates, "shares" if self.renormalise else "raw")

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return weigh(self.amounts(scores), experts, in_use, fade)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)

    def shares(self, k: int) -> Shares | None:
        return Shares(k, "set" if self.renormalise else "nothing")


def faded_gates(scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """Return (B,N,K): the gates of the slots in use, times the factors exp(fade); 0 in other slots."""
    gates = scores.gates.gather(-1, experts)
    gates = gates if fade is None else gates * fade.exp()
    return gates.where(in_use, 0.0)


class Selection(NamedTuple):
    """What a selector returns: K slots for each token, in the order of their weights, ties to the lower index.

    A token that uses fewer than K experts has unused slots: they come last, with the expert E and the weight 0. `of_sets`
    makes such slots. By hand, give `experts`, `weights` and `gates=scores.gates`, and `losses` if there are any. Leave
    `scale` to the router; `requested` and `dropped` are for capacity limits, the rest for SoftMoE and SMEAR layers.
    """

    experts: Tensor  # (B,N,K) int64
    weights: Tensor  # (B,N,K)
    gates: Tensor  # (B,N,E), those of the scores that the selector read
    losses: Mapping[str, Tensor] = {}  # weighted, ready to be added to the training loss
    scale: float = 1.0  # `Router.scale`, if `weights` include it; 1 in what a selector returns
    requested: Tensor | None = None  # (B,N,K), the experts before a capacity limit; None: `experts`
    dropped: Tensor | None = None  # (B,N), how many experts a token lost to a limit; None: there is no limit
    rows: Tensor | None = None  # (B,N), as in `Routing`
    dispatch: Tensor | None = None  # (B,N,E,p), as in `Routing`
    shares: Tensor | None = None  # (B,N,E,p), as in `Routing`

    @classmethod
    def from_routing(cls, routing: Routing, scale: float = 1.0) -> "Selection":
        """Return the selection (1,T,K) in `routing`, with the `scale` of its router."""
        experts, weights, gates = (rows.unsqueeze(0) for rows in (routing.experts, routing.weights, routing.gates))
        return cls(experts, weights, gates, scale=scale)

    @classmethod
    def of_sets(cls, chosen: Tensor, weights: Tensor, scores: Scores, slots: int | None = None) -> "Selection":
        """Return the selection of the sets `chosen (B,N,E)` bool, with the weight of each expert in `weights (B,N,E)`.

        slots   K, at least the size of the largest set; None: E

        Slots are sorted by `scores.key`; the weights must have the same order.
        """
        count = chosen.shape[-1]
        experts = top(scores.key.detach().where(chosen, EXCLUDED), count if slots is None else slots)
        experts = experts.where(chosen.gather(-1, experts), count)
        return cls(experts, gather_slots(weights, experts), scores.gates)

    def weights_of(self, experts: Tensor) -> Tensor:
        """Return (B,N,K): the weight of each of `experts (B,N,K)` in this selection; 0 if it was not selected."""
        dense = self.weights.new_zeros(*self.gates.shape[:-1], self.gates.shape[-1] + 1)
        dense = dense.scatter_add(-1, self.experts, self.weights)
        return dense.gather(-1, experts).where(experts < self.gates.shape[-1], 0.0)

    def weights_if_same_set(self, experts: Tensor, otherwise: Tensor, *, scaled: bool = False) -> Tensor:
        """Return the weights of the held set `experts (B,N,K)`, from `otherwise (B,N,K)`; see `Selector.held_weights`.

        `otherwise` is multiplied by `scale`, unless it is `scaled` already.
        """
        no_experts = torch.zeros(
            *self.gates.shape[:-1], self.gates.shape[-1] + 1, dtype=torch.bool, device=self.gates.device
        )
        held, chosen = (no_experts.scatter(-1, members, True)[..., :-1] for members in (experts, self.experts))
        otherwise = otherwise if scaled or self.scale == 1 else self.scale * otherwise
        return self.weights_of(experts).where((held == chosen).all(-1, keepdim=True), otherwise)


def gather_slots(values: Tensor, experts: Tensor) -> Tensor:
    """Return (B,N,K): the values (B,N,E) of the experts in the slots `experts (B,N,K)`; 0 in unused slots (index E)."""
    in_use = experts < values.shape[-1]
    return values.gather(-1, experts.where(in_use, 0)).where(in_use, 0.0)
