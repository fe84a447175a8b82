"""A balanced assignment of tokens to experts, by an auction on the device (BASE layers, Lewis et al. 2021).

    maximise sum x_te s_te over x in {0,1}, with sum_e x_te = k for each token, sum_t x_te <= ceil(T k / E) for each expert

**The auction** (Bertsekas). Every expert e has a price p_e, and as many places as tokens may choose it. In a round, each
token that lacks m of its k experts bids for the m experts with the largest s_te - p_e that it does not hold. It bids up to
the point where the next best would be as good, plus eps: s_te - (the next best s - p) + eps. An expert keeps the highest
bids; when all of its places are taken, its price is the lowest bid that it keeps. At the end each token's experts are, at
these prices, within eps of its best ones. By duality the sum is then within (T k + E) eps of the largest possible sum.

That proof needs every place taken. So E ceil(T k / E) - T k extra bidders, to which all experts are worth the same, take the
places that are left. It then holds for any first prices, and eps is lowered in `steps`, each of which starts with
the prices of the step before; this avoids long price wars.

**Precision.** eps is 2^-12 of the range of the scores for up to 256 tokens, and 2^-8 for more (`steps`). Scores and prices
are float64: in float32 a small raise of a large price would be lost, and the auction would not end. Every raise is at least
eps and prices are bounded, so it always ends.

**Cost.** A round finds the highest bids of each expert among T. The host reads once in `ROUNDS_PER_CHECK` rounds whether a
bidder is left, which synchronises a GPU. More than `MOST_TOKENS` tokens are divided into groups of equal size by a fixed
pseudo-random permutation, which bid separately but at the same time; then the optimum is that of each group, and each expert
still gets at most ceil(T k / E) tokens in all.

n groups of G bidders, E experts
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import EVERYWHERE, cdiv, operator
from holdfast.routing.state import gather_over_ranks

STEPS = (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10, 2.0**-12)  # eps of each step, over the range of the scores
FEW_TOKENS = 256  # up to here all steps are taken, with more tokens the first four
ROUNDS_PER_CHECK = 8
MOST_TOKENS = 2048  # of a group
SEED = 0x9E3779B1  # of the permutation
NO_PLACE = -(2.0**20)  # the score of an expert without places, far below all scores, whose range is 1


def steps(tokens: int) -> tuple[float, ...]:
    """Return eps of each step for a group of this many tokens; the last one is the precision of the result.

    Tokens that occur often bid against their copies, in rounds that raise a price by eps each: with many tokens, the last
    two steps take most of the time and change the mean score of a token by less than 1/256 of the range.
    """
    return STEPS if tokens <= FEW_TOKENS else STEPS[:4]


def assign_balanced(scores: Tensor, real: Tensor, k: int) -> Tensor:
    """Return (T,k): the experts of each token, in ascending order, by an auction among the real tokens of all ranks.

    scores  (T,E), without gradients; NaN counts as 0
    real    (T,) bool; rows of other tokens are 0 and mean nothing
    """
    experts: Tensor = _assign(scores.detach(), real, k)
    return experts


def _assign_over_ranks(scores: Tensor, real: Tensor, k: int) -> Tensor:
    rows, mine = gather_over_ranks(scores[real].float())
    chosen = auction(rows, k)[mine]
    out = torch.zeros(len(scores), k, dtype=torch.int64, device=scores.device)
    if len(chosen):
        out[real] = chosen.to(torch.uint8).topk(k, dim=1).indices.sort(dim=1).values
    return out


_assign = operator(
    "assign_balanced(Tensor scores, Tensor real, int k) -> Tensor",
    _assign_over_ranks,
    lambda scores, real, k: scores.new_empty(scores.shape[0], k, dtype=torch.int64),
    devices=EVERYWHERE,
)


class _Bidders(NamedTuple):
    """The bidders of all groups: tokens first, then extra bidders, then rows that want nothing."""

    scores: Tensor  # (n,G,E) float64; the range of the tokens' scores is 1
    wanted: Tensor  # (n,G): how many experts each bidder wants
    places: Tensor  # (n,E): how many bidders each expert keeps
    most_wanted: int  # the largest of `wanted`
    most_places: int  # at least the largest of `places`


def auction(scores: Tensor, k: int) -> Tensor:
    """Return (T,E) bool: k experts for each of `scores (T,E)`, at most ceil(T k / E) tokens for each expert."""
    tokens, experts = scores.shape
    if tokens == 0 or k == experts:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.nan_to_num(nan=0.0).double()
    low, high = scores.min(), scores.max()
    scores = (scores - low) / (high - low).where(high > low, 1.0)
    groups = cdiv(tokens, MOST_TOKENS)
    order = _permutation(tokens, scores.device) if groups > 1 else torch.arange(tokens, device=scores.device)
    held = _run(_bidders(scores[order], k, groups))
    # Token number i of the permutation is bidder i // n of group i % n.
    by_token = held.transpose(0, 1).reshape(-1, experts)[:tokens]
    return torch.zeros_like(by_token).index_copy(0, order, by_token)


def _bidders(scores: Tensor, k: int, groups: int) -> _Bidders:
    """Return the bidders for `scores (T,E)`; token i is in group i % n."""
    tokens, experts = scores.shape
    longest = cdiv(tokens, groups)
    sizes = torch.tensor([cdiv(tokens - group, groups) for group in range(groups)], device=scores.device)
    padded = scores.new_zeros(longest * groups, experts)
    padded[:tokens] = scores
    grouped = padded.view(longest, groups, experts).transpose(0, 1)
    if groups == 1:
        places = torch.full((1, experts), cdiv(tokens * k, experts), device=scores.device)
    else:
        # All slots are numbered, and slot i belongs to expert i % E; a group gets the slots after those of the groups before
        # it. So the places of all groups together are balanced, too.
        ends = (sizes * k).cumsum(0).unsqueeze(1)
        each = torch.arange(experts, device=scores.device)
        places = _slots_before(ends, each, experts) - _slots_before(ends - (sizes * k).unsqueeze(1), each, experts)
    extra = places.sum(1) - sizes * k
    row = torch.arange(longest + experts, device=scores.device)
    is_token = row < sizes.unsqueeze(1)
    is_extra = (row >= longest) & (row < longest + extra.unsqueeze(1))
    values = torch.cat([grouped, grouped.new_zeros(groups, experts, experts)], dim=1)
    values = values.where((places > 0).unsqueeze(1), NO_PLACE)
    most_places = min(cdiv(longest * k, experts) + 1, len(row))
    return _Bidders(values, is_token * k + is_extra.long(), places, k, most_places)


def _slots_before(end: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Return how many of the slots 0 to end - 1 belong to each expert, if slot i belongs to expert i % E."""
    return (end - expert + experts - 1) // experts


def _run(bidders: _Bidders) -> Tensor:
    """Return (n,G,E) bool: the experts of each bidder after the last step."""
    prices = bidders.scores.new_zeros(bidders.places.shape)
    bids = bidders.scores
    for eps in steps(bidders.scores.shape[1] - bidders.scores.shape[2]):
        bids = torch.full_like(bidders.scores, -torch.inf)
        while True:
            for _ in range(ROUNDS_PER_CHECK):
                bids, prices = _round(bidders, bids, prices, eps)
            if bool(((bids > -torch.inf).sum(-1) == bidders.wanted).all()):
                break
    return bids > -torch.inf


def _round(bidders: _Bidders, bids: Tensor, prices: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the bids (n,G,E) that experts keep after a round, -inf where there is none, and the prices (n,E)."""
    held = bids > -torch.inf
    lacking = (bidders.wanted - held.sum(-1)).unsqueeze(-1)
    gains = (bidders.scores - prices.unsqueeze(1)).masked_fill(held, -torch.inf)
    bidding, ordered = _largest(gains, lacking, bidders.most_wanted + 1)
    next_best = ordered.gather(-1, lacking)
    bids = torch.where(bidding, bidders.scores - next_best + eps, bids)
    places = bidders.places.unsqueeze(-1)
    kept, ordered = _largest(bids.transpose(1, 2).contiguous(), places, bidders.most_places)
    lowest = ordered.gather(-1, (places - 1).clamp_min(0)).squeeze(-1)
    return bids.masked_fill(~kept.transpose(1, 2), -torch.inf), torch.where(lowest > -torch.inf, lowest, prices)


def _largest(values: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return which are the `count (..., 1)` largest of `values (..., n)`, ties to the lower index, and the `most` largest.

    Comparing with the smallest of them breaks ties alike on all devices, without a stable sort.
    """
    ordered = values.topk(most, dim=-1).values
    smallest = ordered.gather(-1, (count - 1).clamp_min(0))
    above, equal = values > smallest, values == smallest
    left = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= left))) & (count > 0), ordered


def _permutation(tokens: int, device: torch.device) -> Tensor:
    """Return a permutation of the tokens that depends only on their number, without random numbers of the model."""
    index = torch.arange(tokens, dtype=torch.int64, device=device)
    mixed = (index * SEED) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 12)).argsort(stable=True)
