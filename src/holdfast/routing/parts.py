"""The parts of a router: the base class of each stage, and what a part declares about itself.

    Score       tokens (B,N,d) -> logits (B,N,E)
    Informer    gates (B,N,E)  -> gates (B,N,E)                 mixes experts or tokens
    Selector    Scores         -> experts, weights (B,N,K)      most selectors use a Rule

Certificates, plans and audits call the methods in which a part declares its properties (`order`, `cost`, `held_weights`,
...) and never test its class. What a part does not declare is reported as unknown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    Values,
    projection_flops,
)
from holdfast.routing.records import Context
from holdfast.routing.rules import Rule, Scores, Selection


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
    # The fields of a Context that this part needs besides `causal`, `token_mask` and `cache`. "attention.mask" is only which
    # tokens the attention lets see each other (`Context.visible_tokens`); it costs nothing. "attention" does not include the
    # output projection, which may have to be loaded and dequantised. "attention.projection" includes it, and also the
    # keys and values of the whole sequence; models with sliding windows do not store all of these, so they raise an error.
    reads: tuple[str, ...] = ()
    # Whether its rows of earlier tokens may be kept in tensors of a static KV cache's full length. Then `cache.extend` also
    # returns rows that are not written yet, which the mask of `Context.visible_tokens` excludes, and the current tokens are
    # not the last rows (`Context.excludes_later_tokens`, `RouterCache.current`). Otherwise rows grow by one for each token.
    static_rows: ClassVar[bool] = False
    # Options whose meaning has changed, with a number for each meaning: comparisons do not mix results of two meanings.
    option_versions: ClassVar[Mapping[str, int]] = {}
    definition: ClassVar[int] = 1  # raised when the defaults of a part come to mean something else
    pretrained_defaults: ClassVar[Mapping[str, Any]] = {}  # options with which a pretrained model first keeps its outputs
    # False while a model in training mode generates text: then a part stages no state, returns no loss and selects as in
    # evaluation, because ranks may run different numbers of such forwards.
    learning = True
    wants_token_counts = False  # True: training passes to `use_token_counts` how often each token id occurs in its data

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
    reads_tokens = True  # False: logits depend on the context only, so no change of the tokens changes the routing
    scores_sequence = False  # True: all tokens of a sequence have the same logits; a token-side informer is an error
    scores_all = True  # False: a token has scores for selected experts only; a selector that asks others is an error
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


class Noise(Part):
    """Noise on the logits that a selector reads in training (abstract); `holdfast.routing.noise` has the usual kinds."""

    @abstractmethod
    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `logits (B,N,E)` with noise; `tokens (B,N,d)` are the router's input."""


class Selector(Part):
    """The stage select (abstract): chooses experts from scores and gives them weights."""

    rule: Rule | None = None  # how it ranks and weighs experts, if it uses a rule
    takes_informers = True  # False: it does not read gates, so a router with an informer is an error
    asks_others = False  # True: tokens that an expert has no place for ask other experts, in the order of their scores
    not_limited: str | None = None  # why no capacity may limit this selector; None: it may
    equal_loads = False  # in training every expert gets the same number of tokens: losses of counts have no gradient
    fixed_sets = False  # True: in evaluation, a token's set depends on its id only, whatever its scores are
    layer_kind: LayerKind = "moe"  # the layer that runs experts as this selector means it
    in_onnx = True  # False: ONNX lacks operators that it needs, so exporting it is an error
    takes_noise = True  # False: it does not read scores in training, so a router with noise is an error

    def __init__(self) -> None:
        super().__init__()
        self.noise: Noise | None = None  # the router adds it to the scores in training, before this part selects

    def with_noise(self, noise: Noise, scores: Scores, tokens: Tensor) -> Scores:
        """Return the scores with noise. Informed gates keep their sum, which need not be 1 and may be 0."""
        noisy = noise(scores.logits, tokens)
        if not scores.informed:
            return Scores(noisy, self.gate(noisy), informed=False, raw=noisy)
        return Scores.from_gates(scores.gates.sum(-1, keepdim=True) * torch.softmax(noisy, dim=-1), scores.raw)

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

    def ranks(self, scores: Scores) -> Tensor:
        """Return (B,N,E): what the experts of a token are sorted by in evaluation."""
        return scores.key if self.rule is None else self.rule.ranks(scores)

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts | None:
        """Declare how many experts a token uses in a layer; if None, plans count all experts."""
        return None

    def most_rows(self, tokens: int) -> int | None:
        """Return how many slots of this many tokens have an expert at most, in the current mode; None: all slots may.

        On a GPU, experts allocate memory for so many rows. A selector that declares a number must keep it in every batch.
        """
        return None

    @property
    def overflow(self) -> Tensor | None:
        """The share of experts that lost their row to `most_rows` in the last training batch; None: no batch loses any.

        If it is positive, training traits do not hold for the batch: its other tokens have changed the selection.
        """
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

    def replayed_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return (B,N,K): the weights of replayed sets, in the same form as `held_weights`, which they are by default."""
        return self.held_weights(experts, scores, live)

    @abstractmethod
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        """Return the experts and weights of each token, and the loss terms of this part."""
