"""The usual `Conditions` under which tokens keep their selected set, for selectors and rules to declare.

    keep_best               the k largest keys
    keep_above              all keys above a threshold
    keep_best_in_groups     the k largest keys within the best groups of experts
    keep_always             no condition: nothing changes the set

T tokens, E experts, M conditions per token. Keys (..., E) are what the selector compares; they are flattened to T tokens.
"""

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from holdfast.routing.declarations import Compared, Conditions

HIGHEST_OF_GROUP = 2  # the value of a group of experts is the sum of its two largest keys (DeepSeek-V3)


def keep_best(keys: Tensor, k: int, compares: Compared, bias: Tensor | None = None) -> Conditions:
    """Return conditions that the k largest keys stay larger than all others. The keys include `bias (E,)`."""
    return replace(swap_conditions(best(_rows(keys), k)), compares=compares, bias=bias)


def keep_above(keys: Tensor, threshold: float, compares: Compared, at_least_one: bool = False) -> Conditions:
    """Return conditions that keys above the threshold stay above it and the others do not exceed it.

    With `at_least_one` the largest key is selected even if it is not above the threshold.
    """
    keys = _rows(keys)
    if not at_least_one:
        return replace(threshold_conditions(keys > threshold), compares=compares, threshold=threshold)
    first = best(keys, 1)
    chosen = (keys > threshold) | first
    # The best expert stays selected while it is above the threshold (way 1) or while it is the best (way 2).
    both = joined_conditions(
        as_alternative(threshold_conditions(chosen), first.long()), as_alternative(swap_conditions(first), 2)
    )
    return replace(both, compares=compares, threshold=threshold)


def keep_best_in_groups(
    keys: Tensor, k: int, groups: int, kept: int, compares: Compared, bias: Tensor | None = None
) -> Conditions:
    """Return conditions for the k largest keys within the best `kept` groups of experts. The keys include `bias (E,)`."""
    keys = _rows(keys)
    in_kept = best_groups(keys, groups, kept)
    allowed = in_kept.repeat_interleave(keys.shape[1] // groups, dim=1)
    chosen = best(keys.where(allowed, -torch.inf), k)
    return replace(
        joined_conditions(swap_conditions(chosen, allowed), group_conditions(keys, in_kept, chosen)),
        chosen=chosen,
        compares=compares,
        bias=bias,
    )


def keep_always(keys: Tensor) -> Conditions:
    """Return no conditions, for a set that does not depend on the keys. `chosen` is empty."""
    nothing = torch.zeros_like(_rows(keys), dtype=torch.bool)
    return swap_conditions(nothing)


def best(keys: Tensor, k: int) -> Tensor:
    """Return (T,E) bool: the k largest of each row of `keys (T,E)`, ties to the lower index."""
    order = keys.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(keys, dtype=torch.bool).scatter(1, order, True)


def swap_conditions(chosen: Tensor, allowed: Tensor | None = None) -> Conditions:
    """Return conditions that every chosen expert is ahead of every other expert, or of those in `allowed (T,E)`."""
    tokens, experts = chosen.shape
    others = ~chosen if allowed is None else allowed & ~chosen
    inside, outside = _members(chosen), _members(others)
    ahead = inside.unsqueeze(2).expand(-1, -1, outside.shape[1]).reshape(tokens, -1, 1)
    behind = outside.unsqueeze(1).expand(-1, inside.shape[1], -1).reshape(tokens, -1, 1)
    valid = (ahead < experts).squeeze(-1) & (behind < experts).squeeze(-1)
    return Conditions(ahead, behind, valid, torch.zeros_like(valid, dtype=torch.int64), chosen)


def threshold_conditions(chosen: Tensor) -> Conditions:
    """Return conditions that every chosen expert is ahead of the threshold, and the threshold ahead of all others."""
    each = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    threshold = torch.full_like(each, chosen.shape[1])
    ahead, behind = each.where(chosen, threshold), threshold.where(chosen, each)
    valid = torch.ones_like(chosen)
    return Conditions(ahead.unsqueeze(-1), behind.unsqueeze(-1), valid, torch.zeros_like(each), chosen)


def as_alternative(conditions: Conditions, way: Tensor | int) -> Conditions:
    """Return the conditions with another `way (T,M)`: 0, or one of two alternatives."""
    return replace(conditions, way=torch.zeros_like(conditions.way) + way)


def joined_conditions(first: Conditions, second: Conditions) -> Conditions:
    """Return the conditions of both, for the set of the first; the index E fills up a side with fewer experts."""
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
    """Return (T,G) bool: the `kept` groups of experts with the largest values, for `keys (T,E)`."""
    grouped = keys.unflatten(1, (groups, -1))
    value = grouped.topk(min(HIGHEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
    return best(value, kept)


def group_conditions(keys: Tensor, kept: Tensor, chosen: Tensor) -> Conditions:
    """Return conditions among groups of experts, and between the chosen experts and groups that are not kept.

    If the two best experts of a kept group stay ahead of any two of another group, the kept group keeps the larger value,
    because its value is at least the sum of these two. This is needed for kept groups with chosen experts. For each group b
    that is not kept there are two alternatives: it also stays behind the other kept groups (way 2b + 1), or it may enter,
    but all of its experts stay behind the chosen ones (way 2b + 2).
    """
    groups, size = kept.shape[1], keys.shape[1] // kept.shape[1]
    needed = chosen.unflatten(1, (groups, size)).any(-1)
    comparisons = _comparisons(keys, kept, chosen)
    winner, rival = comparisons.ahead[..., 0] // size, comparisons.behind[..., 0] // size
    comparisons = as_alternative(comparisons, torch.where(needed.gather(1, winner), 0, 2 * rival + 1))
    outside = (~kept).repeat_interleave(size, dim=1)
    entries = swap_conditions(chosen, outside)
    return joined_conditions(
        comparisons, as_alternative(entries, 2 * (entries.behind[..., 0].clamp_max(keys.shape[1] - 1) // size) + 2)
    )


def _comparisons(keys: Tensor, kept: Tensor, chosen: Tensor) -> Conditions:
    """Return conditions that the two best experts of every kept group are ahead of any two of every other group."""
    (tokens, experts), groups = keys.shape, kept.shape[1]
    size = experts // groups
    each = min(HIGHEST_OF_GROUP, size)
    start = torch.arange(groups, device=keys.device) * size
    leaders = keys.unflatten(1, (groups, -1)).topk(each, dim=-1).indices + start.unsqueeze(-1)  # (T,G,h)
    teams = torch.tensor(list(combinations(range(size), each)), device=keys.device)  # (P,h)
    inside, outside = _members(kept), _members(~kept)  # the same number for every token
    winners = leaders.gather(1, inside.unsqueeze(-1).expand(-1, -1, each))
    rivals = teams + start[outside][..., None, None]  # (T,O,P,h)
    shape = (tokens, inside.shape[1], outside.shape[1], len(teams), each)
    ahead, behind = winners[:, :, None, None].expand(shape).flatten(1, 3), rivals.unsqueeze(1).expand(shape).flatten(1, 3)
    valid = torch.ones_like(ahead[..., 0], dtype=torch.bool)
    return Conditions(ahead, behind, valid, torch.zeros_like(ahead[..., 0]), chosen)


def _members(member: Tensor) -> Tensor:
    """Return (T,n): the indices of the members of each row, filled up with the number of columns."""
    count = int(member.sum(1).max()) if member.numel() else 0
    indices = torch.arange(member.shape[1], device=member.device).expand_as(member)
    return indices.where(member, member.shape[1]).sort(dim=1).values[:, :count]


def _rows(keys: Tensor) -> Tensor:
    return keys.reshape(-1, keys.shape[-1])
