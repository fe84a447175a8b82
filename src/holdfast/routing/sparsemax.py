"""Sparsemax: the Euclidean projection of the logits onto the simplex, which is sparse (Martins and Astudillo 2016).

    sparsemax(z) = argmin_p |p - z|^2  over p >= 0, sum p = 1
                 = max(z - tau, 0),    tau = (sum of z over the support - 1) / (size of the support)

The support is {i : 1 + i z_(i) > z_(1) + ... + z_(i)} for the sorted logits z_(1) >= z_(2) >= ... Within a support S the
Jacobian is I - 11^T / |S|, and 0 elsewhere.
"""

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.routing.declarations import (
    ActiveExperts,
    Conditions,
    Cost,
    GateFunction,
    LayerSizes,
    NoCertificate,
    selection_bytes,
)
from holdfast.routing.parts import Selector, normalise
from holdfast.routing.records import Context
from holdfast.routing.rules import Rule, Scores, Selection
from holdfast.routing.selection import faded_gates

NO_CONDITIONS = (
    "no certificate is known for sparsemax: its threshold is the sum of the selected logits minus 1, and conditions compare "
    "logits without such a constant"
)


def sparsemax(logits: Tensor) -> Tensor:
    """Return the projection of each row of `logits (..., E)` onto the simplex, exact up to float32 rounding."""
    # Subtracting the largest logit changes nothing, and a logit more than 1 below it is never in the support. So all numbers
    # are between -1 and 0, and sums of them lose no precision, however large the logits are.
    shifted = (logits - logits.detach().amax(-1, keepdim=True)).clamp_min(-1.0)
    support = _support(shifted.detach())
    size = support.sum(-1, keepdim=True)
    threshold = (shifted.where(support, 0.0).sum(-1, keepdim=True) - 1) / size
    return (shifted - threshold).clamp_min(0.0).where(support, 0.0)


def _support(shifted: Tensor) -> Tensor:
    """Return (..., E) bool: which experts have a positive gate, at least the best one."""
    ordered = shifted.sort(dim=-1, descending=True).values
    place = torch.arange(1, shifted.shape[-1] + 1, device=shifted.device)
    # The sum of z_(j) - z_(i) over j < i.
    above = ordered.cumsum(-1) - place * ordered
    size = ((above < 1) | (place == 1)).sum(-1, keepdim=True)
    return shifted >= ordered.gather(-1, size - 1)


SPARSEMAX = GateFunction("sparsemax", sparsemax)


class SparsemaxRule(Rule):
    """Gates are the sparsemax of the logits; weights are the gates of the k best experts, divided by their sum.

    Use it as `TopK(..., rule=SparsemaxRule())`: then a token uses at most k experts, and the other slots have weight 0.
    """

    gate = SPARSEMAX

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return normalise(faded_gates(scores, experts, in_use, fade))

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        raise NoCertificate(NO_CONDITIONS)


class Sparsemax(Selector):
    """Select every expert in the support of sparsemax, with its sparsemax gate as weight; weights sum to 1.

    The number of experts depends on the token: 1 if a logit exceeds all others by 1, E if all are equal. Informers read the
    sparsemax gates p. After them the selector reads safe logarithms, weights = sparsemax(log g), and an expert with a gate
    of 0 is never selected.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    @property
    def gate(self) -> GateFunction:
        return SPARSEMAX

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        weights = self._weights(scores)
        experts = top(scores.key, self.experts)
        weights = weights.gather(-1, experts)
        return Selection(experts.where(weights > 0, self.experts), weights, scores.gates, {})

    def _weights(self, scores: Scores) -> Tensor:
        """Return (B,N,E): the weight of each expert."""
        if not scores.informed:
            return scores.gates
        return sparsemax(scores.logits).where(scores.gates > 0, 0.0)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the sparsemax of the logits of the held set alone."""
        in_use = experts < self.experts
        logits = scores.logits.gather(-1, experts.where(in_use, 0))
        lowest = logits.detach().amin(-1, keepdim=True) - 2
        weights = sparsemax(logits.where(in_use, lowest)).where(in_use, 0.0)
        if scores.informed:
            weights = weights.where(scores.gates.gather(-1, experts.where(in_use, 0)) > 0, 0.0)
        return live.weights_if_same_set(experts, weights)

    def cost(self, sizes: LayerSizes) -> Cost:
        return Cost("selection", kept=selection_bytes(sizes.experts, sizes))

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        return ActiveExperts(sizes.experts, sizes.experts, sizes.experts, "depends on the data; an upper bound")

    def conditions(self, scores: Scores) -> Conditions | None:
        raise NoCertificate(NO_CONDITIONS)
