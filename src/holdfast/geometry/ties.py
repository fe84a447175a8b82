"""`nearest_ties`: how far a token is from the nearest tie of each order, and which experts tie there.

A point has order m (Definition 3.2 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts")
if m + 1 experts have the same key, at the threshold between the k best and the others. All points of order m or more are a
closed set, a union of pieces of flats. Its nearest point lies inside a piece, so it is the projection of the token onto the
flat of that piece:

    distance to order m = min over the sets T of m + 1 experts whose projection is at the threshold of dist(x, F_T)

Larger sets are never nearer. At a tie of more experts the token has moved by the sum of c_i w_i over T; the c_i sum to 0, so
some are positive and some negative. So one expert at least can leave the tie upwards, and one downwards, while the token
moves less; one of the two leaves the others at the threshold.

Sets of experts that follow each other in the ranking of the token are not enough: they give an upper bound. All sets are too
many, but few can be the nearest. Starting from the upper bound r, the search visits only sets that can be nearer:

    dist(x, F_T) grows with T, so a set is visited only if all its pairs, and all its first experts, are nearer than r
    an expert at rank p is at the threshold only if enough experts between it and the threshold have met it, at distance <= r

For m = 1 the nearest tie is the nearest pair, the certificate's exact radius.

T tokens, E experts, M orders, N visited sets
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.geometry.flats import AffineKeys, Projection, affine_keys, at_threshold, keys_at, project
from holdfast.routing.declarations import Order

MOST_SETS = 100_000  # of a token that are visited for one order; beyond, the nearest of them is an upper bound
PIECE = 2**14  # sets that are extended together
EQUAL = 1 + 1e-12  # two distances within this factor are equal


@final
@dataclass(frozen=True)
class Ties:
    """The nearest ties of each token, by order."""

    orders: tuple[int, ...]
    distances: Tensor  # (T,M) float64, l2; infinite if there is no tie of this order
    sets: Tensor  # (T,M,E) bool: the experts that tie at the nearest point
    exact: Tensor  # (T,M) bool: True: this is the nearest; False: more than MOST_SETS sets, and this is an upper bound

    def share_within(self, eps: Tensor) -> Tensor:
        """Return (n,M): the share of tokens within each of `eps (n,)` of each order."""
        eps = torch.as_tensor(eps, dtype=self.distances.dtype, device=self.distances.device).reshape(-1)
        return (self.distances.unsqueeze(0) <= eps.view(-1, 1, 1)).double().mean(1)


@torch.no_grad()
def nearest_ties(order: Order, tokens: Tensor, k: int, orders: Sequence[int] = (1, 2, 3)) -> Ties:
    """Return the distances of `tokens (..., d)` to the nearest ties of some `orders`, in l2; tokens are flattened to (T,d).

    order   what `Score.order(tokens, context)` declares for the same tokens; `affine_order` returns it with k, or refuses
    k       how many experts a token selects. With k = E there is no tie, and distances are infinite
    """
    keys = affine_keys(order, tokens, k)
    orders = tuple(orders)
    if not orders or any(not isinstance(m, int) or m < 1 for m in orders):
        raise ValueError(f"orders are {orders}; expected whole numbers from 1.")
    products = keys.products()
    parts = [_nearest(products, part, k, orders) for _, part in keys.parts()]
    joined = [torch.cat([torch.stack([found[n] for found in part], dim=1) for part in parts]) for n in range(3)]
    return Ties(orders, *joined)


@torch.no_grad()
def tie_points(order: Order, tokens: Tensor, sets: Tensor) -> Tensor:
    """Return (T,d) float64: the projections of `tokens (..., d)` onto the flats of the `sets (T,E)` bool.

    A token whose set has fewer than two experts stays where it is; one whose flat is empty becomes NaN.
    """
    keys = affine_keys(order, tokens)
    products, logits = keys.products(), keys.logits
    moves = torch.zeros_like(logits)
    sizes = sets.sum(1)
    for size in sizes[sizes > 1].unique().tolist():
        rows = (sizes == size).nonzero().squeeze(1)
        members = sets[rows].nonzero()[:, 1].view(-1, size)
        found = project(products, keys.index[rows], logits[rows], members)
        found_moves = found.multipliers.where(found.distances.isfinite().unsqueeze(1), torch.nan)
        moves[rows] = torch.zeros_like(logits[rows]).scatter(1, members, found_moves)
    points = keys.points + (moves @ keys.weight) * keys.factors[keys.index]
    return points.unflatten(1, (-1, keys.width)).sum(1)  # a token has zeros outside the columns of its block


def _nearest(products: Tensor, keys: AffineKeys, k: int, orders: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each order, the distance (T,), the set (T,E) and whether it is exact (T,)."""
    logits = keys.logits
    nothing = torch.zeros_like(logits, dtype=torch.bool)
    no_tie = logits.new_full((len(logits),), torch.inf), nothing, torch.ones_like(nothing[:, 0])
    if k == keys.experts:
        return [no_tie for _ in orders]
    pairs = pair_distances(products, keys.index, logits)
    found = []
    for m in orders:
        if m == 1:
            chosen = ranks_of(logits) < k
            across = chosen.unsqueeze(2) & ~chosen.unsqueeze(1)
            distances, which = pairs.where(across, torch.inf).flatten(1).min(1)
            members = torch.stack([which // keys.experts, which % keys.experts], dim=1)
            sets = nothing.scatter(1, members, True) & distances.isfinite().unsqueeze(1)
            found.append((distances, sets, no_tie[2]))
        elif m < keys.experts:
            search = _Search(products, keys.index, logits, pairs, k, m)
            search.start_from_consecutive()
            search.run()
            found.append((search.best, search.sets, search.exact))
        else:
            found.append(no_tie)
    return found


def pair_distances(products: Tensor, index: Tensor, logits: Tensor) -> Tensor:
    """Return (T,E,E): the distance to the tie of two experts; infinite where they never tie, and on the diagonal."""
    spans = pair_spans(products)
    gaps = (logits.unsqueeze(2) - logits.unsqueeze(1)).abs_()
    # 0 / 0: experts with equal weights that tie everywhere.
    distances = gaps.div_(spans if len(spans) == 1 else spans[index]).nan_to_num_(nan=0.0, posinf=torch.inf)
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distances


def pair_spans(products: Tensor) -> Tensor:
    """Return (U,E,E): the lengths of the differences of weights; 0 where only rounding is left of one."""
    own = products.diagonal(dim1=1, dim2=2)
    spans = (own.unsqueeze(2) + own.unsqueeze(1) - 2 * products).clamp_min(0).sqrt()
    return spans.where(spans > 1e-7 * own.amax(1).view(-1, 1, 1).sqrt(), 0.0)


def ranks_of(logits: Tensor) -> Tensor:
    """Return (T,E): the rank of each expert, 0 for the largest key; ties to the lower index."""
    order = logits.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter(1, order, torch.arange(logits.shape[1]).expand_as(order))


@final
class _Search:
    """The search for the nearest tie of order m of some tokens; see above."""

    def __init__(self, products: Tensor, index: Tensor, logits: Tensor, pairs: Tensor, k: int, m: int) -> None:
        self.products, self.index, self.logits, self.pairs, self.k, self.m = products, index, logits, pairs, k, m
        self.scale = logits.abs().amax(1)
        self.best = logits.new_full((len(logits),), torch.inf)
        self.sets = torch.zeros_like(logits, dtype=torch.bool)
        self.exact = torch.ones_like(self.sets[:, 0])
        self.visited = torch.zeros_like(self.index)

    def visit(self, rows: Tensor, members: Tensor) -> Tensor:
        """Measure sets of tokens `rows (N,)`, and keep the nearest ties; return (N,) bool: which sets may be extended."""
        index, logits = self.index[rows], self.logits[rows]
        found = project(self.products, index, logits, members)
        near = (found.distances <= self.best[rows] * EQUAL) & found.distances.isfinite()
        if members.shape[1] <= self.m:
            return near
        rows, index, logits, members = rows[near], index[near], logits[near], members[near]
        found = Projection(*(each[near] for each in found))
        keys = keys_at(self.products, index, logits, members, found)
        is_tie = at_threshold(keys, members, self.k, self.scale[rows])
        rows, members, distances = rows[is_tie], members[is_tie], found.distances[is_tie]
        before = self.best
        self.best = before.scatter_reduce(0, rows, distances, "amin")
        better = (distances == self.best[rows]) & (distances < before[rows])
        self.sets[rows[better]] = torch.zeros_like(self.sets[rows[better]]).scatter(1, members[better], True)
        return torch.zeros_like(near)

    def start_from_consecutive(self) -> None:
        """Find an upper bound: the smallest sets that follow each other in the ranking, around the threshold."""
        experts, ranked = self.logits.shape[1], self.logits.argsort(dim=1, descending=True, stable=True)
        for size in range(self.m + 1, experts + 1):
            left = self.best.isinf().nonzero().squeeze(1)
            if not len(left):
                break
            for first in range(max(0, self.k - size + 1), min(self.k - 1, experts - size) + 1):
                self.visit(left, ranked[left, first : first + size].sort(1).values)

    def candidates(self, near: Tensor) -> Tensor:
        """Return (T,E) bool: the experts that can be at the threshold, and tie with m others, within the best distance.

        near    (T,E,E) bool: the pairs whose tie is within the best distance
        """
        ranks = ranks_of(self.logits)
        ahead = ranks.unsqueeze(1) < ranks.unsqueeze(2)  # (T,i,j): j is ahead of i
        meets, meets_ahead = near.sum(2), (near & ahead).sum(2)
        # An expert below the threshold must meet all but k - 1 of those ahead of it; one above must meet k - rank others.
        reached = torch.where(ranks >= self.k, meets_ahead > ranks - self.k, meets - meets_ahead >= self.k - ranks)
        return reached & (meets >= self.m)

    def run(self) -> None:
        """Visit all sets that can be nearer than the best."""
        experts = self.logits.shape[1]
        near = self.pairs <= self.best.view(-1, 1, 1) * EQUAL
        possible = self.candidates(near)
        near &= possible.unsqueeze(1) & possible.unsqueeze(2)
        near &= torch.ones(experts, experts, dtype=torch.bool).triu(1)  # the experts of a set are in increasing order
        rows, first = possible.nonzero(as_tuple=True)
        stack = [_Sets(rows, first.unsqueeze(1), near[rows, first])]
        while stack:
            sets = stack.pop()
            if len(sets.rows) > PIECE:
                stack.append(_Sets(*(each[PIECE:] for each in sets)))
                sets = _Sets(*(each[:PIECE] for each in sets))
            # Add each allowed expert to each set, visit the new sets, and extend those again that may be nearer.
            parent, added = sets.allowed.nonzero(as_tuple=True)
            rows, members = sets.rows[parent], torch.cat([sets.members[parent], added.unsqueeze(1)], dim=1)
            self.visited.scatter_add_(0, rows, torch.ones_like(rows))
            over = self.visited > MOST_SETS
            self.exact &= ~over
            left = ~over[rows]
            if members.shape[1] > 2:  # pairs were measured before
                visits = [self.visit(*part) for part in zip(rows.split(PIECE), members.split(PIECE), strict=True)]
                left &= torch.cat(visits)
            if left.any():
                rows, members, parent, added = rows[left], members[left], parent[left], added[left]
                stack.append(_Sets(rows, members, sets.allowed[parent] & near[rows, added]))


class _Sets(NamedTuple):
    """Sets of experts that are to be extended."""

    rows: Tensor  # (N,): the token of each set
    members: Tensor  # (N,s): its experts, in increasing order
    allowed: Tensor  # (N,E) bool: the experts that may be added, all of them after the last
