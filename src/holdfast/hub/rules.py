"""The gating rules of families whose weights are no softmax."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.routing.conditions import HIGHEST_OF_GROUP, keep_best, keep_best_in_groups
from holdfast.routing.declarations import SIGMOID, Conditions, NoBound
from holdfast.routing.parts import Rule, Scores, shares
from holdfast.routing.rules import dampened


class GroupedSigmoid(Rule):
    """DeepSeek-V3: gates are sigmoids; chosen by gate plus a correction bias, within the best groups of experts.

    The choice of groups is a top-k of its own: `smooth` makes the choice within groups continuous, not that of groups.
    """

    gate = SIGMOID
    ordered = False  # ranked with the bias, weighted without
    strip = 0.02  # levels are gates, between 0 and 1

    def __init__(self, gate: Any) -> None:
        self.owner = gate  # the bias is its buffer: looked up when used, since offloading replaces it
        self.groups, self.groups_kept = int(gate.num_group), int(gate.topk_group)
        self.renormalise = bool(gate.norm_topk_prob)

    @property
    def bias(self) -> Tensor:
        buffer: Tensor = self.owner.get_buffer("e_score_correction_bias")
        return buffer

    def ranks(self, scores: Scores) -> Tensor:
        choice = scores.gates + self.bias.float()
        if self.groups_kept >= self.groups:
            return choice
        grouped = choice.unflatten(-1, (self.groups, -1))
        worth = grouped.topk(min(HIGHEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, top(worth, self.groups_kept), True)
        return grouped.where(kept.unsqueeze(-1), -torch.inf).flatten(-2)

    def levels(self, scores: Scores) -> Tensor:
        return self.ranks(scores)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        gates = dampened(scores, experts, in_use, fade)
        return shares(gates) if self.renormalise else gates

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        bias = self.bias.detach().to(scores.gates)
        keys = scores.gates + bias
        if self.groups_kept >= self.groups:
            return keep_best(keys, k, "gates", bias)
        in_groups = self.groups_kept * (keys.shape[-1] // self.groups)
        if k > in_groups:
            raise NoBound(f"no certificate is known for {self.name}: it takes {k} experts, and its groups hold {in_groups}")
        return keep_best_in_groups(keys, k, self.groups, self.groups_kept, "gates", bias)


class SparseMixer(Rule):
    """Phi-MoE in evaluation: an expert's weight is its share among those within a few per cent of it and not yet chosen.

    Weights are near 1 each and need not sum to 1. In training the family samples; a rerouted model does not.
    """

    ordered = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance  # relative, as in the family: not blind to a shift of all logits

    def levels(self, scores: Scores) -> Tensor:
        if not scores.informed:
            return scores.logits
        assert scores.raw is not None  # the logarithm of informed gates, on the level of the logits that they came from
        return scores.logits + torch.logsumexp(scores.raw, dim=-1, keepdim=True)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        levels = self.levels(scores).gather(-1, experts)
        left, weights = self.levels(scores), []
        for slot in range(k):
            best = levels[..., slot : slot + 1]
            near = ((best - left) / left.abs().maximum(best)).detach() <= 2 * self.tolerance
            weights.append(torch.softmax(left.where(near, -torch.inf), dim=-1).gather(-1, experts[..., slot : slot + 1]))
            left = left.scatter(-1, experts[..., slot : slot + 1], -torch.inf)
        # An expert in a strip below the k-th is weighted as if it were the k-th.
        strip = weights[-1] * (levels - levels[..., k - 1 : k]).exp()
        chosen = torch.cat([*weights, strip[..., k:]], dim=-1)
        chosen = chosen if fade is None else chosen * fade.exp()
        return chosen.where(in_use, 0.0)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)
