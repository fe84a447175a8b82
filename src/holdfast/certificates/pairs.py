"""Which experts must stay ahead of which, so that a token keeps its set.

T tokens, E experts, M conditions a token; the index E is nobody, which stands for a threshold
"""

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

HIGHEST_OF_GROUP = 2  # a group of experts is worth the sum of its two best (DeepSeek-V3)


class Pairs(NamedTuple):
    """The keys of `ahead`, in sum, must stay above those of `behind`: one expert a side, or two where groups compete.

    Conditions of way 0 must all hold. The ways 2a - 1 and 2a are alternatives: all conditions of one of the two must hold.
    """

    ahead: Tensor  # (T,M,h)
    behind: Tensor  # (T,M,h)
    valid: Tensor  # (T,M) bool
    way: Tensor  # (T,M)
    experts: int

    def sums(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides' sums (T,M) of `keys (T,E+1)`, the last of which is nobody's."""
        ahead, behind = (keys.gather(1, side.flatten(1)).view(side.shape).sum(-1) for side in (self.ahead, self.behind))
        return ahead, behind

    def sides(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """(T,R,h) each: the sides of the conditions `which (T,R)`."""
        index = which.unsqueeze(-1).expand(-1, -1, self.ahead.shape[-1])
        return self.ahead.gather(1, index), self.behind.gather(1, index)

    def settled(self, radii: Tensor) -> Tensor:
        """Radii (T,M) without conditions that need not hold: invalid ones, and of two alternatives those of the worse."""
        radii = radii.nan_to_num(nan=0.0, posinf=torch.inf).where(self.valid, torch.inf)
        alternatives = int(self.way.max() + 1) // 2 if self.way.numel() else 0
        if alternatives:
            best = radii.new_full((len(radii), 2 * alternatives + 1), torch.inf).scatter_reduce(1, self.way, radii, "amin")
            first_worse = best[:, 1::2] < best[:, 2::2]
            dropped = torch.stack([first_worse, ~first_worse], dim=2).flatten(1)
            dropped = torch.nn.functional.pad(dropped, (1, 0))  # what must hold in any case
            radii = radii.where(~dropped.gather(1, self.way), torch.inf)
        return radii

    @property
    def ties_hold(self) -> Tensor:
        """(T,M) bool: does a tie change nothing? It goes to the lower index, and a threshold must be exceeded."""
        ahead, behind = self.ahead[..., 0], self.behind[..., 0]
        return (ahead == self.experts) | ((ahead < behind) & (behind < self.experts))


def best(keys: Tensor, k: int) -> Tensor:
    """(T,E) bool: the k largest of each row, ties to the lower index."""
    order = keys.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(keys, dtype=torch.bool).scatter(1, order, True)


def swaps(chosen: Tensor, allowed: Tensor | None = None) -> Pairs:
    """Every chosen expert ahead of every other one; with `allowed (T,E)`, of those others that are allowed."""
    tokens, experts = chosen.shape
    others = ~chosen if allowed is None else allowed & ~chosen
    inside, outside = _members(chosen), _members(others)
    ahead = inside.unsqueeze(2).expand(-1, -1, outside.shape[1]).reshape(tokens, -1, 1)
    behind = outside.unsqueeze(1).expand(-1, inside.shape[1], -1).reshape(tokens, -1, 1)
    valid = (ahead < experts).squeeze(-1) & (behind < experts).squeeze(-1)
    return Pairs(ahead, behind, valid, torch.zeros_like(valid, dtype=torch.int64), experts)


def crossings(chosen: Tensor) -> Pairs:
    """Every chosen expert ahead of nobody, and nobody ahead of every other one."""
    each = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    nobody = torch.full_like(each, chosen.shape[1])
    ahead, behind = each.where(chosen, nobody), nobody.where(chosen, each)
    valid = torch.ones_like(chosen)
    return Pairs(ahead.unsqueeze(-1), behind.unsqueeze(-1), valid, torch.zeros_like(each), chosen.shape[1])


def along(pairs: Pairs, way: Tensor | int) -> Pairs:
    """The conditions as a part of an alternative, `way (T,M)`."""
    return pairs._replace(way=torch.zeros_like(pairs.way) + way)


def joined(*several: Pairs) -> Pairs:
    """All conditions of several, nobody filling a side that has fewer experts."""
    most = max(pairs.ahead.shape[-1] for pairs in several)
    sides = [
        [
            torch.nn.functional.pad(side, (0, most - side.shape[-1]), value=pairs.experts)
            for side in (pairs.ahead, pairs.behind)
        ]
        for pairs in several
    ]
    ahead, behind = (torch.cat([side[number] for side in sides], dim=1) for number in (0, 1))
    valid = torch.cat([pairs.valid for pairs in several], dim=1)
    way = torch.cat([pairs.way for pairs in several], dim=1)
    return Pairs(ahead, behind, valid, way, several[0].experts)


def kept_groups(keys: Tensor, groups: int, kept: int) -> Tensor:
    """(T,G) bool: the groups of experts that are worth most."""
    grouped = keys.unflatten(1, (groups, -1))
    worth = grouped.topk(min(HIGHEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
    return best(worth, kept)


def contests(keys: Tensor, kept: Tensor, chosen: Tensor) -> Pairs:
    """What must hold among groups of experts, and between the chosen experts and groups that are not kept.

    The two best of a kept group stay ahead of any two of another group: then the kept one stays worth more, for it is worth
    at least its two best of now. That must hold for kept groups with chosen experts in them. Of each other group, either it
    stays behind the remaining kept groups too (way 2b + 1), or it may come in, but all of its experts stay behind the
    chosen ones (way 2b + 2).
    """
    groups, size = kept.shape[1], keys.shape[1] // kept.shape[1]
    needed = chosen.unflatten(1, (groups, size)).any(-1)
    fights = _fights(keys, kept)
    winner, rival = fights.ahead[..., 0] // size, fights.behind[..., 0] // size
    fights = along(fights, torch.where(needed.gather(1, winner), 0, 2 * rival + 1))
    outside = (~kept).repeat_interleave(size, dim=1)
    entries = swaps(chosen, outside)
    return joined(fights, along(entries, 2 * (entries.behind[..., 0].clamp_max(keys.shape[1] - 1) // size) + 2))


def _fights(keys: Tensor, kept: Tensor) -> Pairs:
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
    return Pairs(ahead, behind, valid, torch.zeros_like(ahead[..., 0]), experts)


def _members(member: Tensor) -> Tensor:
    """(T,n): the indices of each row's members, then the number of columns where a row has fewer than others."""
    count = int(member.sum(1).max()) if member.numel() else 0
    indices = torch.arange(member.shape[1], device=member.device).expand_as(member)
    return indices.where(member, member.shape[1]).sort(dim=1).values[:, :count]
