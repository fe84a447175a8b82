"""Conditions under which tokens keep their experts, for parts to declare: the k best, all above a threshold, groups first.

T tokens, E experts, M conditions a token; keys are what the selector compares, (..., E), flattened to T tokens
"""

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from holdfast.routing.declarations import Compared, Conditions

HIGHEST_OF_GROUP = 2  # a group of experts is worth the sum of its two best (DeepSeek-V3)


def keep_best(keys: Tensor, k: int, compares: Compared, bias: Tensor | None = None) -> Conditions:
    """The k largest keys stay ahead of all others. `bias (E,)` is already in the keys."""
    return replace(swaps(best(_rows(keys), k)), compares=compares, bias=bias)


def keep_above(keys: Tensor, threshold: float, compares: Compared, at_least_one: bool = False) -> Conditions:
    """Keys above the threshold stay above it, the others do not exceed it; `at_least_one`: the best is chosen anyway."""
    keys = _rows(keys)
    if not at_least_one:
        return replace(crossings(keys > threshold), compares=compares, threshold=threshold)
    first = best(keys, 1)
    chosen = (keys > threshold) | first
    # The best expert is chosen while it is above the threshold, and also while it is the best.
    both = joined(along(crossings(chosen), first.long()), along(swaps(first), 2))
    return replace(both, compares=compares, threshold=threshold)


def keep_best_in_groups(
    keys: Tensor, k: int, groups: int, kept: int, compares: Compared, bias: Tensor | None = None
) -> Conditions:
    """The k largest keys within the `kept` groups of experts that are worth most. `bias (E,)` is already in the keys."""
    keys = _rows(keys)
    in_kept = best_groups(keys, groups, kept)
    allowed = in_kept.repeat_interleave(keys.shape[1] // groups, dim=1)
    chosen = best(keys.where(allowed, -torch.inf), k)
    return replace(
        joined(swaps(chosen, allowed), group_contests(keys, in_kept, chosen)), chosen=chosen, compares=compares, bias=bias
    )


def best(keys: Tensor, k: int) -> Tensor:
    """Return the k largest of each row of keys (T,E) as bool, ties to the lower index."""
    order = keys.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(keys, dtype=torch.bool).scatter(1, order, True)


def swaps(chosen: Tensor, allowed: Tensor | None = None) -> Conditions:
    """Every chosen expert ahead of every other one; with `allowed (T,E)`, of those others that are allowed."""
    tokens, experts = chosen.shape
    others = ~chosen if allowed is None else allowed & ~chosen
    inside, outside = _members(chosen), _members(others)
    ahead = inside.unsqueeze(2).expand(-1, -1, outside.shape[1]).reshape(tokens, -1, 1)
    behind = outside.unsqueeze(1).expand(-1, inside.shape[1], -1).reshape(tokens, -1, 1)
    valid = (ahead < experts).squeeze(-1) & (behind < experts).squeeze(-1)
    return Conditions(ahead, behind, valid, torch.zeros_like(valid, dtype=torch.int64), chosen)


def crossings(chosen: Tensor) -> Conditions:
    """Every chosen expert ahead of the threshold, and the threshold ahead of every other one."""
    each = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    threshold = torch.full_like(each, chosen.shape[1])
    ahead, behind = each.where(chosen, threshold), threshold.where(chosen, each)
    valid = torch.ones_like(chosen)
    return Conditions(ahead.unsqueeze(-1), behind.unsqueeze(-1), valid, torch.zeros_like(each), chosen)


def along(conditions: Conditions, way: Tensor | int) -> Conditions:
    """The conditions as a part of an alternative, `way (T,M)`."""
    return replace(conditions, way=torch.zeros_like(conditions.way) + way)


def joined(first: Conditions, second: Conditions) -> Conditions:
    """All conditions of both, for the first one's set; the index E fills a side that has fewer experts."""
    both = (first, second)
    most = max(each.ahead.shape[-1] for each in both)
    sides = [
        [torch.nn.functional.pad(side, (0, most - side.shape[-1]), value=each.experts) for side in (each.ahead, each.behind)]
        for each in both
    ]
    ahead, behind = (torch.cat([side[number] for side in sides], dim=1) for number in (0, 1))
    valid = torch.cat([each.valid for each in both], dim=1)
    way = torch.cat([each.way for each in both], dim=1)
    return replace(first, ahead=ahead, behind=behind, valid=valid, way=way)


def best_groups(keys: Tensor, groups: int, kept: int) -> Tensor:
    """Return the groups of experts that are worth most, (T,G) bool, for keys (T,E)."""
    grouped = keys.unflatten(1, (groups, -1))
    worth = grouped.topk(min(HIGHEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
    return best(worth, kept)


def group_contests(keys: Tensor, kept: Tensor, chosen: Tensor) -> Conditions:
    """What must hold among groups of experts, and between the chosen experts and groups that are not kept.

    The two best of a kept group stay ahead of any two of another group: then the kept one stays worth more, for it is worth
    at least its two best of now. That must hold for kept groups with chosen experts in them. Of each other group, either it
    stays behind the remaining kept groups too (way 2b + 1), or it may come in, but all of its experts stay behind the
    chosen ones (way 2b + 2).
    """
    groups, size = kept.shape[1], keys.shape[1] // kept.shape[1]
    needed = chosen.unflatten(1, (groups, size)).any(-1)
    contests = _contests(keys, kept, chosen)
    winner, rival = contests.ahead[..., 0] // size, contests.behind[..., 0] // size
    contests = along(contests, torch.where(needed.gather(1, winner), 0, 2 * rival + 1))
    outside = (~kept).repeat_interleave(size, dim=1)
    entries = swaps(chosen, outside)
    return joined(contests, along(entries, 2 * (entries.behind[..., 0].clamp_max(keys.shape[1] - 1) // size) + 2))


def _contests(keys: Tensor, kept: Tensor, chosen: Tensor) -> Conditions:
    """The two best of every kept group ahead of any two of every other one."""
    (tokens, experts), groups = keys.shape, kept.shape[1]
    size = experts // groups
    each = min(HIGHEST_OF_GROUP, size)
    start = torch.arange(groups, device=keys.device) * size
    leaders = keys.unflatten(1, (groups, -1)).topk(each, dim=-1).indices + start.unsqueeze(-1)  # (T,G,h)
    teams = torch.tensor(list(combinations(range(size), each)), device=keys.device)  # (P,h)
    inside, outside = _members(kept), _members(~kept)  # as many for every token
    winners = leaders.gather(1, inside.unsqueeze(-1).expand(-1, -1, each))
    rivals = teams + start[outside][..., None, None]  # (T,O,P,h)
    shape = (tokens, inside.shape[1], outside.shape[1], len(teams), each)
    ahead, behind = winners[:, :, None, None].expand(shape).flatten(1, 3), rivals.unsqueeze(1).expand(shape).flatten(1, 3)
    valid = torch.ones_like(ahead[..., 0], dtype=torch.bool)
    return Conditions(ahead, behind, valid, torch.zeros_like(ahead[..., 0]), chosen)


def _members(member: Tensor) -> Tensor:
    """(T,n): the indices of each row's members, then the number of columns where a row has fewer than others."""
    count = int(member.sum(1).max()) if member.numel() else 0
    indices = torch.arange(member.shape[1], device=member.device).expand_as(member)
    return indices.where(member, member.shape[1]).sort(dim=1).values[:, :count]


def _rows(keys: Tensor) -> Tensor:
    return keys.reshape(-1, keys.shape[-1])
