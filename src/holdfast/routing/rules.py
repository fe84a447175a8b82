"""Gating rules: how logits become gates, by what experts are ranked, and how the chosen ones are weighted.

A model has one convention, whatever its router: a pretrained model's experts expect the weights they were trained with.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from holdfast.kernels.choose import Amounts
from holdfast.kernels.topk import top
from holdfast.routing.parts import Scores, Selection, shares


class Rule(ABC):
    """One convention (abstract). Slots come ranked; `fade` is the logarithm of what dampens a slot, None where none is."""

    ordered = True  # the ranks' order is the weights' order
    renormalise = True  # the sum of a token's weights does not depend on which experts it uses, at least roughly
    convention: Literal["softmax", "switch"] | None = None  # the option `weights` of `TopK` that gives this rule, if any
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
        """What `weigh` weighs by, where that is all it does and one kernel can do it; None for a rule of another kind."""
        return None

    @abstractmethod
    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        """(B,N,K): the weight of each slot `experts (B,N,K)`, 0 where not `in_use`; the first k are the chosen ones."""

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """(B,N,K): the weights of `experts (B,N,K)`, held fixed, under `scores`, as of `Selector.held_weights`."""
        in_use = experts < scores.gates.shape[-1]
        slots = experts.where(in_use, 0)
        # `weigh` takes slots ranked: Phi-MoE's weight of an expert depends on which went before.
        ranks = self.ranks(scores).gather(-1, slots).where(in_use, -torch.inf)
        order = ranks.argsort(dim=-1, descending=True, stable=True)
        weights = self.weigh(scores, slots.gather(-1, order), in_use.gather(-1, order), None, slots.shape[-1])
        return live.where_chosen(experts, torch.zeros_like(weights).scatter(-1, order, weights))


class Softmax(Rule):
    """Gates are a softmax; weights are the gates, over their sum where `renormalise`."""

    def __init__(self, renormalise: bool) -> None:
        self.renormalise = renormalise
        self.convention = "softmax" if renormalise else "switch"

    def gate(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1)

    def amounts(self, scores: Scores) -> Amounts | None:
        if self.renormalise and not scores.informed:
            return Amounts(scores.logits, "softmax")
        return Amounts(scores.gates, "shares" if self.renormalise else "raw")

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        if self.renormalise and not scores.informed:
            logits = scores.logits.gather(-1, experts)
            logits = logits if fade is None else logits + fade
            return torch.softmax(logits.where(in_use, -torch.inf), dim=-1).where(in_use, 0.0)
        # Gates may all be 0, and then so are the weights; a softmax of their logarithms would not be.
        gates = dampened(scores, experts, in_use, fade)
        return shares(gates) if self.renormalise else gates


def dampened(scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """(B,N,K): the gates of the slots in use, faded."""
    gates = scores.gates.gather(-1, experts)
    gates = gates if fade is None else gates * fade.exp()
    return gates.where(in_use, 0.0)


def by_weight(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slots sorted by weight, descending, for a rule that ranks by something else."""
    order = top(weights, weights.shape[-1])
    return experts.gather(-1, order), weights.gather(-1, order)
