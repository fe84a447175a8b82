"""The parts of a router: the base class of each stage, and what a part declares about itself.

    Score       tokens (B,N,d) -> logits (B,N,E)
    Informer    gates (B,N,E)  -> gates (B,N,E)                 mixes experts or tokens
    Selector    Scores         -> experts, weights (B,N,K)      most selectors use a Rule

A part needs its `forward` (a selector also `held_weights`). Certificates, plans and audits read `declares`, one optional
object, and never test the class of a part. What a part does not declare is reported as unknown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32, scaled_linear_float32
from holdfast.kernels.select import TINY as TINY
from holdfast.kernels.select import normalise as normalise
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import (
    FLOAT,
    SOFTMAX,
    ActiveExperts,
    Conditions,
    Cost,
    GateFunction,
    LayerKind,
    LayerSizes,
    Mixing,
    Order,
    Shares,
)
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection

NOT_BY_GATES = "does not select by gates"  # why a selector refuses informers


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


@dataclass(frozen=True)
class Declarations:
    """What a part may declare. Each field has a default; a function is called when an instrument needs its result.

    cost                what the part keeps and sends in a layer, without the parts that it wraps; None: plans count only its
                        parameters, state and FLOPs
    snapshot            tensors to watch during training, by name; "graph" (E,E) is a learned expert graph
    static_rows         whether its rows of earlier tokens may be kept in tensors of a static KV cache's full length
    wants_token_counts  whether training passes to `use_token_counts` how often each token id occurs in its data

    With `static_rows`, `cache.extend` also returns rows that are not written yet, which the mask of `Context.visible_tokens`
    excludes, and the current tokens are not the last rows (`Context.excludes_later_tokens`, `RouterCache.current`).
    Otherwise rows grow by one for each token.
    """

    cost: Callable[[LayerSizes], Cost] | None = None
    snapshot: Callable[[], Mapping[str, Tensor]] = dict
    static_rows: bool = False
    wants_token_counts: bool = False


@dataclass(frozen=True)
class ScoreDeclarations(Declarations):
    """What a score may declare, besides the fields of `Declarations`.

    order               keys, one per expert, that are affine in the token (tokens and context are given) and have the order
                        of its logits; None: no certificate is known
    reusable_score      the score that a later `reroute` of the same layer may use again
    reads_tokens        False: logits depend on the context only, so no change of the tokens changes the routing
    scores_sequence     True: all tokens of a sequence have the same logits; a token-side informer is an error
    scores_all          False: a token has scores for selected experts only; a selector that asks others is an error
    """

    order: Callable[[Tensor, Context], Order | None] | None = None
    reusable_score: "Score | None" = None
    reads_tokens: bool = True
    scores_sequence: bool = False
    scores_all: bool = True


@dataclass(frozen=True)
class InformerDeclarations(Declarations):
    """What an informer may declare, besides the fields of `Declarations`; None: no certificate is known.

    graph   the matrix A (E,E) of an expert-side informer, g = p A^T
    mixing  how a token-side informer mixes tokens (B,N,d) in a context, and how much a perturbation up to a radius in a norm
            changes the mixing
    """

    graph: Callable[[], Tensor] | None = None
    mixing: Callable[[Tensor, Context, Norm], Mixing] | None = None


@dataclass(frozen=True)
class SelectorDeclarations(Declarations):
    """What a selector may declare, besides the fields of `Declarations`.

    conditions      the conditions under which tokens keep their set in evaluation; None: no certificate is known
    shares          how weights follow from scores in evaluation; None: no bound of a layer's output is known. It may raise
                    NoCertificate, with the reason
    core            the size of the hard core, which is certified and compared as a token's set; None: that is the whole set.
                    Experts outside the core enter and leave with weight 0, which is not a flip
    levels          (B,N,E): the values whose differences are the gaps between experts, in the order of selection
    active          how many experts a token uses in a layer; None: plans count all
    layer_cost      what the layer keeps and computes besides its router and its experts' rows
    overflow        the share of experts that lost their row to `most_rows` in the last training batch; None: no batch loses
                    any. If it is positive, training traits do not hold for the batch: its other tokens have changed the
                    selection
    fixed_sets      in evaluation, a token's set depends on its id only, whatever its scores are
    equal_loads     in training every expert gets the same number of tokens: losses of counts have no gradient
    rule            the name of the rule by which it ranks and weighs experts, for messages; None: the name of its class
    weights_option  the option `weights` of `TopK` that weighs experts as this selector does; None: there is none. `reroute`
                    of a layer made by `sparsify` gives it to the next router, so that experts are weighed as before
    refuses_informers   why a router with an informer is an error, after "it"; None: informers are welcome
    takes_noise     False: it does not read scores in training, so a router with noise is an error
    refuses_dropout     why a router with expert dropout is an error, after "it"; None: it ranks the experts that are left
    asks_others     tokens that an expert has no place for ask other experts, in the order of their scores
    not_limited     why no capacity may limit this selector; None: it may
    in_onnx         False: ONNX lacks operators that it needs, so exporting it is an error
    refuses_causal  a causal model may not use it: the user has not asked for a router that is not causal
    """

    conditions: Callable[[Scores], Conditions | None] | None = None
    shares: Callable[[], Shares | None] | None = None
    core: int | None = None
    levels: Callable[[Scores], Tensor] = attrgetter("logits")
    active: Callable[[LayerSizes], ActiveExperts] | None = None
    layer_cost: Callable[[LayerSizes], Cost] | None = None
    overflow: Tensor | None = None
    fixed_sets: bool = False
    equal_loads: bool = False
    rule: str | None = None
    weights_option: Literal["softmax", "switch"] | None = None
    refuses_informers: str | None = None
    takes_noise: bool = True
    refuses_dropout: str | None = None
    asks_others: bool = False
    not_limited: str | None = None
    in_onnx: bool = True
    refuses_causal: bool = False


class Part(nn.Module, ABC):
    """One part of a router (abstract). Its options are keyword-only and are checked in the constructor."""

    traits: Traits = Traits()
    coefficients: tuple[str, ...] = ()  # the names of its attributes that are loss coefficients
    # The fields of a Context that this part needs besides `causal`, `token_mask` and `cache`. "attention.mask" is only which
    # tokens the attention lets see each other (`Context.visible_tokens`); it costs nothing. "attention" does not include the
    # output projection, which may have to be loaded and dequantised. "attention.projection" includes it, and also the
    # keys and values of the whole sequence; models with sliding windows do not store all of these, so they raise an error.
    reads: tuple[str, ...] = ()
    pretrained_defaults: ClassVar[Mapping[str, Any]] = {}  # options with which a pretrained model first keeps its outputs
    # False while a model in training mode generates text: then a part stages no state, returns no loss and selects as in
    # evaluation, because ranks may run different numbers of such forwards.
    learning = True

    @property
    def declares(self) -> Declarations:
        """What this part declares for certificates, plans and audits."""
        return Declarations()

    @property
    def training_traits(self) -> Traits:
        """The traits in training. A part that reads the whole batch only in training overrides this."""
        return self.traits

    @property
    def sees_batch(self) -> bool:
        """Whether this forward may read the whole batch and, over several ranks, exchange data with the other ranks."""
        return self.training and self.learning

    def progress(self, fraction: float) -> None:
        """Set the training progress, from 0 to 1. Parts that change their options during training override this."""

    def join_model(self, parts: "Sequence[Part]") -> None:
        """Receive the parts of all routers of a model, this one among them, in the order of its layers.

        A part whose state depends on other layers overrides this and keeps references to their parts, in a list: an
        attribute would make them submodules.
        """

    def use_token_counts(self, counts: Tensor) -> None:
        """Set what depends on how often each token id occurs, `counts (vocabulary,)`. Parts with a table override this."""

    def balance_groups(self, tokens: Tensor, context: Context) -> Tensor | None:
        """Return (B,N,G) bool: the groups of tokens whose load is balanced separately; None: all tokens are one group."""
        return None

    @property
    def wrapped(self) -> "tuple[Part, ...]":
        """The parts inside this one, which declare their own cost."""
        return ()

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
    """The stage score (abstract): computes logits from tokens. Its constructor sets `self.dim` and `self.experts`."""

    dim: int
    experts: int
    slots: int | None = None  # slots of each expert, if logits are those of slots (SoftMoE); None: those of experts

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations()

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """Return float32 logits (B,N,E) of `tokens (B,N,d)`, which have the model's dtype; with `slots`, (B,N,E*slots)."""


class ScalableScore(Score):
    """A score that can also be computed on scaled features of its tokens (abstract), as clustering (AC) needs it."""

    mixed_clusters = 1  # how many clusters of a token AC mixes by default

    @abstractmethod
    def on_scaled(self, tokens: Tensor, mixture: Tensor, table: Tensor) -> Tensor:
        """Return the logits of `tokens (B,N,d)` times m = mixture @ table, for `mixture (T,C)` and `table (C,d)`.

        A token whose row in the mixture is 0 is not scaled. No gradient flows through m.
        """


class LinearScore(ScalableScore):
    """A score that multiplies its tokens with one matrix (abstract): logits = finish(x matrix^T)."""

    weight: Tensor

    @property
    def matrix(self) -> Tensor:
        """The matrix (n,d), `weight` unless a score overrides this."""
        return self.weight

    @abstractmethod
    def finish(self, projected: Tensor) -> Tensor:
        """Return logits (B,N,E) of the products `projected (B,N,n)`, float32."""

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(cost=lambda sizes: Cost("score", kept=FLOAT * sizes.experts), reusable_score=self)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.finish(linear_float32(tokens, self.matrix))

    def on_scaled(self, tokens: Tensor, mixture: Tensor, table: Tensor) -> Tensor:
        return self.finish(scaled_linear_float32(tokens, mixture, table, self.matrix))


class Informer(Part):
    """The stage inform (abstract): mixes the gates of experts or of tokens.

    An expert-side informer computes `gates @ graph^T`, a token-side informer `graph @ gates`. With one of each side, the
    result does not depend on which runs first.
    """

    side: Literal["expert", "token"]

    @property
    def declares(self) -> InformerDeclarations:
        return InformerDeclarations()

    @property
    def inert(self) -> bool:
        """Whether this informer never changes gates. The router then skips it."""
        return False

    @abstractmethod
    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        """Return the mixed gates, non-negative and of the shape of `gates (B,N,E)`; they need not sum to 1."""


class Noise(Part):
    """Noise on the logits that a selector reads in training (abstract); `holdfast.routing.noise` has the usual kinds."""

    temperature = 1.0  # the router divides the logits of the score by it, in training and evaluation

    @property
    def declares(self) -> Declarations:
        return Declarations(cost=lambda sizes: Cost("noise"))

    @abstractmethod
    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `logits (B,N,E)` with noise; `tokens (B,N,d)` are the router's input."""


class Selector(Part):
    """The stage select (abstract): chooses experts from scores and gives them weights.

    In a pretrained model, a selector whose constructor has a parameter `rule` receives the model's `Rule` and follows it,
    with `gate = rule.gate`, as `TopK` does. Without one, its own gate function and weights count; only the router's scale
    is kept.
    """

    gate: GateFunction = SOFTMAX  # the function from logits to the gates that informers and the selector read
    # Whether it may leave slots unused. Some functions of other libraries that run experts do not support this.
    ragged = True
    layer_kind: LayerKind = "moe"  # the layer that runs experts as this selector means it

    def __init__(self) -> None:
        super().__init__()
        self.noise: Noise | None = None  # the router adds it to the scores in training, before this part selects

    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations()

    @abstractmethod
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        """Return the experts and weights of each token, and the loss terms of this part.

        Of experts with equal scores the one with the lower index is selected first: `holdfast.routing.top` does that.
        """

    @abstractmethod
    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return (B,N,K): the weights of the held set `experts (B,N,K)` under `scores`; 0 in unused slots (index E).

        Audits hold the set of a token and change its scores: what then changes in the output is not due to a flip. `live` is
        what this selector returned for `scores`, with weights multiplied by `live.scale`. Compute the weights that the held
        experts would have if they were selected, and return `live.weights_if_same_set(experts, weights)`. It multiplies
        them by `live.scale`, and gives a token whose held set is the one in `live` exactly the weights in `live`, however
        the rest was rounded. The result must be differentiable in the scores.
        """

    def replayed_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return (B,N,K): the weights of replayed sets, in the same form as `held_weights`, which they are by default."""
        return self.held_weights(experts, scores, live)

    def ranks(self, scores: Scores) -> Tensor:
        """Return (B,N,E): what the experts of a token are sorted by in evaluation."""
        return scores.key

    def adjusted(self, logits: Tensor, tokens: Tensor, context: Context, informed: bool) -> Tensor:
        """Return the logits (B,N,E) whose gates informers and this selector read: `logits`, unless it changes them first.

        informed    whether an informer follows, before `forward`
        """
        return logits

    def with_noise(self, noise: Noise, scores: Scores, tokens: Tensor) -> Scores:
        """Return the scores with noise. Informed gates keep their sum, which need not be 1 and may be 0."""
        noisy = noise(scores.logits, tokens)
        if not scores.informed:
            return Scores(noisy, self.gate(noisy), informed=False, raw=noisy)
        return Scores.from_gates(scores.gates.sum(-1, keepdim=True) * torch.softmax(noisy, dim=-1), scores.raw)

    def most_rows(self, tokens: int) -> int | None:
        """Return how many slots of this many tokens have an expert at most, in the current mode; None: all slots may.

        On a GPU, experts allocate memory for so many rows. A selector that declares a number must keep it in every batch.
        """
        return None
