"""Gating rules: how logits become gates, by what experts are ranked, and how the chosen ones are weighted.

A model has one convention, whatever its router: a pretrained model's experts expect the weights they were trained with.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from holdfast.kernels.select import Amounts, top, weigh
from holdfast.routing.parts import Scores


class Rule(ABC):
    """One convention (abstract). Slots come ranked; `fade` is the logarithm of what dampens a slot, None where none is."""

    ordered = True  # the ranks' order is the weights' order
    strip = 0.1  # a narrow strip below the k-th, in levels: of a softmax, the experts within 10% of its gate

    @abstractmethod
    def gate(self, logits: Tensor) -> Tensor:
        """The distribution that informers act on and selection reads."""

    def ranks(self, scores: Scores) -> Tensor:
        """(B,N,E): what experts are sorted by."""
        return scores.key

    def levels(self, scores: Scores) -> Tensor:
        """(B,N,E): what the gaps between experts are measured in, in the same order as the ranks."""
        return scores.logits

    def amounts(self, scores: Scores) -> Amounts | None:
        """Return what experts are weighed by if the rule ranks by `scores.key` and weighs as `kernels.select`, or None."""
        return None

    @abstractmethod
    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        """(B,N,K): the weight of each slot `experts (B,N,K)`, 0 where not `in_use`; the first k are the chosen ones."""


class Softmax(Rule):
    """Gates are a softmax; weights are the gates, over their sum where `renormalise`."""

    def __init__(self, renormalise: bool) -> None:
        self.renormalise = renormalise

    def gate(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1)

    def amounts(self, scores: Scores) -> Amounts:
        if self.renormalise and not scores.informed:
            return Amounts(scores.logits, "softmax")
        return Amounts(scores.gates, "shares" if self.renormalise else "raw")

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return weigh(self.amounts(scores), experts, in_use, fade)


def dampened(scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """(B,N,K): the gates of the slots in use, faded."""
    gates = scores.gates.gather(-1, experts)
    gates = gates if fade is None else gates * fade.exp()
    return gates.where(in_use, 0.0)


def by_weight(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slots sorted by weight, descending, for a rule that ranks by something else."""
    order = top(weights, weights.shape[-1])
    return experts.gather(-1, order), weights.gather(-1, order)
