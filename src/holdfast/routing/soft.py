"""The routers of layers that mix tokens or experts: SoftMoE (Puigcerver et al. 2024) and SMEAR (Muqeeth et al. 2024).

The experts of a **SoftMoE** layer run on slots, which are weighted means of tokens.

    L = norm(X) (scale * norm(Phi))^T                   logits of N tokens and S = E * p slots, p for each expert
    D = softmax of L over the real tokens of the sequence (dispatch),  C = softmax of L over slots (combine)
    Y = C f(D^T X)

The sum of C over the slots of an expert is the softmax of logsumexp(L over its slots). So a SoftMoE layer has gates (T,E)
like any other layer, and informers change them: with informed gates g', C' = g'_e * (softmax of L within the slots of e).

    SlotScore   L; AC scales X for L only
    Slots       D, and C as the gates of experts times the shares of their slots

In a **SMEAR** layer all experts are merged into one for each sequence.

    theta = sum_e g_e theta_e,  g = softmax(score(LayerNorm(mean of the sequence's real tokens)))

Every token of a sequence has the same gates. A sequence without a real token has equal gates.

    SequenceScore   the score of the mean token
    Merged          the mean of the gates, for `average="gates"`
"""

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.select import top
from holdfast.routing.declarations import FLOAT, ActiveExperts, Cost, LayerSizes, selection_bytes
from holdfast.routing.parts import ScalableScore, Score, ScoreDeclarations, Selector, SelectorDeclarations, Traits
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection, gather_slots
from holdfast.routing.scores import LARGE, SHORTEST, SMALLER

MOST_SLOTS = 65_536
PAPER_CLUSTERS = 8  # that ACMoE mixes for a SoftMoE layer (its appendix C.7)
Average = Literal["tokens", "gates"]


class SlotScore(ScalableScore):
    """L = norm(x) . scale norm(phi_s) for each of E * p slots s, where norm divides by the l2 length.

    slots   p, the number of slots of each expert. A layer computes B * E * p rows of experts for B sequences of N tokens;
            a top-k layer computes B * N * k, so p = N k / E costs the same
    """

    mixed_clusters = PAPER_CLUSTERS

    def __init__(self, dim: int, experts: int, *, slots: int = 1) -> None:
        super().__init__()
        if not 1 <= slots <= MOST_SLOTS:
            raise ValueError(f"slots is {slots}; an expert of a SoftMoE layer has at least 1 and at most {MOST_SLOTS:,}.")
        self.dim, self.experts, self.slots = dim, experts, slots
        self.phi = nn.Parameter(torch.empty(experts * slots, dim).normal_(std=dim**-0.5))
        self.scale = nn.Parameter(torch.ones(1))

    @property
    def matrix(self) -> Tensor:
        """(E*p,d): scale * norm(phi)."""
        return self.scale.float() * F.normalize(self.phi.float(), dim=-1)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self._logits(tokens.float())

    def on_scaled(self, tokens: Tensor, mixture: Tensor, table: Tensor) -> Tensor:
        scales = linear_float32(mixture, table.t())
        scales = scales.where(mixture.sum(1, keepdim=True) > 0, 1.0)
        return self._logits(tokens.float() * scales.view(tokens.shape))

    def _logits(self, features: Tensor) -> Tensor:
        # A length is a sum of squares, which overflows from 1e19 on. A factor that is a power of 2 is exact.
        huge = features.detach().abs().amax(-1, keepdim=True) > LARGE
        return linear_float32(F.normalize(features * torch.where(huge, SMALLER, 1.0), dim=-1, eps=SHORTEST), self.matrix)

    @property
    def declares(self) -> ScoreDeclarations:
        # Normalised tokens are kept in float32.
        return ScoreDeclarations(cost=lambda sizes: Cost("score", kept=FLOAT * (self.phi.shape[0] + sizes.dim)))


class AllExperts(Selector):
    """A selector with which every token uses every expert (abstract): K = E. Its layer reads whole sequences."""

    traits = Traits(causal=False, cacheable=False, sequence_aware=True)
    ragged = False

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(sizes.experts, sizes)),
            takes_noise=False,
            refuses_dropout="uses every expert for every token",
            not_limited="its layer sends no tokens to experts",
            refuses_causal=self.causal,
        )

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return gates: a token that holds some experts only does not renormalise them."""
        return live.weights_if_same_set(experts, gather_slots(scores.gates, experts))


class Slots(AllExperts):
    """Every token uses every expert: weights are the gates, K = E. A score without slots gives each expert one slot.

    A sequence without a real token has a dispatch and shares of 0, so that the layer returns 0 for it.

    causal      a slot is a mean of the whole sequence, so a token reads later ones. True: refuse causal models. False: run
                in them; then they cannot generate, and their perplexity cannot be compared with that of a causal model
    """

    layer_kind = "soft"

    def __init__(self, *, slots: int = 1, causal: bool = True) -> None:
        super().__init__(causal=causal)
        self.slots = slots

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        logits = scores.logits.unsqueeze(-1) if scores.slots is None else scores.slots
        shares, flat = logits.softmax(-1), logits.flatten(2)
        real = context.checked_mask(tokens)
        if real is None:
            dispatch = flat.softmax(1)
        else:
            mask = real.unsqueeze(-1)
            dispatch = flat.masked_fill(~mask, torch.finfo(flat.dtype).min).softmax(1).where(mask, 0.0)
            shares = shares.where(real.any(1).view(-1, 1, 1, 1), 0.0)
        dispatch = dispatch.unflatten(-1, shares.shape[2:])
        experts, weights = all_experts(scores.gates)
        rows = weights.new_full(tokens.shape[:2], flat.shape[-1] / max(tokens.shape[1], 1))
        return Selection(experts, weights, scores.gates, rows=rows, dispatch=dispatch, shares=shares)

    @property
    def declares(self) -> SelectorDeclarations:
        def active(sizes: LayerSizes) -> ActiveExperts:
            rows = sizes.experts * self.slots / sizes.length
            return ActiveExperts(rows, rows, rows, f"{sizes.experts * self.slots} slots for each sequence")

        def cost(sizes: LayerSizes) -> Cost:  # the dispatch and the shares are kept
            return Cost("selection", kept=selection_bytes(sizes.experts, sizes) + FLOAT * 2 * sizes.experts * self.slots)

        def layer_cost(sizes: LayerSizes) -> Cost:
            slots = sizes.experts * self.slots
            kept = sizes.number * 2 * slots * (1 + sizes.dim / sizes.length)
            return Cost("slots", flops=4.0 * slots * sizes.dim, kept=kept)  # D^T X and C f

        return replace(super().declares, cost=cost, active=active, layer_cost=layer_cost)


def all_experts(gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return all experts (B,N,E) in the order of their `gates (B,N,E)`, ties to the lower index, and the sorted gates."""
    experts = top(gates, gates.shape[-1])
    return experts, gates.gather(-1, experts)


class SequenceScore(Score):
    """logits = LayerNorm(x) W^T, where x is the mean of the sequence's real tokens, or with average="gates" each token."""

    def __init__(self, dim: int, experts: int, *, average: Average = "tokens") -> None:
        super().__init__()
        require_known("average", average, get_args(Average))
        self.dim, self.experts, self.average = dim, experts, average
        self.traits = AllExperts.traits if average == "tokens" else Traits()
        self.norm = nn.LayerNorm(dim)
        self.weight = nn.Parameter(torch.empty(experts, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        rows, real = tokens.float(), context.checked_mask(tokens)
        if self.average == "tokens":
            rows = masked_mean(rows, real)
        # The variance overflows from 1e19 on; a smaller multiple of the token has the same LayerNorm.
        huge = rows.detach().abs().amax(-1, keepdim=True) > LARGE
        rows = rows * torch.where(huge, SMALLER, 1.0)
        rows = F.layer_norm(rows, (self.dim,), self.norm.weight.float(), self.norm.bias.float(), self.norm.eps)
        logits = linear_float32(rows, self.weight)
        if self.average == "tokens" and real is not None:
            logits = logits.where(real.any(1).view(-1, 1, 1), 0.0)
        return logits.expand(*tokens.shape[:2], self.experts)

    @property
    def declares(self) -> ScoreDeclarations:
        def cost(sizes: LayerSizes) -> Cost:
            rows = 1 / sizes.length if self.average == "tokens" else 1.0
            return Cost("score", kept=FLOAT * (sizes.experts + rows * sizes.dim))

        return ScoreDeclarations(cost=cost, scores_sequence=self.average == "tokens")


class Merged(AllExperts):
    """Every token uses every expert, merged by the gates of its sequence: weights are these gates, K = E.

    average     "tokens": gates of the mean token, as in the paper's code. "gates": the mean of the tokens' gates
    causal      a gate depends on the whole sequence, so a token reads later ones. True: refuse causal models. False: run in
                them; then they cannot generate, and their perplexity cannot be compared with that of a causal model
    """

    layer_kind = "smear"

    def __init__(self, *, average: Average = "tokens", causal: bool = True) -> None:
        super().__init__(causal=causal)
        require_known("average", average, get_args(Average))
        self.average = average

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        gates = scores.gates
        if self.average == "gates":
            real = context.checked_mask(tokens)
            mean = masked_mean(gates, real)
            if real is not None:
                mean = mean.where(real.any(1).view(-1, 1, 1), 1 / gates.shape[-1])
            gates = mean.expand_as(gates)
        experts, weights = all_experts(gates)
        return Selection(experts, weights, gates, rows=weights.new_ones(tokens.shape[:2]))

    @property
    def declares(self) -> SelectorDeclarations:
        def layer_cost(sizes: LayerSizes) -> Cost:  # a product (B,E) by (E, parameters); merged weights are kept
            each = sizes.expert_parameters / sizes.length
            return Cost("merging", flops=2.0 * sizes.experts * each, kept=sizes.number * each)

        return replace(super().declares, active=lambda sizes: ActiveExperts(1, 1, 1), layer_cost=layer_cost)


def masked_mean(rows: Tensor, real: Tensor | None) -> Tensor:
    """Return (B,1,n): the mean of `rows (B,N,n)` over `real (B,N)` rows; 0 if there are none."""
    if real is None:
        return rows.sum(1, keepdim=True) / max(rows.shape[1], 1)
    mask = real.unsqueeze(-1)
    return rows.where(mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
