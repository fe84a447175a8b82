"""Hierarchical gates: first groups of experts, then experts within them (survey 3.5; Jordan and Jacobs 1994).

    p_group = sum of g over the experts of a group      the group gate
    p_in_group = g / p_group                            the gate within a group
    p = p_group p_in_group = g

So a group's gate needs no parameters of its own: the best `top_groups` groups by p_group are kept, and a token uses the k
best experts within them. With one group, or if all groups are kept, this is top-k.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.routing.declarations import Conditions, NoCertificate, best, joined_conditions, swap_conditions
from holdfast.routing.rules import EXCLUDED, Rule, Scores, Softmax
from holdfast.routing.selection import TopK, check_k


class GroupedRule(Rule):
    """Another rule, within the groups of experts that have the largest sums of gates.

    Expert e is in group floor(e groups / E): groups of consecutive experts, whose sizes differ by at most 1.
    """

    def __init__(self, base: Rule, experts: int, groups: int, top_groups: int) -> None:
        self.base, self.experts, self.groups, self.top_groups = base, experts, groups, top_groups
        self.gate, self.ordered, self.renormalise, self.strip = base.gate, base.ordered, base.renormalise, base.strip
        self.weights_option = base.weights_option

    @property
    def name(self) -> str:
        return f"{self.base.name} in groups"

    def group_of(self, device: torch.device) -> Tensor:
        """Return (E,): the group of each expert."""
        return torch.arange(self.experts, device=device) * self.groups // self.experts

    def members(self, device: torch.device) -> Tensor:
        """Return (G,size): the experts of each group, and the index E in the place that a smaller group leaves."""
        # Computed on the device: a copy from the host would make a GPU wait.
        start = (torch.arange(self.groups + 1, device=device) * self.experts + self.groups - 1) // self.groups
        place = start[:-1].unsqueeze(1) + torch.arange(math.ceil(self.experts / self.groups), device=device)
        return place.where(place < start[1:].unsqueeze(1), self.experts)

    def kept_groups(self, gates: Tensor) -> Tensor:
        """Return (...,G) bool: the groups with the largest sums of `gates (...,E)`, ties to the lower index."""
        padded = torch.nn.functional.pad(gates.detach(), (0, 1))
        mass = padded[..., self.members(gates.device)].sum(-1)
        groups = torch.arange(self.groups, device=gates.device)
        return (top(mass, self.top_groups).unsqueeze(-1) == groups).any(-2)

    def allowed(self, gates: Tensor) -> Tensor:
        """Return (...,E) bool: the experts in the kept groups."""
        return self.kept_groups(gates)[..., self.group_of(gates.device)]

    def ranks(self, scores: Scores) -> Tensor:
        return self.base.ranks(scores).where(self.allowed(scores.gates), EXCLUDED)

    def levels(self, scores: Scores) -> Tensor:
        return self.base.levels(scores).where(self.allowed(scores.gates), -torch.inf)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return self.base.weigh(scores, experts, in_use, fade, k)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        """Declare that the chosen experts stay the best of the kept groups, and that the kept groups keep the larger sums.

        This is more than is needed: a group may leave or enter without changing the set, if it has none of its experts.
        """
        if self.base.ranks(scores) is not scores.key:
            raise NoCertificate(f"no certificate is known for {self.name}: it ranks experts by more than their gates")
        gates = scores.gates.reshape(-1, self.experts)
        keys = scores.key.reshape(-1, self.experts)
        allowed = self.allowed(gates)
        chosen = best(keys.where(allowed, -torch.inf), k)
        # The sum of gates of every kept group exceeds that of every other. The index E adds 0.
        pairs = swap_conditions(self.kept_groups(gates))  # of groups; with G in the place of a missing one
        members = torch.nn.functional.pad(self.members(gates.device), (0, 0, 0, 1), value=self.experts)
        ahead, behind = (members[side.squeeze(-1)] for side in (pairs.ahead, pairs.behind))
        groups = Conditions(ahead, behind, pairs.valid, pairs.way, chosen)
        return replace(joined_conditions(swap_conditions(chosen, allowed), groups), chosen=chosen, compares="gates")


class Hierarchical(TopK):
    """Select the k best experts within the `top_groups` groups that have the largest sums of gates.

    groups      number of groups of consecutive experts; None: about the square root of the number of experts
    top_groups  how many groups a token may use; None: half of them, or more if they have fewer than k experts
    weights     as in `TopK`; `rule` too
    """

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        groups: int | None = None,
        top_groups: int | None = None,
        weights: Literal["softmax", "switch"] = "softmax",
        rule: Rule | None = None,
    ) -> None:
        check_k(k, experts)
        groups = max(1, round(math.sqrt(experts))) if groups is None else groups
        if not 1 <= groups <= experts:
            raise ValueError(f"groups is {groups}; it must be between 1 and the number of experts, {experts}.")
        smallest = experts // groups
        needed = min(groups, math.ceil(k / smallest))
        top_groups = max(needed, math.ceil(groups / 2)) if top_groups is None else top_groups
        if not 1 <= top_groups <= groups:
            raise ValueError(f"top_groups is {top_groups}; it must be between 1 and the number of groups, {groups}.")
        if top_groups < needed:
            raise ValueError(
                f"top_groups is {top_groups}, and so many groups may have only {top_groups * smallest} experts for k = {k}; "
                f"use at least {needed} groups."
            )
        base = Softmax(renormalise=weights == "softmax") if rule is None else rule
        grouped = GroupedRule(base, experts, groups, top_groups) if top_groups < groups else base
        super().__init__(experts, k, weights=weights, rule=grouped)
