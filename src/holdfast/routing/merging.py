"""The router of a SMEAR layer (Muqeeth et al. 2024): all experts are merged into one for each sequence.

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
from holdfast.routing.declarations import FLOAT, ActiveExperts, Cost, LayerSizes
from holdfast.routing.parts import Score, ScoreDeclarations, SelectorDeclarations, Traits
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection
from holdfast.routing.scores import LARGE, SMALLER
from holdfast.routing.slots import AllExperts, all_experts

Average = Literal["tokens", "gates"]


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
