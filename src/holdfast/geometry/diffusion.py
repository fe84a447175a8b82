"""Random walks of a token until it flips: bounds for the time, and a simulation.

A token x with the selected set S moves as dX = D dB, B a Brownian motion. It leaves its cell at tau, the first time that a
key of S meets a key outside S. The difference of two keys is a Brownian motion in one dimension, so that

    h_ij = (l_i - l_j) / |D^T (w_i - w_j)|,  i in S, j not in S,  h the smallest of them
    P(i and j meet before t) = 2 (1 - Phi(h_ij / sqrt t))                                          the reflection principle
    2 (1 - Phi(h / sqrt t)) <= P(tau <= t) <= min(1, sum over i, j of 2 (1 - Phi(h_ij / sqrt t)))

(Theorem 5.1 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts", whose upper bound is
k (E - k) times the lower one.) Every walk leaves its cell, at a tie of two experts almost surely: order 1.

T tokens, E experts, k selected, R walks at the same time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.geometry.affine import AffineKeys, Noise, affine_keys
from holdfast.geometry.ties import MOST_ELEMENTS, check_k, pair_distances, ranks_of
from holdfast.routing.declarations import Order

STEP = 1 / 2  # a step lasts (this times h)^2, so that a walk meets at most one boundary in most steps
SHORTEST = 1 / 50  # the shortest step lasts (this times the h of the token)^2; then a bridge decides
MOST_ROUNDS = 400  # of halving a step, at most


@final
@dataclass(frozen=True)
class HittingBounds:
    """Bounds for the probability that a token has flipped before each time."""

    times: Tensor  # (n,) or (T,n)
    nearest: Tensor  # (T,): h, the distance of the nearest tie in units of the noise
    lower: Tensor  # (T,n)
    upper: Tensor  # (T,n): the sum over pairs
    coarse: Tensor  # (T,n): the upper bound of the paper


@torch.no_grad()
def hitting_bounds(
    order: Order, tokens: Tensor, k: int, times: Sequence[float] | Tensor, *, noise: Noise = None
) -> HittingBounds:
    """Return bounds of P(tau <= t) for `tokens (..., d)` and each of `times (n,)`, or of each token's own `times (T,n)`.

    noise   D: a number, (d,) for a diagonal, or (d,d); None is 1. `noise=sigma, times=[t]` is the same as noise of standard
            deviation sigma sqrt(t) that is added little by little
    """
    keys = affine_keys(order, tokens)
    check_k(k, keys.experts)
    instants = torch.atleast_1d(torch.as_tensor(times, dtype=torch.float64, device=keys.points.device))
    if not (instants > 0).all():
        raise ValueError(f"times are {instants.tolist()}; expected positive numbers.")
    products = keys.products(noise)
    step = max(1, MOST_ELEMENTS // keys.experts**2)
    by_token = instants.expand(len(keys.points), -1)
    parts = [slice(start, start + step) for start in range(0, max(1, len(keys.points)), step)]
    found = [_bounds_of(products, keys.rows(part), k, by_token[part]) for part in parts]
    nearest, lower, upper = (torch.cat(each) for each in zip(*found, strict=True))
    pairs = k * (keys.experts - k)
    return HittingBounds(instants, nearest, lower, upper.clamp_max(1), (pairs * lower).clamp_max(1))


def _bounds_of(products: Tensor, keys: AffineKeys, k: int, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = keys.logits
    chosen = ranks_of(logits) < k
    across = chosen.unsqueeze(2) & ~chosen.unsqueeze(1)
    distances = pair_distances(products, keys.index, logits).where(across, torch.inf).flatten(1)
    distances = distances.sort(1).values[:, : k * (keys.experts - k)]
    if not distances.shape[1]:
        distances = torch.full_like(logits[:, :1], torch.inf)
    nearest = distances[:, 0]
    upper = torch.stack([meets_before(distances, time.unsqueeze(1)).sum(1) for time in times.t()], dim=1)
    return nearest, meets_before(nearest.unsqueeze(1), times), upper


def meets_before(distances: Tensor, time: Tensor) -> Tensor:
    """Return 2 (1 - Phi(h / sqrt t)): the probability that a Brownian motion is at distance h at some time before t."""
    return torch.special.erfc(distances / (2 * time).sqrt())


@final
@dataclass(frozen=True)
class Walks:
    """The exits of simulated walks. A walk that has not left its cell at the horizon has time infinity and order 0."""

    times: Tensor  # (T,walks) float64
    orders: Tensor  # (T,walks) int64: of the tie at the exit, after refining the step in which it happened
    unrefined_orders: Tensor  # (T,walks) int64: experts that met in that step, less 1, before it was refined

    def share_before(self, times: Tensor) -> Tensor:
        """Return (T,n): the share of a token's walks that have left their cell before each of `times (n,)`."""
        return (self.times.unsqueeze(2) <= times.to(self.times)).double().mean(1)


@torch.no_grad()
def simulate_walks(
    order: Order, tokens: Tensor, k: int, horizon: float | Tensor, *, noise: Noise = None, walks: int = 1, seed: int = 0
) -> Walks:
    """Simulate `walks` walks of each of `tokens (..., d)` up to the time `horizon`, a number or (T,), or their exits.

    A walk moves in the space of keys, E dimensions. A step is short where a boundary is near. Between the two ends of a
    step, the difference of a pair is a Brownian bridge, which meets 0 with probability exp(-2 a b / (s^2 dt)), a and b the
    differences at the ends and s^2 the variance per unit of time. A step with an exit is halved until one pair meets in it.
    """
    keys = affine_keys(order, tokens)
    check_k(k, keys.experts)
    if walks < 1:
        raise ValueError(f"walks is {walks}; expected at least 1.")
    limit = torch.as_tensor(horizon, dtype=torch.float64).expand(len(keys.points))
    if not (limit > 0).all():
        raise ValueError("the horizon must be a positive time.")
    source = torch.Generator().manual_seed(seed)
    shape = (len(keys.points), walks)
    times, orders = torch.full(shape, torch.inf, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64)
    unrefined = orders.clone()
    if k < keys.experts:
        products = keys.products(noise).cpu()
        rows = torch.arange(shape[0]).repeat_interleave(walks)
        step = max(1, MOST_ELEMENTS // (k * (keys.experts - k)))
        for group in range(len(products)):
            members = (keys.index.cpu()[rows] == group).nonzero().squeeze(1)
            for part in members.split(step):
                start = rows[part]
                walking = _Walking(products[group], keys.logits.cpu()[start], k, limit[start], source)
                exits = walking.run()
                for table, values in zip((times, orders, unrefined), exits, strict=True):
                    table.view(-1)[part] = values
    return Walks(times, orders, unrefined)


class _Step(NamedTuple):
    """A step of some walks: keys at both ends, its start and its length, and which pairs (R,k,E-k) met in it."""

    start: Tensor
    end: Tensor
    time: Tensor
    length: Tensor
    met: Tensor


@final
class _Walking:
    """Walks with the same products of weights. Keys are sorted: the first k columns are the selected experts."""

    def __init__(self, products: Tensor, logits: Tensor, k: int, horizon: Tensor, source: torch.Generator) -> None:
        self.k, self.horizon, self.source = k, horizon, source
        self.ranked = logits.argsort(dim=1, descending=True, stable=True)
        self.start = logits.gather(1, self.ranked)
        own = products.diagonal()
        squared = (own.unsqueeze(1) + own.unsqueeze(0) - 2 * products).clamp_min(0)
        values, vectors = torch.linalg.eigh(products)
        self.root = vectors * values.clamp_min(0).sqrt()
        self.squared = squared[self.ranked[:, :k].unsqueeze(2), self.ranked[:, k:].unsqueeze(1)]  # (R,k,E-k)
        self.shortest = (SHORTEST * self.reach(self.start, self.squared)).square()

    def gaps(self, keys: Tensor) -> Tensor:
        return keys[:, : self.k].unsqueeze(2) - keys[:, self.k :].unsqueeze(1)

    def reach(self, keys: Tensor, squared: Tensor) -> Tensor:
        """Return (R,): h, the distance of the nearest tie in units of the noise."""
        return (self.gaps(keys) / squared.sqrt()).nan_to_num(nan=torch.inf, posinf=torch.inf).flatten(1).amin(1)

    def noise(self, walks: Tensor) -> Tensor:
        """Return Gaussian increments (n,E) of the keys per unit of time, in the order of each walk's ranking."""
        drawn = torch.randn(len(walks), len(self.root), generator=self.source, dtype=torch.float64)
        return (drawn @ self.root.t()).gather(1, self.ranked[walks])

    def met(self, start: Tensor, end: Tensor, length: Tensor, squared: Tensor) -> Tensor:
        """Return which pairs met between the two ends, drawn from their bridges."""
        before, after = self.gaps(start), self.gaps(end)
        chance = (-2 * before * after / (squared * length.view(-1, 1, 1))).nan_to_num(nan=-torch.inf).exp()
        drawn = torch.rand(before.shape, generator=self.source, dtype=torch.float64)
        return (after <= 0) | (drawn < chance)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Walk until every walk has left its cell or is at its horizon; return times, orders and unrefined orders (R,)."""
        count = len(self.start)
        times = torch.full((count,), torch.inf, dtype=torch.float64)
        orders, unrefined = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        clock, keys = torch.zeros_like(times), self.start.clone()
        alive = (self.shortest < torch.inf).nonzero().squeeze(1)  # a walk without noise between its experts never flips
        exits: list[tuple[Tensor, ...]] = []
        while len(alive):
            squared, start = self.squared[alive], keys[alive]
            left = self.horizon[alive] - clock[alive]
            length = (STEP * self.reach(start, squared)).square().maximum(self.shortest[alive]).minimum(left)
            end = start + length.sqrt().unsqueeze(1) * self.noise(alive)
            met = self.met(start, end, length, squared)
            out = met.flatten(1).any(1)
            exits.append((alive[out], start[out], end[out], clock[alive[out]], length[out], met[out]))
            keys[alive], clock[alive] = end, clock[alive] + length
            alive = alive[~out & (length < left)]
        if exits:
            walks, *step = (torch.cat(each) for each in zip(*exits, strict=True))
            unrefined[walks] = order_of(step[-1])
            times[walks], orders[walks] = self._refine(walks, _Step(*step))
        return times, orders, unrefined

    def _refine(self, walks: Tensor, step: _Step) -> tuple[Tensor, Tensor]:
        """Halve the steps until one pair alone meets in them; return the times of the exits and the orders there."""
        start, end, time, length, met = (each.clone() for each in step)
        for _ in range(MOST_ROUNDS):
            rows = (met.flatten(1).sum(1) > 1).nonzero().squeeze(1)
            if not len(rows):
                break
            squared, half = self.squared[walks[rows]], length[rows] / 2
            middle = (start[rows] + end[rows]) / 2 + (half / 2).sqrt().unsqueeze(1) * self.noise(walks[rows])
            first = self.met(start[rows], middle, half, squared)
            second = self.met(middle, end[rows], half, squared)
            # In neither half: this middle does not belong to a walk that exits. Draw another one in the next round.
            in_first = first.flatten(1).any(1)
            in_second = second.flatten(1).any(1) & ~in_first
            one, two = rows[in_first], rows[in_second]
            end[one], met[one], length[one] = middle[in_first], first[in_first], half[in_first]
            start[two], met[two], length[two] = middle[in_second], second[in_second], half[in_second]
            time[two] += half[in_second]
        pair = met.flatten(1).double().argmax(1, keepdim=True)
        before, after, squared = (
            each.flatten(1).gather(1, pair).squeeze(1) for each in (self.gaps(start), self.gaps(end), self.squared[walks])
        )
        return time + self._meeting_time(before, after.abs(), squared, length), order_of(met)

    def _meeting_time(self, before: Tensor, after: Tensor, squared: Tensor, length: Tensor) -> Tensor:
        """Draw when a bridge of this length, from `before` to -`after`, is at 0 for the first time.

        A bridge that meets 0 and ends at `after` is the mirror image of one that ends at -`after`. In the time
        s = t length / (length - t) it is a Brownian motion with a drift, whose first passage is inverse Gaussian with
        mean before length / after and shape before^2 / squared.
        """
        shape = (before.square() / squared).clamp_min(torch.finfo(torch.float64).tiny)
        inverse = after / (before * length).clamp_min(torch.finfo(torch.float64).tiny)  # of the mean, which may be infinite
        normal = torch.randn(len(shape), generator=self.source, dtype=torch.float64).square().clamp_min(1e-30)
        # The smaller root of Michael, Schucany and Haas, without cancellation.
        ratio = normal / (2 * shape)
        smaller = 1 / (inverse + ratio + (ratio * (2 * inverse + ratio)).sqrt())
        keep = torch.rand(len(shape), generator=self.source, dtype=torch.float64) * (1 + smaller * inverse) <= 1
        passage = smaller.where(keep, 1 / (inverse.square() * smaller))
        return length / (1 + length / passage)


def order_of(met: Tensor) -> Tensor:
    """Return (R,): the number of experts in the pairs that met, `met (R,k,E-k)`, less 1."""
    return met.any(2).sum(1) + met.any(1).sum(1) - 1
