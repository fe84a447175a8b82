"""What parts of a router declare about themselves, so that certificates and plans need not know their classes.

**For certificates.** `Order` and `Values` describe a score, `Mixing` a token-side informer, `Conditions` and `Shares` a
selector.

    keep_best               the k largest keys stay larger than all others
    keep_above              all keys above a threshold, and no others
    keep_best_in_groups     the k largest keys within the best groups of experts
    keep_always             no condition: nothing changes the set

    T tokens, E experts, d width of a token, M conditions per token. The index E is the threshold, not an expert. Keys
    (..., E) are what the selector compares; they are flattened to T tokens.

**For plans.** `Cost` is what a part keeps and sends in one layer (`LayerSizes`), `ActiveExperts` how many experts a token
uses. Parameters, state and FLOPs are counted from the part itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Literal, final

import torch
from torch import Tensor

Compared = Literal["logits", "gates"]
DIVISION = 4  # roundings of a logit that is divided by a temperature: a GPU multiplies with the rounded inverse
HIGHEST_OF_GROUP = 2  # the value of a group of experts is the sum of its two largest keys (DeepSeek-V3)
# How a layer runs its experts: each on the tokens that selected it (MoE), on slots that are mixtures of tokens (SoftMoE), or
# merged into one expert for each sequence (SMEAR).
LayerKind = Literal["moe", "soft", "smear"]


class NoCertificate(ValueError):
    """No certificate is known. A part may raise it, with the reason, if it has no declaration for some of its options."""


@final
@dataclass(frozen=True)
class GateFunction:
    """The function from logits to gates. Certificates are known for "softmax", "sigmoid" and "relu"."""

    name: str
    function: Callable[[Tensor], Tensor]
    continuous: bool = True
    shares: bool = False  # an expert with a gate of 0 gets a positive one if those with positive gates are taken out

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)


def _is_core(gaps: Tensor) -> Tensor:
    return (gaps <= 0).to(gaps.dtype)


SOFTMAX = GateFunction("softmax", partial(torch.softmax, dim=-1))
SIGMOID = GateFunction("sigmoid", torch.sigmoid)
RELU = GateFunction("relu", torch.relu)


@final
@dataclass(frozen=True)
class Cosines:
    """logits = cosine(z, combine) / temperature."""

    temperature: Tensor | float
    shortest: float  # a shorter z is divided by this number instead of by its length


@final
@dataclass(frozen=True)
class Values:
    """How logits follow from the keys of the order: they are the keys, or with `cosines` a function of the products z."""

    cosines: Cosines | None = None


@final
@dataclass(frozen=True)
class Scales:
    """The factors m of each token's features: mixture @ table, and 1 for a token whose mixture is 0."""

    mixture: Tensor  # (T,C)
    table: Tensor  # (C,d), not negative


@final
@dataclass(frozen=True)
class Order:
    """Keys that are affine in the token and ordered as its logits: keys = z combine^T + bias, z = (x * m) matrix^T.

    matrix      (n,d): the matrix that the score multiplies tokens with, in its own dtype
    bias        (E,): added to the keys; None is 0
    combine     (E,n) float64, rows of length 1; None: the products are the keys, n = E
    roundings   with `combine`: the number of float32 roundings of a logit after the product
    scales      m, the factors of each token's features; None is 1
    shifted     False: keys have the sign of the logits. True: the logits are the keys plus a number that is the same for
                all experts of a token, which changes neither a top-k nor a softmax
    rounding    a bound of the float32 rounding error of a key, from the l2 lengths of tokens (T,1) to errors (T,1) or (T,E),
                increasing. The errors of one product with `matrix` and of adding `bias` are counted already, and None is
                right for a score that computes just these. For another formula, bound the error of its whole logit: what
                is counted twice only makes radii smaller. In gamma(n), n is how many terms are added up and roundings follow
    block       (T,): which block of columns of the matrix (n, blocks * d) a token is multiplied with; None: there is one.
                It excludes `scales` and `combine`
    values      how logits follow from the keys, for certificates that need more than their order; None: unknown
    temperature the router divides the keys by it, which changes neither their order nor their sign
    """

    matrix: Tensor
    bias: Tensor | None = None
    combine: Tensor | None = None
    roundings: int = 0
    scales: Scales | None = None
    shifted: bool = False
    rounding: Callable[[Tensor], Tensor] | None = None
    block: Tensor | None = None
    values: Values | None = None
    temperature: float = 1.0

    def divided_by(self, temperature: float) -> "Order":
        """Return the order of the logits divided by `temperature`, and by that of cosines if there are any."""
        if temperature == 1:
            return self
        if self.combine is None:
            return replace(self, temperature=self.temperature * temperature)
        values = self.values
        if values is not None and values.cosines is not None:
            values = Values(replace(values.cosines, temperature=values.cosines.temperature * temperature))
        return replace(self, values=values, roundings=self.roundings + DIVISION)


@final
@dataclass(frozen=True)
class Mixing:
    """Tokens of a sequence share their gates: g_i = (1 - strength) p_i + strength sum_j W_ij p_j, with sum_j W_ij = 1.

    change  change(radius, rounded) returns (T,): a bound for the change of the logarithms of W_i, before W_i is normalised,
            if every token of the sequence is perturbed by up to `radius (T,)`. It increases with the radius. With `rounded`
            it includes float32 rounding. None: W does not depend on the router's input
    roundings   the number of float32 roundings of a gate besides those of the sum over j and of the mixture with `strength`
    """

    strength: float
    change: Callable[[Tensor, bool], Tensor] | None = None
    roundings: int = 0


@final
@dataclass(frozen=True)
class Shares:
    """How weights follow from scores in evaluation: amount = gate * factor, for the experts in use.

    divided_by  what amounts are divided by: "set", their own sum; "all", the sum of the gates of all experts; or "nothing"
    best        the set is the `best` largest keys, and experts less than `width` below the last of them, where keys are
                logits, or logarithms of informed gates; None: the set is that of the declared conditions, without factors
    width       the width of the strip below the k-th key; 0: there is none
    factor      from gaps, the k-th key minus that of an expert, to factors: 1 up to 0, 0 from `width` on, not increasing
    slope       the largest slope of `factor`; infinite if it has no bound
    equal       True: all experts of the set have equal weights
    gate        what amounts are instead of the gates that the selector reads; None: these gates
    """

    best: int | None
    divided_by: Literal["set", "all", "nothing"] = "set"
    width: float = 0.0
    factor: Callable[[Tensor], Tensor] = _is_core
    slope: float = math.inf
    equal: bool = False
    gate: GateFunction | None = None


@final
@dataclass(frozen=True)
class Conditions:
    """Conditions under which a token keeps its set: an AND of ORs of sum(keys of ahead) > sum(keys of behind).

    All conditions of way 0 must be true. The ways 2a - 1 and 2a are alternatives: all conditions of one of the two must be
    true. A key is a logit or a gate (after informers, an informed gate) plus `bias`; the key of index E is `threshold`. Ties
    go to the lower index, and a threshold must be exceeded. `keep_best` and the functions after it build the usual ones.

    ahead, behind   (T,M,h) int64: h indices from 0 to E on each side. Tokens are in the order of `scores.key.flatten(0, 1)`.
                    A side with fewer than h experts is filled up with E, and each E adds `threshold`
    valid           (T,M) bool: False where a token has fewer than M conditions; such a condition is not read
    way             (T,M) int64; None: all are of way 0
    chosen          (T,E) bool: the selected set
    bias            (E,) or None

    So the sum of n gates can be kept above n times `threshold`, but not above a number that is the same for sets of all
    sizes. There is no other constant: a margin between two keys cannot be expressed. Sums have certificates if they are of
    softmax or sigmoid gates and no token-side informer mixes these.
    """

    ahead: Tensor  # (T,M,h)
    behind: Tensor  # (T,M,h)
    valid: Tensor  # (T,M) bool: False where a token has fewer conditions than others
    way: Tensor | None  # (T,M)
    chosen: Tensor  # (T,E) bool: the selected set
    compares: Compared = "logits"
    threshold: float = 0.0
    bias: Tensor | None = None  # (E,)

    @property
    def experts(self) -> int:
        return self.chosen.shape[1]

    def sums(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (T,M) of `keys (T,E+1)` on both sides of each condition."""
        ahead, behind = (keys.gather(1, side.flatten(1)).view(side.shape).sum(-1) for side in (self.ahead, self.behind))
        return ahead, behind

    def sides(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two sides (T,R,h) of the conditions `which (T,R)`."""
        index = which.unsqueeze(-1).expand(-1, -1, self.ahead.shape[-1])
        return self.ahead.gather(1, index), self.behind.gather(1, index)

    def at(self, which: Tensor) -> "Conditions":
        """Return the condition `which (T,)` of each token alone."""
        which = which.unsqueeze(1)
        ahead, behind = self.sides(which)
        return replace(self, ahead=ahead, behind=behind, valid=self.valid.gather(1, which), way=None)

    def required_radii(self, radii: Tensor) -> Tensor:
        """Return `radii (T,M)`, with infinity for those that are not needed: of the alternative that fails first."""
        radii = radii.nan_to_num(nan=0.0, posinf=torch.inf).where(self.valid, torch.inf)
        if self.way is not None and self.way.numel():
            alternatives = int(self.way.max() + 1) // 2
            best = radii.new_full((len(radii), 2 * alternatives + 1), torch.inf).scatter_reduce(1, self.way, radii, "amin")
            first_worse = best[:, 1::2] < best[:, 2::2]
            dropped = torch.stack([first_worse, ~first_worse], dim=2).flatten(1)
            dropped = torch.nn.functional.pad(dropped, (1, 0))  # way 0 is always needed
            radii = radii.where(~dropped.gather(1, self.way), torch.inf)
        return radii

    @property
    def ties_hold(self) -> Tensor:
        """(T,M) bool: which conditions are true if their sides are equal."""
        ahead, behind = self.ahead[..., 0], self.behind[..., 0]
        return (ahead == self.experts) | ((ahead < behind) & (behind < self.experts))


def keep_best(keys: Tensor, k: int, compares: Compared, bias: Tensor | None = None) -> Conditions:
    """Return conditions that the k largest keys stay larger than all others. The keys include `bias (E,)`."""
    keys = _rows(keys)
    return replace(swap_conditions(best(keys, k), count=min(k, keys.shape[1])), compares=compares, bias=bias)


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
        as_alternative(threshold_conditions(chosen), first.long()), as_alternative(swap_conditions(first, count=1), 2)
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
    return swap_conditions(nothing, count=0)


def best(keys: Tensor, k: int) -> Tensor:
    """Return (T,E) bool: the k largest of each row of `keys (T,E)`, ties to the lower index."""
    order = keys.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(keys, dtype=torch.bool).scatter(1, order, True)


def swap_conditions(chosen: Tensor, allowed: Tensor | None = None, *, count: int | None = None) -> Conditions:
    """Return conditions that every chosen expert is ahead of every other expert, or of those in `allowed (T,E)`.

    count   how many experts are chosen for every token; None: the largest number in `chosen`, for which the host waits
    """
    tokens, experts = chosen.shape
    others = ~chosen if allowed is None else allowed & ~chosen
    inside = _members(chosen, count)
    outside = _members(others, experts - count if count is not None and allowed is None else None)
    ahead = inside.unsqueeze(2).expand(-1, -1, outside.shape[1]).reshape(tokens, -1, 1)
    behind = outside.unsqueeze(1).expand(-1, inside.shape[1], -1).reshape(tokens, -1, 1)
    valid = (ahead < experts).squeeze(-1) & (behind < experts).squeeze(-1)
    return Conditions(ahead, behind, valid, None, chosen)


def threshold_conditions(chosen: Tensor) -> Conditions:
    """Return conditions that every chosen expert is ahead of the threshold, and the threshold ahead of all others."""
    each = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    threshold = torch.full_like(each, chosen.shape[1])
    ahead, behind = each.where(chosen, threshold), threshold.where(chosen, each)
    valid = torch.ones_like(chosen)
    return Conditions(ahead.unsqueeze(-1), behind.unsqueeze(-1), valid, None, chosen)


def as_alternative(conditions: Conditions, way: Tensor | int) -> Conditions:
    """Return the conditions with another `way (T,M)`: 0, or one of two alternatives."""
    return replace(conditions, way=_ways(conditions) + way)


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
    way = None if first.way is None and second.way is None else torch.cat([_ways(each) for each in both], dim=1)
    return replace(first, ahead=ahead, behind=behind, valid=valid, way=way)


def _ways(conditions: Conditions) -> Tensor:
    return torch.zeros_like(conditions.valid, dtype=torch.int64) if conditions.way is None else conditions.way


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
    return Conditions(ahead, behind, valid, None, chosen)


def _members(member: Tensor, count: int | None = None) -> Tensor:
    """Return (T,n): the indices of the members of each row, filled up with the number of columns; n is `count`."""
    if count is None:
        count = int(member.sum(1).max()) if member.numel() else 0
    indices = torch.arange(member.shape[1], device=member.device).expand_as(member)
    return indices.where(member, member.shape[1]).sort(dim=1).values[:, :count]


def _rows(keys: Tensor) -> Tensor:
    return keys.reshape(-1, keys.shape[-1])


FLOAT = 4  # bytes: routing is float32, whatever the dtype of the model
INTEGER = 8  # bytes


@final
@dataclass(frozen=True)
class LayerSizes:
    """The sizes of the layer that a cost is declared for.

    dim                 width of a token
    experts             how many experts the layer has
    length              tokens of a sequence
    heads               of the attention before the layer
    key_width           of a head
    value_width         of a head
    number              bytes of a number of the model
    expert_parameters   of one expert
    causal              whether a token sees only the tokens before it
    previous_experts    of the MoE layer before; None: as many as this layer has
    """

    dim: int
    experts: int
    length: int
    heads: int
    key_width: int
    value_width: int
    number: int
    expert_parameters: int = 0
    causal: bool = False
    previous_experts: int | None = None


@final
@dataclass(frozen=True)
class Cost:
    """What one part keeps and sends in one layer: bytes per token, except `summed` and `summed_again`.

    part            the name of the row in a plan
    flops           of a `layer_cost` only: FLOPs of its forward; those of parts are counted by running them
    kept            bytes kept for the backward
    cached          bytes kept in the cache while decoding
    summed          bytes that each rank contributes to sums over ranks in a training forward
    summed_again    of these bytes, those that a recomputation sums again
    gathered        bytes that each rank sends to all others in a training forward and a recomputation

    The conformance suite counts `cached`, `summed` and `gathered`. It compares `kept` loosely, as a sum over the router's
    parts in float32: it may be up to 4 times what autograd saves, or a quarter of it, give or take 16 bytes an expert.
    """

    part: str
    flops: float = 0.0
    kept: float = 0.0
    cached: float = 0.0
    summed: int = 0
    summed_again: int = 0
    gathered: float = 0.0


@final
@dataclass(frozen=True)
class ActiveExperts:
    """How many experts a token uses on average, and how many slots a layer allocates for it.

    training    experts of a token in training
    inference   experts of a token in evaluation; every token has so many if `about` is empty
    slots       slots of a token, at least the largest number of experts of a token
    about       why the numbers are estimates
    rows        rows of experts that a layer allocates for a token in training; None: one for each slot

    In a layer of another kind than "moe" these are the rows that experts compute, divided by the number of tokens.
    """

    training: float
    inference: float
    slots: float
    about: str = ""
    rows: float | None = None

    @property
    def training_rows(self) -> float:
        """Rows of experts that a layer allocates for a token in training."""
        return self.slots if self.rows is None else self.rows


def selection_bytes(slots: int, sizes: LayerSizes) -> float:
    """Return about how many bytes per token a selector keeps: gates, and an index and three numbers for each slot."""
    return FLOAT * sizes.experts + (INTEGER + 3 * FLOAT) * slots
