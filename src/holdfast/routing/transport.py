"""Optimal transport between the tokens of a batch and experts: every token has mass 1, every expert receives T / E.

    column_potentials   entropic transport: the rows of the plan are softmax(s + v)               (Clark et al. 2022)
    sparse_potentials   transport with at most n experts for a token: the rows are `sparse_rows`  (Liu et al. 2023)
    assign_balanced     transport of whole numbers: each token has k experts, by an auction       (Lewis et al. 2021)

The first two find v, one number for each expert, for the real tokens of all ranks, without gradient.

**Sparse transport** is that of Liu et al., transposed: they limit the tokens of an expert, and here the experts of a token.

    maximise  <s, X> - gamma/2 |X|^2   over X >= 0 with row sums 1, column sums T / E and at most n nonzeros in a row

The limit makes the problem nonconvex. Its semi-dual is convex:

    minimise  D(v) = sum_t max_x [(s_t + v) x - gamma/2 |x|^2] - T/E sum_e v_e

The x of a row is the projection of its n largest (s + v) / gamma onto the simplex, and a subgradient of D is the column sums
less T / E. With n = 1 and n = E the smallest D is the largest value of the problem; in between there may be a gap, so that
the column sums of no v are exactly T / E: `sparse_potentials` returns by how much they are not.

**The auction** (Bertsekas) is for the balanced assignment of BASE layers:

    maximise sum x_te s_te over x in {0,1}, with sum_e x_te = k for each token, sum_t x_te <= ceil(T k / E) for each expert

Every expert e has a price p_e, and as many places as tokens may choose it. In a round, each token that lacks m of its k
experts bids for the m experts with the largest s_te - p_e that it does not hold. It bids up to the point where the next best
would be as good, plus eps: s_te - (the next best s - p) + eps. An expert keeps the highest bids; when all of its places are
taken, its price is the lowest bid that it keeps. At the end each token's experts are, at these prices, within eps of its
best ones. By duality the sum is then within (T k + E) eps of the largest possible sum.

That proof needs every place taken. So E ceil(T k / E) - T k extra bidders, to which all experts are worth the same, take the
places that are left. It then holds for any first prices, and eps is lowered in `steps`, each of which starts with
the prices of the step before; this avoids long price wars.

eps is 2^-12 of the range of the scores for up to 256 tokens, and 2^-8 for more (`steps`). Scores and prices are float64: in
float32 a small raise of a large price would be lost, and the auction would not end. Every raise is at least eps and prices
are bounded, so it always ends.

A round finds the highest bids of each expert among T. The host reads once in `ROUNDS_PER_CHECK` rounds whether a bidder is
left, which synchronises a GPU. More than `MOST_TOKENS` tokens are divided into groups of equal size by a fixed pseudo-random
permutation, which bid separately but at the same time; then the optimum is that of each group, and each expert still gets at
most ceil(T k / E) tokens in all.

T tokens of a batch, E experts, s logits, n groups of G bidders
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import cdiv, operator
from holdfast.kernels.select import TINY, top
from holdfast.routing.state import gather_over_ranks, several_ranks, sum_over_ranks
from holdfast.routing.thresholds import sparsemax

ITERATIONS = 50  # at most
TOLERANCE = 1e-3  # relative error of the column sums at which entropic transport ends
STEPS = (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10, 2.0**-12)  # eps of each step, over the range of the scores
FEW_TOKENS = 256  # up to here all steps are taken, with more tokens the first four
ROUNDS_PER_CHECK = 8
MOST_TOKENS = 2048  # of a group
SEED = 0x9E3779B1  # of the permutation
NO_PLACE = -(2.0**20)  # the score of an expert without places, far below all scores, whose range is 1


@torch.no_grad()
def column_potentials(logits: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return v (E,), with mean 0, and the number of tokens.

    The columns of softmax(s + v) sum to T / E, up to `TOLERANCE`, or after `ITERATIONS` steps of
    v_e <- v_e + log(T / E) - log(sum_t P_te). With fewer than E tokens v = 0.

    logits  (B,N,E), of this rank
    real    (B,N) bool
    """
    experts = logits.shape[-1]
    count = sum_over_ranks(real.sum())
    target = count / experts
    rows, mine = logits.flatten(0, 1), real.flatten().unsqueeze(1)
    potentials, ended = logits.new_zeros(experts), torch.zeros((), dtype=torch.bool, device=logits.device)
    # Without synchronising, the host cannot know when to stop. On a CPU of one process it may look.
    may_stop = logits.device.type == "cpu" and not torch.compiler.is_compiling() and not several_ranks()
    for _ in range(ITERATIONS):
        columns = sum_over_ranks(torch.softmax(rows + potentials, dim=-1).where(mine, 0.0).sum(0))
        ended = ended | ((columns - target).abs().amax() <= TOLERANCE * target)
        if may_stop and bool(ended):
            break
        change = target.clamp_min(TINY).log() - columns.clamp_min(TINY).log()
        potentials = torch.where(ended, potentials, potentials + change)
    potentials = potentials - potentials.mean()
    return potentials.where(count >= experts, 0.0), count


@torch.no_grad()
def sparse_potentials(
    logits: Tensor, real: Tensor, sparsity: int, gamma: float, iterations: int = ITERATIONS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return v (E,), with mean 0, the number of tokens, and the largest relative error of the column sums.

    Each step lowers v_e in proportion to the relative excess of column e, at most 1. The factor is half the mean range of a
    row at first, and 1 / iterations^2 of that at the end. Sums are float64: whether a token changes its experts during the
    iteration must not depend on their order. With fewer than E tokens v = 0.
    """
    experts = logits.shape[-1]
    rows, mine = logits.flatten(0, 1).double(), real.flatten()
    ranges = (rows.amax(1) - rows.amin(1)).where(mine, 0.0).sum()
    count, ranges = sum_over_ranks(torch.stack([mine.sum().double(), ranges]))
    target, start = (count / experts).clamp_min(TINY), ranges / count.clamp_min(1) / 2
    potentials, excess = rows.new_zeros(experts), rows.new_zeros(experts)
    for step in range(iterations):
        planned = sparse_rows(rows + potentials, sparsity, gamma).where(mine.unsqueeze(1), 0.0)
        excess = sum_over_ranks(planned.sum(0)) / target - 1
        potentials = potentials - start * iterations ** (-2 * step / iterations) * excess.clamp(-1, 1)
    potentials = (potentials - potentials.mean()).where(count >= experts, 0.0)
    return potentials.to(logits.dtype), count, excess.abs().amax()


def sparse_rows(logits: Tensor, sparsity: int, gamma: float, first: Tensor | None = None) -> Tensor:
    """Return (...,E): the projection of the `sparsity` largest of `logits (...,E)` / gamma onto the simplex, 0 elsewhere.

    first   (...,E) bool: experts that come before all others, as if their logits were the largest
    """
    ranks = logits.detach()
    if first is not None:
        ranks = ranks + first * (1 + ranks.amax(-1, keepdim=True) - ranks.amin(-1, keepdim=True))
    experts = top(ranks, sparsity)
    return torch.zeros_like(logits).scatter(-1, experts, sparsemax(logits.gather(-1, experts) / gamma))


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
