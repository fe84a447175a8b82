"""The slots of the pipeline: score -> inform -> select, and what every part declares about itself.

tokens (B,N,d) -> logits (B,N,E) -> gates (B,N,E) -> experts, weights (B,N,K)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn

from holdfast.kernels.choose import TINY as TINY
from holdfast.kernels.choose import Amounts
from holdfast.kernels.choose import shares as shares
from holdfast.kernels.precision import linear_float32
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import SOFTMAX, Compared, Conditions, GateFunction, Mixing, Order, Values
from holdfast.routing.records import Context


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
    # which may have to be loaded and dequantised: "attention.projection" asks for it.
    reads: tuple[str, ...] = ()
    entering: ClassVar[
        Mapping[str, Any]
    ] = {}  # defaults with which it enters a pretrained model, so as to start from its outputs

    def progress(self, fraction: float) -> None:
        """Training has come this far, from 0 to 1."""

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


class Rule(ABC):
    """A model's convention (abstract): how logits become gates, by what experts are ranked, how the chosen are weighted.

    Slots come ranked; `fade` is the logarithm of what dampens a slot, None where none is.
    """

    gate: GateFunction = SOFTMAX  # the distribution that informers act on and selection reads
    ordered = True  # the ranks' order is the weights' order
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

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        """Declare what must hold for tokens to keep their k experts; None: no certificate is known."""
        return None


class Selection(NamedTuple):
    """What a selector returns."""

    experts: Tensor  # (B,N,K), the sentinel E in unused slots
    weights: Tensor  # (B,N,K), 0 in unused slots
    gates: Tensor  # (B,N,E), what it read
    losses: Mapping[str, Tensor]


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

    @property
    def core(self) -> int | None:
        """How many of the best experts are certified and compared; None: all that it chooses."""
        return None

    def conditions(self, scores: Scores) -> Conditions | None:
        """Declare what must hold for tokens to keep their set, in evaluation; None: no certificate is known."""
        return None

    @abstractmethod
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection: ...
