"""The parts of a router: the base class of each stage, and what a part declares about itself.

    Score       tokens (B,N,d) -> logits (B,N,E)
    Informer    gates (B,N,E)  -> gates (B,N,E)                 mixes experts or tokens
    Selector    Scores         -> experts, weights (B,N,K)      most selectors use a Rule

Certificates, plans and audits call the methods in which a part declares its properties (`order`, `cost`, `held_weights`,
...) and never test its class. What a part does not declare is reported as unknown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32, scaled_linear_float32
from holdfast.kernels.select import TINY as TINY
from holdfast.kernels.select import Amounts
from holdfast.kernels.select import normalise as normalise
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import (
    FLOAT,
    SOFTMAX,
    ActiveExperts,
    Compared,
    Conditions,
    Cost,
    GateFunction,
    LayerKind,
    LayerSizes,
    Mixing,
    Order,
    Values,
    projection_flops,
)
from holdfast.routing.records import Context, Routing


@dataclass(frozen=True)
class Traits:
    """Properties of a router in evaluation. The conformance suite tests that each declared value is correct."""

    causal: bool = True  # in a causal context, a later token does not change the routing of an earlier one
    batch_invariant: bool = True  # other sequences and padding do not change the routing
    cacheable: bool = True  # decoding step by step with a cache gives the routing of one forward
    sequence_aware: bool = False  # reads other tokens, so tokens must have shape (B,N,d)

    def __and__(self, other: "Traits") -> "Traits":
        """Return the traits of two parts in one pipeline."""
        return Traits(
            causal=self.causal and other.causal,
            batch_invariant=self.batch_invariant and other.batch_invariant,
            cacheable=self.cacheable and other.cacheable,
            sequence_aware=self.sequence_aware or other.sequence_aware,
        )


class Part(nn.Module, ABC):
    """One part of a router (abstract). Its options are keyword-only and are checked in the constructor."""

    traits: Traits = Traits()
    coefficients: tuple[str, ...] = ()  # the names of its attributes that are loss coefficients
    # The fields of a Context that this part needs besides `causal`, `token_mask` and `cache`. "attention" does not include
    # the output projection, which may have to be loaded and dequantised. "attention.projection" includes it, and also the
    # keys and values of the whole sequence; models with sliding windows do not store all of these, so they raise an error.
    reads: tuple[str, ...] = ()
    pretrained_defaults: ClassVar[Mapping[str, Any]] = {}  # options with which a pretrained model first keeps its outputs

    @property
    def training_traits(self) -> Traits:
        """The traits in training. A part that reads the whole batch only in training overrides this."""
        return self.traits

    def progress(self, fraction: float) -> None:
        """Set the training progress, from 0 to 1. Parts that change their options during training override this."""

    @property
    def wrapped(self) -> "tuple[Part, ...]":
        """The parts inside this one, which declare their own cost."""
        return ()

    def cost(self, sizes: LayerSizes) -> Cost | None:
        """Declare the cost of this part in a layer, without `wrapped` parts; if None, plans count only its parameters."""
        return None

    def snapshot(self) -> Mapping[str, Tensor]:
        """Return tensors to watch during training, by name. "graph" (E,E) is a learned expert graph."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` as `nn.Module` does, but keep the dtype of state: `model.to(torch.bfloat16)` must not round it."""
        kept = {name: state for name, state in self._buffers.items() if state is not None and state.is_floating_point()}
        super()._apply(fn, recurse)
        for name, state in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != state.dtype:
                self._buffers[name] = state.to(moved.device)
        return self


class Score(Part):
    """The stage score (abstract): computes logits from tokens."""

    dim: int
    experts: int
    slots: int | None = None  # slots of each expert, if logits are those of slots (SoftMoE); None: those of experts

    @property
    def reusable_score(self) -> "Score | None":
        """The score that a later `reroute` of the same layer may use again; None if it must make a new one."""
        return None

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """Return float32 logits (B,N,E) of `tokens (B,N,d)`, which have the model's dtype; with `slots`, (B,N,E*slots)."""

    def order(self, tokens: Tensor, context: Context) -> Order | None:
        """Declare keys, one per expert, that are affine in the token and have the order of its logits; None if unknown."""
        return None

    def values(self, tokens: Tensor, context: Context) -> Values | None:
        """Declare how logits follow from the keys of `order`; for selectors and informers that need more than the order."""
        return None


class ScalableScore(Score):
    """A score that can also be computed on scaled features of its tokens (abstract), as clustering (AC) needs it."""

    mixed_clusters = 1  # how many clusters of a token AC mixes by default
    recomputes_scales = True  # the backward of `on_scaled` computes the scales again

    @abstractmethod
    def on_scaled(self, tokens: Tensor, mixture: Tensor, table: Tensor) -> Tensor:
        """Return the logits of `tokens (B,N,d)` times m = mixture @ table, for `mixture (T,C)` and `table (C,d)`.

        A token whose row in the mixture is 0 is not scaled. No gradient flows through m.
        """


class LinearScore(ScalableScore):
    """A score that multiplies its tokens with one matrix (abstract): logits = finish(x matrix^T)."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """The matrix (n,d)."""

    @abstractmethod
    def finish(self, projected: Tensor) -> Tensor:
        """Return logits (B,N,E) of the products `projected (B,N,n)`, float32."""

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.finish(linear_float32(tokens, self.matrix))

    def on_scaled(self, tokens: Tensor, mixture: Tensor, table: Tensor) -> Tensor:
        return self.finish(scaled_linear_float32(tokens, mixture, table, self.matrix))

    @property
    def reusable_score(self) -> Score | None:
        return self

    def cost(self, sizes: LayerSizes) -> Cost | None:
        """Count the product with `matrix` and its two gradients. A score must add the matrix products in its `finish`."""
        forward = projection_flops(self.matrix)
        return Cost("score", forward, 2 * forward, kept=FLOAT * sizes.experts)


class Informer(Part):
    """The stage inform (abstract): mixes the gates of experts or of tokens.

    An expert-side informer computes `gates @ graph^T`, a token-side informer `graph @ gates`. With one of each side, the
    result does not depend on which runs first.
    """

    side: Literal["expert", "token"]

    @property
    def inert(self) -> bool:
        """Whether this informer never changes gates. The router then skips it."""
        return False

    def expert_graph(self) -> Tensor | None:
        """Declare the matrix A (E,E) of an expert-side informer, g = p A^T; None if no certificate is known."""
        return None

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing | None:
        """Declare how a token-side informer mixes `tokens (B,N,d)`, and how much a perturbation up to a radius in `norm`
        changes the mixing; None if no certificate is known."""
        return None

    @abstractmethod
    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        """Return the mixed gates, non-negative and of the shape of `gates (B,N,E)`; they need not sum to 1."""


class Scores:
    """What a selector reads: the same scores as logits and as gates.

    Without informers, gates are computed from logits; after an informer, logits are computed from its gates. `key` is
    the one that was computed first.
    """

    def __init__(
        self,
        logits: Tensor | None,
        gates: Tensor,
        informed: bool,
        raw: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> None:
        self._logits = logits
        self.gates = gates  # (B,N,E), non-negative
        self.informed = informed
        self.raw = raw  # (B,N,E), the logits before any informer
        self.slots = slots  # (B,N,E,p), the logits of slots; None: the score has logits of experts

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
        """Return (B,N,E): what experts are sorted by."""
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


class Selection(NamedTuple):
    """What a selector returns."""

    experts: Tensor  # (B,N,K), E in unused slots
    weights: Tensor  # (B,N,K), 0 in unused slots
    gates: Tensor  # (B,N,E), those of the scores that the selector read
    losses: Mapping[str, Tensor]
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
        return cls(experts, weights, gates, {}, scale)

    def weights_of(self, experts: Tensor) -> Tensor:
        """Return (B,N,K): the weight of each of `experts (B,N,K)` in this selection; 0 if it was not selected."""
        dense = self.weights.new_zeros(*self.gates.shape[:-1], self.gates.shape[-1] + 1)
        dense = dense.scatter_add(-1, self.experts, self.weights)
        return dense.gather(-1, experts).where(experts < self.gates.shape[-1], 0.0)

    def weights_if_same_set(self, experts: Tensor, otherwise: Tensor, *, scaled: bool = False) -> Tensor:
        """Return `weights_of(experts)` for tokens whose `experts (B,N,K)` equal the selected set, else `otherwise (B,N,K)`.

        `otherwise` is multiplied by `scale`, unless it is `scaled` already.
        """
        no_experts = torch.zeros(
            *self.gates.shape[:-1], self.gates.shape[-1] + 1, dtype=torch.bool, device=self.gates.device
        )
        held, chosen = (no_experts.scatter(-1, members, True)[..., :-1] for members in (experts, self.experts))
        otherwise = otherwise if scaled or self.scale == 1 else self.scale * otherwise
        return self.weights_of(experts).where((held == chosen).all(-1, keepdim=True), otherwise)


class Selector(Part):
    """The stage select (abstract): chooses experts from scores and gives them weights."""

    rule: Rule | None = None  # how it ranks and weighs experts, if it uses a rule
    takes_informers = True  # False: it does not read gates, so a router with an informer is an error
    layer_kind: LayerKind = "moe"  # the layer that runs experts as this selector means it

    @property
    def refuses_causal(self) -> bool:
        """Whether a causal model may not use it, because the user has not asked for a router that is not causal."""
        return False

    @property
    def ragged(self) -> bool:
        """Whether it may leave slots unused. Some functions of other libraries that run experts do not support this."""
        return True

    @property
    def gate(self) -> GateFunction:
        """The function from logits to the gates that informers and the selector read."""
        return SOFTMAX if self.rule is None else self.rule.gate

    def conditions(self, scores: Scores) -> Conditions | None:
        """Declare the conditions under which tokens keep their set in evaluation; None if no certificate is known."""
        return None

    @property
    def core(self) -> int | None:
        """The size of the hard core, which is certified and compared as a token's set; None if that is the whole set.

        Experts outside the core enter and leave with weight 0, which is not a flip.
        """
        return None

    @property
    def weights_option(self) -> Literal["softmax", "switch"] | None:
        """The option `weights` of `TopK` that weighs experts as this selector does; None if no option does."""
        return None if self.rule is None else self.rule.weights_option

    def levels(self, scores: Scores) -> Tensor:
        """Return (B,N,E): the values whose differences are the gaps between experts, in the order of selection."""
        return scores.logits if self.rule is None else self.rule.levels(scores)

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts | None:
        """Declare how many experts a token uses in a layer; if None, plans count all experts."""
        return None

    def layer_cost(self, sizes: LayerSizes) -> Cost | None:
        """Declare what the layer computes besides its router and the rows of its experts; None if that is nothing."""
        return None

    @abstractmethod
    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return (B,N,K): the weights of the held set `experts (B,N,K)` under `scores`; 0 in unused slots (index E).

        `live` is what this selector returned for `scores`, with weights multiplied by `live.scale`. A token whose held set
        is the one in `live` must get exactly the weights in `live`; weights of other tokens are multiplied by `live.scale`
        too. `live.weights_if_same_set` does both. The result is differentiable in the scores.
        """

    @abstractmethod
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        """Return the experts and weights of each token, and the loss terms of this part."""
