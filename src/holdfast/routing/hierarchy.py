"""Groups of experts: the best groups of a token first, then its best experts within them.

    grouped         one gate g for all experts; a group counts with the sum of its experts' gates
    hierarchical    a gate over groups and a gate within each group, each with weights of its own

Expert e is in group floor(e groups / E): groups of consecutive experts, whose sizes differ by at most 1.

**Two levels** (survey 3.5; Jordan and Jacobs 1994), with V (G,d) for groups and W (E,d) for experts:

    q = softmax(x V^T)    r_e = softmax over e's group of x W^T    p_e = q_group(e) r_e

The score is l_e = (x V^T)_group(e) + log r_e. Its softmax is p, and the sum of p over a group is q. So informers, noise and
losses read p as any other gate, and both routers select in the same way.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.select import top
from holdfast.routing.declarations import Conditions, NoCertificate, Shares, best, joined_conditions, swap_conditions
from holdfast.routing.fixed import NOT_CHOSEN
from holdfast.routing.parts import LinearScore, SelectorDeclarations
from holdfast.routing.records import Context
from holdfast.routing.rules import EXCLUDED, Rule, Scores, Softmax
from holdfast.routing.scores import balance_by_modality, token_modality
from holdfast.routing.selection import TopK, check_k


def checked_groups(groups: int | None, experts: int) -> int:
    """Return the number of groups, for None about the square root of the number of experts; raise ValueError if wrong."""
    groups = max(1, round(math.sqrt(experts))) if groups is None else groups
    if not 1 <= groups <= experts:
        raise ValueError(f"groups is {groups}; it must be between 1 and the number of experts, {experts}.")
    return groups


def group_of(experts: int, groups: int, device: torch.device) -> Tensor:
    """Return (E,): the group of each expert."""
    return torch.arange(experts, device=device) * groups // experts


def members(experts: int, groups: int, device: torch.device) -> Tensor:
    """Return (G,size): the experts of each group, and the index E in the place that a smaller group leaves."""
    # Computed on the device: a copy from the host would make a GPU wait.
    start = (torch.arange(groups + 1, device=device) * experts + groups - 1) // groups
    place = start[:-1].unsqueeze(1) + torch.arange(math.ceil(experts / groups), device=device)
    return place.where(place < start[1:].unsqueeze(1), experts)


def by_group(values: Tensor, groups: int, missing: float) -> Tensor:
    """Return `values (...,E)` as (...,G,size), with `missing` in the place that a smaller group leaves."""
    if values.shape[-1] % groups == 0:
        return values.unflatten(-1, (groups, -1))
    index = members(values.shape[-1], groups, values.device)
    # Not indexed by a tensor: the backward of that sorts.
    flat = F.pad(values, (0, 1), value=missing).gather(-1, index.flatten().expand(*values.shape[:-1], -1))
    return flat.unflatten(-1, index.shape)


class TwoLevelLinear(LinearScore):
    """l_e = a_group(e) + log r_e, with a = x V^T for groups, and r the softmax of x W^T within each group.

    groups  number of groups of consecutive experts; None: about the square root of the number of experts
    bias    add a number to each x V^T and x W^T, which is trained and starts at 0

    A gate over groups has no use for the scores of a flat gate: in a pretrained MoE model both gates start at random.
    """

    def __init__(self, dim: int, experts: int, *, groups: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.experts, self.groups = dim, experts, checked_groups(groups, experts)
        rows = experts + self.groups
        # W, then V. Were V 0, all groups would tie, and every token would take the first.
        self.weight = nn.Parameter(torch.empty(rows, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def finish(self, projected: Tensor) -> Tensor:
        projected = projected if self.bias is None else projected + self.bias.float()
        within, across = projected.split([self.experts, self.groups], dim=-1)
        logits = (across.unsqueeze(-1) + by_group(within, self.groups, -torch.inf).log_softmax(-1)).flatten(-2)
        if self.experts % self.groups == 0:
            return logits
        # The place of each expert in its group is its distance from the first expert of the group.
        group = group_of(self.experts, self.groups, logits.device)
        first = members(self.experts, self.groups, logits.device)[:, 0][group]
        place = group * (logits.shape[-1] // self.groups) + torch.arange(self.experts, device=logits.device) - first
        return logits.gather(-1, place.expand(*logits.shape[:-1], -1))


class GroupedRule(Rule):
    """Another rule, within the groups of experts that have the largest sums of gates."""

    def __init__(self, base: Rule, experts: int, groups: int, top_groups: int) -> None:
        self.base, self.experts, self.groups, self.top_groups = base, experts, groups, top_groups
        self.gate, self.ordered, self.renormalise, self.strip = base.gate, base.ordered, base.renormalise, base.strip
        self.weights_option = base.weights_option

    @property
    def name(self) -> str:
        return f"{self.base.name} in groups"

    def group_values(self, scores: Scores) -> Tensor:
        """Return (...,G): what groups are compared by, the sums of their experts' gates."""
        return by_group(scores.gates.detach(), self.groups, 0.0).sum(-1)

    def kept_groups(self, scores: Scores) -> Tensor:
        """Return (...,G) bool: the groups with the largest values, ties to the lower index."""
        groups = torch.arange(self.groups, device=scores.gates.device)
        return (top(self.group_values(scores), self.top_groups).unsqueeze(-1) == groups).any(-2)

    def allowed(self, scores: Scores) -> Tensor:
        """Return (...,E) bool: the experts in the kept groups."""
        return self.kept_groups(scores)[..., group_of(self.experts, self.groups, scores.gates.device)]

    def ranks(self, scores: Scores) -> Tensor:
        return self.base.ranks(scores).where(self.allowed(scores), EXCLUDED)

    def levels(self, scores: Scores) -> Tensor:
        return self.base.levels(scores).where(self.allowed(scores), -torch.inf)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return self.base.weigh(scores, experts, in_use, fade, k)

    def shares(self, k: int) -> Shares | None:
        of_base = self.base.shares(k)
        return None if of_base is None else replace(of_base, best=None)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        """Declare that the chosen experts stay the best of the kept groups, and that the kept groups keep the larger sums.

        This is more than is needed: a group may leave or enter without changing the set, if it has none of its experts.
        """
        if self.base.ranks(scores) is not scores.key:
            raise NoCertificate(f"no certificate is known for {self.name}: it ranks experts by more than their gates")
        kept, allowed = self.kept_groups(scores).flatten(0, -2), self.allowed(scores).flatten(0, -2)
        chosen = best(scores.key.reshape(allowed.shape).where(allowed, -torch.inf), k)
        # The sum of gates of every kept group exceeds that of every other. The index E adds 0.
        pairs = swap_conditions(kept)  # of groups; with G in the place of a missing one
        of_group = F.pad(members(self.experts, self.groups, kept.device), (0, 0, 0, 1), value=self.experts)
        ahead, behind = (of_group[side.squeeze(-1)] for side in (pairs.ahead, pairs.behind))
        groups = Conditions(ahead, behind, pairs.valid, pairs.way, chosen)
        return replace(joined_conditions(swap_conditions(chosen, allowed), groups), chosen=chosen, compares="gates")


class TwoLevelRule(GroupedRule):
    """Another rule, within the groups that have the largest q; after an informer, the largest sums of gates."""

    def group_values(self, scores: Scores) -> Tensor:
        # The logarithm of q, up to a number that all groups share: q itself may underflow.
        if scores.informed:
            return super().group_values(scores)
        return by_group(scores.logits.detach(), self.groups, -torch.inf).logsumexp(-1)


class Grouped(TopK):
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
        groups = checked_groups(groups, experts)
        top_groups = checked_top_groups(top_groups, groups, experts // groups, k)
        base = Softmax(renormalise=weights == "softmax") if rule is None else rule
        grouped = GroupedRule(base, experts, groups, top_groups) if top_groups < groups else base
        super().__init__(experts, k, weights=weights, rule=grouped)


def checked_top_groups(top_groups: int | None, groups: int, smallest: int, k: int) -> int:
    """Return how many of `groups` with at least `smallest` experts each a token may use; raise ValueError if wrong."""
    needed = min(groups, math.ceil(k / smallest))
    top_groups = max(needed, math.ceil(groups / 2)) if top_groups is None else top_groups
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups is {top_groups}; it must be between 1 and the number of groups, {groups}.")
    if top_groups < needed:
        raise ValueError(
            f"top_groups is {top_groups}, and so many groups may have only {top_groups * smallest} experts for k = {k}; "
            f"use at least {needed} groups."
        )
    return top_groups


class Hierarchical(TopK):
    """Select the k largest p within the `top_groups` groups that have the largest q.

    groups      number of groups of consecutive experts; None: about the square root of the number of experts
    top_groups  how many groups a token may use; None: half of them, or more if they have fewer than k experts
    weights     "switch": p; "softmax": p divided by its sum over the k, not with top_groups=1, where q would cancel
    by          "modality": each modality of `Context.modality (B,N)` has groups of its own, q is the gate over those, and
                `top_groups` counts them; loads are balanced within each modality (survey 3.5). None: all groups are for all
    modalities  how many modalities divide the groups among themselves: group j is for modality floor(j modalities / groups)
    """

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        groups: int | None = None,
        top_groups: int | None = None,
        weights: Literal["softmax", "switch"] = "switch",
        by: Literal["modality"] | None = None,
        modalities: int = 2,
    ) -> None:
        check_k(k, experts)
        groups = checked_groups(groups, experts)
        if by is not None:
            require_known("division of groups", by, ("modality",))
        if by is not None and not 1 <= modalities <= groups:
            raise ValueError(f"modalities is {modalities}; it must be between 1 and the number of groups, {groups}.")
        usable = groups if by is None else groups // modalities  # a modality has so many groups, or one more
        if by is not None and k > usable * (experts // groups):
            raise ValueError(
                f"k is {k}, and the groups of a modality may have only {usable * (experts // groups)} experts; use fewer "
                "modalities or a smaller k."
            )
        top_groups = checked_top_groups(top_groups, usable, experts // groups, k)
        if weights == "softmax" and top_groups == 1 < usable:
            raise ValueError(
                "weights is 'softmax' and top_groups 1: the gate of the only group would cancel, and nothing but the losses "
                "would train it; use weights='switch' or more groups."
            )
        base = Softmax(renormalise=weights == "softmax")
        all_usable = top_groups == usable and (by is None or groups % modalities == 0)
        rule = base if all_usable else TwoLevelRule(base, experts, groups, top_groups)
        super().__init__(experts, k, weights=weights, rule=rule)
        self.groups, self.modalities = groups, None if by is None else modalities
        self.reads = () if by is None else ("modality",)

    def adjusted(self, logits: Tensor, tokens: Tensor, context: Context, informed: bool) -> Tensor:
        """Return the logits with gates of 0 for the groups of other modalities: the softmax of the rest is p."""
        if self.modalities is None:
            return logits
        group = group_of(self.experts, self.groups, logits.device)
        of_expert = group_of(self.groups, self.modalities, logits.device)[group]
        own = of_expert == token_modality(tokens, context, self.modalities).unsqueeze(-1)
        lowest = logits.detach().where(own, torch.inf).amin(-1, keepdim=True)
        return logits.where(own, lowest + NOT_CHOSEN)

    def balance_groups(self, tokens: Tensor, context: Context) -> Tensor | None:
        if self.modalities is None:
            return None
        return balance_by_modality(tokens, context, self.modalities)

    @property
    def declares(self) -> SelectorDeclarations:
        mixes = None if self.modalities is None else "keeps a token in the groups of its modality, and informers mix all"
        only = None if self.modalities is None else "keeps a token in the groups of its modality, which may all be dropped"
        return replace(super().declares, refuses_informers=mixes, refuses_dropout=only)
