"""The softmax rule, and what rules share.

A model has one convention, whatever its router: a pretrained model's experts expect the weights they were trained with.
"""

from torch import Tensor

from holdfast.kernels.select import Amounts, top, weigh
from holdfast.routing.conditions import keep_best
from holdfast.routing.declarations import Conditions
from holdfast.routing.parts import Rule as Rule
from holdfast.routing.parts import Scores


class Softmax(Rule):
    """Gates are a softmax; weights are the gates, over their sum where `renormalise`."""

    def __init__(self, renormalise: bool) -> None:
        self.renormalise = renormalise
        self.convention = "softmax" if renormalise else "switch"

    def amounts(self, scores: Scores) -> Amounts:
        if self.renormalise and not scores.informed:
            return Amounts(scores.logits, "softmax")
        return Amounts(scores.gates, "shares" if self.renormalise else "raw")

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return weigh(self.amounts(scores), experts, in_use, fade)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)


def dampened(scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """(B,N,K): the gates of the slots in use, faded."""
    gates = scores.gates.gather(-1, experts)
    gates = gates if fade is None else gates * fade.exp()
    return gates.where(in_use, 0.0)


def by_weight(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slots sorted by weight, descending, for a rule that ranks by something else."""
    order = top(weights, weights.shape[-1])
    return experts.gather(-1, order), weights.gather(-1, order)
