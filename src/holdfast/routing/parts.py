"""The slots of the pipeline: score -> inform -> select, and what every part declares about itself.

tokens (B,N,d) -> logits (B,N,E) -> gates (B,N,E) -> experts, weights (B,N,K)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.select import TINY as TINY
from holdfast.kernels.select import Amounts
from holdfast.kernels.select import shares as shares
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import (
    FLOAT,
    SOFTMAX,
    Active,
    Compared,
    Conditions,
    Cost,
    GateFunction,
    Mixing,
    Order,
    Place,
    Values,
    projection_flops,
)
from holdfast.routing.records import Context, Routing


@dataclass(frozen=True)
class Traits:
    """What holds for a router in evaluation; the conformance suite tests that it does, and that what is denied does not."""

    causal: bool = True  # a later token changes nothing earlier, when the context is causal
    batch_invariant: bool = True  # other sequences and padding change nothing
    cacheable: bool = True  # decoding step by step, with a cache, equals one forward
    sequence_aware: bool = False  # looks beyond its token, so tokens must come as (B,N,d)

    def __and__(self, other: "Traits") -> "Traits":
        """The traits of two parts in one pipeline."""
        return Traits(
            causal=self.causal and other.causal,
            batch_invariant=self.batch_invariant and other.batch_invariant,
            cacheable=self.cacheable and other.cacheable,
            sequence_aware=self.sequence_aware or other.sequence_aware,
        )


class Part(nn.Module, ABC):
    """A component of a router (abstract). Options are keyword-only and checked when built."""

    traits: Traits = Traits()
    coefficients: tuple[str, ...] = ()  # the loss coefficients it carries, by attribute name
    # The fields of a Context it needs beyond causal, padding and cache. "attention" comes without the output projection,
    # which may have to be loaded and dequantised: "attention.projection" asks for it, and for keys and values of the whole
    # sequence, so that a model that attends within windows is refused.
    reads: tuple[str, ...] = ()
    entering: ClassVar[
        Mapping[str, Any]
    ] = {}  # defaults with which it enters a pretrained model, so as to start from its outputs

    def progress(self, fraction: float) -> None:
        """Training has come this far, from 0 to 1."""

    @property
    def wrapped(self) -> "tuple[Part, ...]":
        """The parts inside this one that declare their own cost."""
        return ()

    def cost(self, place: Place) -> Cost | None:
        """Return what this part costs in a layer, without the parts it wraps; None: only its parameters are counted."""
        return None

    def snapshot(self) -> Mapping[str, Tensor]:
        """Return what is worth watching while training, by name. "graph" (E,E) is a learned graph of the experts."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device as any module, but keep state float32: `model.to(torch.bfloat16)` must not round it."""
        kept = {name: state for name, state in self._buffers.items() if state is not None and state.is_floating_point()}
        super()._apply(fn, recurse)
        for name, state in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != state.dtype:
                self._buffers[name] = state.to(moved.device)
        return self


class Score(Part):
    """Tokens to logits (abstract)."""

    dim: int
    experts: int

    @property
    def host(self) -> "Score | None":
        """The score that a later `reroute` of the same layer may keep; None where there is none."""
        return None

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """`tokens (B,N,d)`, in the model's dtype, to float32 logits `(B,N,E)`."""

    def order(self, tokens: Tensor, context: Context) -> Order | None:
        """Declare keys that are affine in the token and have the order of the logits; None: no certificate is known."""
        return None

    def values(self, tokens: Tensor, context: Context) -> Values | None:
        """Declare how the logits follow from these keys, for selectors and informers that need more than their order."""
        return None


class LinearScore(Score):
    """A score that reads its tokens through one matrix only (abstract): logits = finish(x matrix^T)."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """(n,d), what tokens are multiplied with."""

    @abstractmethod
    def finish(self, projected: Tensor) -> Tensor:
        """`projected (B,N,n)`, float32, to logits `(B,N,E)`."""

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.finish(linear_float32(tokens, self.matrix))

    @property
    def host(self) -> Score | None:
        return self

    def cost(self, place: Place) -> Cost | None:
        """Count the product with `matrix` and its two gradients. A score whose `finish` has products adds them."""
        forward = projection_flops(self.matrix)
        return Cost("score", forward, 2 * forward, kept=FLOAT * place.experts)


class Informer(Part):
    """Gates to gates, looking at other experts or at other tokens (abstract).

    The expert side acts as `gates @ graph^T`, the token side as `graph @ gates`, so one of each composes in any order.
    """

    side: Literal["expert", "token"]

    @property
    def inert(self) -> bool:
        """Does it leave gates as they are, so that the router may pass it by and be the plain one to the last bit?"""
        return False

    def expert_graph(self) -> Tensor | None:
        """Declare A (E,E), with which an informer on the expert side acts as g = p A^T; None: no certificate is known."""
        return None

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing | None:
        """Declare how an informer on the token side mixes `tokens (B,N,d)`, and how much a move within a radius, measured
        in `norm`, changes that; None: no certificate is known."""
        return None

    @abstractmethod
    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        """Non-negative `gates (B,N,E)` to the same shape; the result need not sum to 1. `logits` are the raw scores."""


class Scores:
    """What a selector reads, as logits and as gates. Exactly one of the two is primary; `key` is that one."""

    def __init__(self, logits: Tensor | None, gates: Tensor, informed: bool, raw: Tensor | None = None) -> None:
        self._logits = logits
        self.gates = gates  # (B,N,E), non-negative
        self.informed = informed
        self.raw = raw  # (B,N,E), the logits as scored

    @property
    def logits(self) -> Tensor:
        """(B,N,E); after an informer log(max(gates, tiny)), made only for those who ask."""
        return self.gates.clamp_min(TINY).log() if self._logits is None else self._logits

    @property
    def key(self) -> Tensor:
        """What to sort by: the one of the two that was not rounded or saturated by an exp or a log."""
        return self.gates if self.informed else self.logits

    @property
    def compares(self) -> Compared:
        """Which of the two `key` is."""
        return "gates" if self.informed else "logits"

    @classmethod
    def from_gates(cls, gates: Tensor, raw: Tensor | None = None) -> "Scores":
        return cls(None, gates, informed=True, raw=raw)

    @classmethod
    def recorded(cls, routing: Routing, *, informed: bool) -> "Scores":
        """Return what the selector read, (1,T,E), from the record of its routing; `informed`: gates are an informer's."""
        logits, gates = routing.logits.unsqueeze(0), routing.gates.unsqueeze(0)
        return cls.from_gates(gates, logits) if informed else cls(logits, gates, informed=False, raw=logits)


class Rule(ABC):
    """A model's convention (abstract): how logits become gates, by what experts are ranked, how the chosen are weighted.

    Slots come ranked; `fade` is the logarithm of what dampens a slot, None where none is.
    """

    gate: GateFunction = SOFTMAX  # the distribution that informers act on and selection reads
    ordered = True  # the ranks' order is the weights' order
    renormalise = True  # the sum of a token's weights does not depend on which experts it uses, at least roughly
    convention: Literal["softmax", "switch"] | None = None  # the option `weights` of `TopK` that gives this rule, if any
    strip = 0.1  # a narrow strip below the k-th, in levels: of a softmax, the experts within 10% of its gate

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def ranks(self, scores: Scores) -> Tensor:
        """(B,N,E): what experts are sorted by."""
        return scores.key

    def levels(self, scores: Scores) -> Tensor:
        """(B,N,E): what the gaps between experts are measured in, in the same order as the ranks."""
        return scores.logits

    def amounts(self, scores: Scores) -> Amounts | None:
        """What `weigh` weighs by, where that is all it does and one kernel can do it; None for a rule of another kind."""
        return None

    @abstractmethod
    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        """(B,N,K): the weight of each slot `experts (B,N,K)`, 0 where not `in_use`; the first k are the chosen ones."""

    def held_weights(self, experts: Tensor, scores: Scores, live: "Selection") -> Tensor:
        """(B,N,K): the weights of `experts (B,N,K)`, held fixed, under `scores`, as of `Selector.held_weights`."""
        in_use = experts < scores.gates.shape[-1]
        slots = experts.where(in_use, 0)
        # `weigh` takes slots ranked: Phi-MoE's weight of an expert depends on which went before.
        ranks = self.ranks(scores).gather(-1, slots).where(in_use, -torch.inf)
        order = ranks.argsort(dim=-1, descending=True, stable=True)
        weights = self.weigh(scores, slots.gather(-1, order), in_use.gather(-1, order), None, slots.shape[-1])
        return live.where_chosen(experts, torch.zeros_like(weights).scatter(-1, order, weights))

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        """Declare what must hold for tokens to keep their k experts; None: no certificate is known."""
        return None


class Selection(NamedTuple):
    """What a selector returns."""

    experts: Tensor  # (B,N,K), the sentinel E in unused slots
    weights: Tensor  # (B,N,K), 0 in unused slots
    gates: Tensor  # (B,N,E), what it read
    losses: Mapping[str, Tensor]
    scale: float = 1.0  # what a router has multiplied the weights with; 1 as a selector returns them

    @classmethod
    def recorded(cls, routing: Routing, scale: float = 1.0) -> "Selection":
        """Return the selection, (1,T,K), in the record of a router's forward; `scale` is the router's."""
        experts, weights, gates = (rows.unsqueeze(0) for rows in (routing.experts, routing.weights, routing.gates))
        return cls(experts, weights, gates, {}, scale)

    def weights_of(self, experts: Tensor) -> Tensor:
        """(B,N,K): the weight that each of `experts (B,N,K)` has in this selection, 0 where it was not chosen."""
        dense = self.weights.new_zeros(*self.gates.shape[:-1], self.gates.shape[-1] + 1)
        dense = dense.scatter_add(-1, self.experts, self.weights)
        return dense.gather(-1, experts).where(experts < self.gates.shape[-1], 0.0)

    def where_chosen(self, experts: Tensor, otherwise: Tensor, *, scaled: bool = False) -> Tensor:
        """(B,N,K): `weights_of(experts)` where a token's `experts` are the chosen set, in any order; else `otherwise`.

        `otherwise` is multiplied with `scale`, unless it was made of weights that are `scaled` already.
        """
        none = torch.zeros(*self.gates.shape[:-1], self.gates.shape[-1] + 1, dtype=torch.bool, device=self.gates.device)
        held, chosen = (none.scatter(-1, members, True)[..., :-1] for members in (experts, self.experts))
        otherwise = otherwise if scaled or self.scale == 1 else self.scale * otherwise
        return self.weights_of(experts).where((held == chosen).all(-1, keepdim=True), otherwise)


class Selector(Part):
    """Scores to experts and weights (abstract)."""

    rule: Rule | None = None  # the convention it ranks and weighs by, where it has one

    @property
    def ragged(self) -> bool:
        """May it leave slots unused? Experts functions that are not ours do not all survive the sentinel."""
        return True

    @property
    def gate(self) -> GateFunction:
        """The distribution that informers act on and selection reads."""
        return SOFTMAX if self.rule is None else self.rule.gate

    def conditions(self, scores: Scores) -> Conditions | None:
        """Declare what must hold for tokens to keep their set, in evaluation; None: no certificate is known."""
        return None

    @property
    def core(self) -> int | None:
        """How many of the best experts are certified and compared as a token's set; None: all that it chooses.

        Experts beyond the core enter and leave with weight 0, which is no switch.
        """
        return None

    @property
    def convention(self) -> Literal["softmax", "switch"] | None:
        """The option `weights` of `TopK` that weights experts as this selector does; None where none does."""
        return None if self.rule is None else self.rule.convention

    def levels(self, scores: Scores) -> Tensor:
        """(B,N,E): what the gaps between experts are measured in, in the order by which they are chosen."""
        return scores.logits if self.rule is None else self.rule.levels(scores)

    def active_experts(self, place: Place) -> Active | None:
        """Return how many experts a token uses in a layer; None: plans count all of them."""
        return None

    @abstractmethod
    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """(B,N,K): the weights of `experts (B,N,K)`, held fixed, under `scores`; 0 in unused slots, which hold E.

        `live` is what this selector returned for `scores`, with weights multiplied by `live.scale`: where a token's held set
        is the one in `live`, the weights are those in `live`, bit for bit; elsewhere they have the same scale.
        `live.where_chosen` does both. Differentiable in the scores.
        """

    @abstractmethod
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection: ...
