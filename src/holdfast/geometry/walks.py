"""Random walks of a token until it flips: bounds for the time, and a simulation.

A token x with the selected set S moves as dX = mu dt + D dB, B a Brownian motion and mu a drift, which may be 0. It leaves
its cell at tau, the first time that a key of S meets a key outside S. The difference of two keys is a Brownian motion with
drift in one dimension, so that

    h_ij = (l_i - l_j) / |D^T (w_i - w_j)|,  c_ij = (w_j - w_i).mu / |D^T (w_i - w_j)|,  i in S, j not in S
    P_ij(t) = P(i and j meet before t) = Phi((c_ij t - h_ij) / sqrt t) + exp(2 c_ij h_ij) Phi(-(c_ij t + h_ij) / sqrt t)
    max over i, j of P_ij(t) <= P(tau <= t) <= min(1, sum over i, j of P_ij(t))

Without drift P_ij = 2 (1 - Phi(h_ij / sqrt t)), the reflection principle, and h, the smallest h_ij, has the largest (Theorem
5.1 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts", whose upper bound is k (E - k)
times the lower one). Its appendix A.5 introduces the drift as that of an adversary and proves bounds without it; with it,
first passages are inverse Gaussian. A walk leaves its cell at a tie of two experts almost surely, order 1. Without drift
every walk leaves its cell; with a drift away from all ties some never do.

T tokens, E experts, k selected, R walks at the same time

How long a random walk stays near ties of each order.

A token moves as dX = D dB. Across the flat F_T of m + 1 experts it is a Brownian motion V in m dimensions that starts at the
distance delta of the token. The time that it spends within eps of the flat until t is on average

    integral from 0 to t of P(|V_s| <= eps) ds         D = sigma 1: |V_s|^2 / (sigma^2 s) is noncentral chi-square

For any other D, with Gamma = U^T D D^T U, U an orthonormal basis of the normals of the flat, only a bound is known:

    P(|V_s| <= eps) <= min(1, omega_m eps^m (2 pi s)^(-m/2) det(Gamma)^(-1/2) exp(-(delta - eps)_+^2 / (2 s lambda_max)))

Its integral is the constants times beta^(1-m/2) Gamma(m/2 - 1, beta/t), the upper incomplete gamma function, with
beta = (delta - eps)_+^2 / (2 lambda_max); for beta = 0 it is 2 sqrt(t) for m = 1 and infinite for m > 1, where t is the
bound. (Theorem 5.3 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".)

The sum over all T bounds the time near ties of order m, because these ties are pieces of the flats.

T tokens, N sets of experts
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.geometry.flats import MOST_ELEMENTS, Noise, affine_keys, gram, independent, project
from holdfast.geometry.ties import pair_distances, pair_spans, ranks_of
from holdfast.geometry.volumes import MOST_SETS, cosine_nodes, legendre_nodes, log_ball, sets_of
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
    lower: Tensor  # (T,n): the largest probability of a pair
    upper: Tensor  # (T,n): the sum over pairs
    coarse: Tensor  # (T,n): the upper bound of the paper


@torch.no_grad()
def hitting_bounds(
    order: Order,
    tokens: Tensor,
    k: int,
    times: Sequence[float] | Tensor,
    *,
    noise: Noise = None,
    drift: Tensor | None = None,
) -> HittingBounds:
    """Return bounds of P(tau <= t) for `tokens (..., d)` and each of `times (n,)`, or of each token's own `times (T,n)`.

    noise   D: a number, (d,) for a diagonal, or (d,d); None is 1. `noise=sigma, times=[t]` is the same as noise of standard
            deviation sigma sqrt(t) that is added little by little
    drift   mu: (d,), or one for each token in the shape of `tokens`; None is 0
    """
    keys = affine_keys(order, tokens, k)
    instants = torch.atleast_1d(torch.as_tensor(times, dtype=torch.float64, device=keys.points.device))
    if not (instants > 0).all():
        raise ValueError(f"times are {instants.tolist()}; expected positive numbers.")
    products = keys.products(noise)
    drifts = None if drift is None else drift_of_keys(order, tokens, drift, products)
    by_token, pairs, found = instants.expand(len(keys.points), -1), k * (keys.experts - k), []
    for rows, part in keys.parts():
        chosen = ranks_of(part.logits) < k
        across = chosen.unsqueeze(2) & ~chosen.unsqueeze(1)
        distances, towards = pair_distances(products, part.index, part.logits), None
        if drifts is not None:
            apart, spans = drifts[rows].unsqueeze(1) - drifts[rows].unsqueeze(2), pair_spans(products)[part.index]
            towards = (apart / spans).where(spans > 0, 0.0)[across].view(-1, pairs)
        distances = distances[across].view(-1, pairs)
        each = [meets_before(distances, time.unsqueeze(1), towards) for time in by_token[rows].t()]
        lower = torch.stack([_largest(chance, 0.0) for chance in each], 1)
        found.append((-_largest(-distances, -torch.inf), lower, torch.stack([chance.sum(1) for chance in each], 1)))
    nearest, lower, upper = (torch.cat(each) for each in zip(*found, strict=True))
    return HittingBounds(instants, nearest, lower, upper.clamp_max(1), (pairs * lower).clamp_max(1))


def _largest(values: Tensor, least: float) -> Tensor:
    """Return the largest value of each row of `values (T,n)`, and at least `least`; n may be 0."""
    return torch.nn.functional.pad(values, (0, 1), value=least).amax(1)


def meets_before(distances: Tensor, time: Tensor, towards: Tensor | None = None) -> Tensor:
    """Return the probability that a Brownian motion is at distance h at some time before t.

    towards     c: its drift in that direction; None is 0
    """
    if towards is None:
        return torch.special.erfc(distances / (2 * time).sqrt())
    root = time.sqrt()
    direct = torch.special.ndtr((towards * time - distances) / root)
    # exp(2 c h) alone overflows; its product with Phi is at most 1.
    reflected = (2 * towards * distances + torch.special.log_ndtr(-(towards * time + distances) / root)).exp()
    return (direct + reflected).where(distances.isfinite(), 0.0).clamp_max(1)


def drift_of_keys(order: Order, tokens: Tensor, drift: Tensor, products: Tensor) -> Tensor:
    """Return (T,E): what a drift `(d,)`, or of the shape of `tokens (..., d)`, adds to the keys per unit of time.

    Raise ValueError if it moves two keys against each other that the noise, with these `products (U,E,E)`, does not.
    """
    if not drift.isfinite().all() or tuple(drift.shape) not in (tuple(tokens.shape[-1:]), tuple(tokens.shape)):
        expected = f"({tokens.shape[-1]},) or the shape of the tokens, {tuple(tokens.shape)}"
        raise ValueError(f"the drift has shape {tuple(drift.shape)}; expected finite numbers: {expected}.")
    moved = affine_keys(order, drift.to(tokens.device).expand(tokens.shape))
    drifts = moved.logits - moved.bias
    spans = pair_spans(products)
    still = (spans == 0) & (pair_spans(moved.products()) > 0)
    if still.any():
        raise ValueError("a drift needs noise in every direction in which keys differ; give a D that is invertible.")
    return drifts


@final
@dataclass(frozen=True)
class Walks:
    """The exits of simulated walks. A walk that has not left its cell at the horizon has time infinity and order 0."""

    times: Tensor  # (T,walks) float64
    orders: Tensor  # (T,walks) int64: of the tie at the exit, after refining the step in which it happened

    def share_before(self, times: Tensor) -> Tensor:
        """Return (T,n): the share of a token's walks that have left their cell before each of `times (n,)`."""
        return (self.times.unsqueeze(2) <= times.to(self.times)).double().mean(1)


@torch.no_grad()
def simulate_walks(
    order: Order,
    tokens: Tensor,
    k: int,
    horizon: float | Tensor,
    *,
    noise: Noise = None,
    drift: Tensor | None = None,
    walks: int = 1,
    seed: int = 0,
) -> Walks:
    """Simulate `walks` walks of each of `tokens (..., d)` up to the time `horizon`, a number or (T,), or their exits.

    A walk moves in the space of keys, E dimensions. A step is short where a boundary is near. Between the two ends of a
    step, the difference of a pair is a Brownian bridge, which meets 0 with probability exp(-2 a b / (s^2 dt)), a and b the
    differences at the ends and s^2 the variance per unit of time; a drift changes the ends only. A step with an exit is
    halved until one pair meets in it. `noise` and `drift` are those of `hitting_bounds`.
    """
    keys = affine_keys(order, tokens, k)
    if walks < 1:
        raise ValueError(f"walks is {walks}; expected at least 1.")
    limit = torch.as_tensor(horizon, dtype=torch.float64).expand(len(keys.points))
    if not (limit > 0).all():
        raise ValueError("the horizon must be a positive time.")
    source = torch.Generator().manual_seed(seed)
    shape = (len(keys.points), walks)
    times, orders = torch.full(shape, torch.inf, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64)
    if k < keys.experts:
        products = keys.products(noise)
        drifts = torch.zeros_like(keys.logits) if drift is None else drift_of_keys(order, tokens, drift, products)
        rows = torch.arange(shape[0]).repeat_interleave(walks)
        step = max(1, MOST_ELEMENTS // (k * (keys.experts - k)))
        for group in range(len(products)):
            members = (keys.index[rows] == group).nonzero().squeeze(1)
            for part in members.split(step):
                start = rows[part]
                walking = _Walking(products[group], keys.logits[start], drifts[start], k, limit[start], source)
                times.view(-1)[part], orders.view(-1)[part] = walking.run()
    return Walks(times, orders)


@final
class _Walking:
    """Walks with the same products of weights. Keys are sorted: the first k columns are the selected experts."""

    def __init__(
        self, products: Tensor, logits: Tensor, drifts: Tensor, k: int, horizon: Tensor, source: torch.Generator
    ) -> None:
        self.k, self.horizon, self.source = k, horizon, source
        self.ranked = logits.argsort(dim=1, descending=True, stable=True)
        self.start, self.drifts = logits.gather(1, self.ranked), drifts.gather(1, self.ranked)
        own = products.diagonal()
        squared = (own.unsqueeze(1) + own.unsqueeze(0) - 2 * products).clamp_min(0)
        values, vectors = torch.linalg.eigh(products)
        self.root = vectors * values.clamp_min(0).sqrt()
        self.squared = squared[self.ranked[:, :k].unsqueeze(2), self.ranked[:, k:].unsqueeze(1)]  # (R,k,E-k)
        self.shortest = self.step(SHORTEST, self.start, torch.arange(len(logits)))

    def gaps(self, keys: Tensor) -> Tensor:
        return keys[:, : self.k].unsqueeze(2) - keys[:, self.k :].unsqueeze(1)

    def step(self, share: float, keys: Tensor, walks: Tensor) -> Tensor:
        """Return (n,): the time in which noise moves `walks (n,)` by a share of h, or drift by a share of its way."""
        gaps, towards = self.gaps(keys), -self.gaps(self.drifts[walks])
        reach = (gaps / self.squared[walks].sqrt()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        by_drift = (gaps / towards).where(towards > 0, torch.inf)
        return (share * reach.flatten(1).amin(1)).square().minimum(share * by_drift.flatten(1).amin(1))

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

    def run(self) -> tuple[Tensor, Tensor]:
        """Walk until every walk has left its cell or is at its horizon; return times and orders (R,)."""
        count = len(self.start)
        times, orders = torch.full((count,), torch.inf, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
        clock, keys = torch.zeros_like(times), self.start.clone()
        alive = (self.shortest < torch.inf).nonzero().squeeze(1)  # a walk without noise between its experts never flips
        exits: list[tuple[Tensor, ...]] = []
        while len(alive):
            squared, start = self.squared[alive], keys[alive]
            left = self.horizon[alive] - clock[alive]
            length = self.step(STEP, start, alive).maximum(self.shortest[alive]).minimum(left)
            end = start + length.unsqueeze(1) * self.drifts[alive] + length.sqrt().unsqueeze(1) * self.noise(alive)
            met = self.met(start, end, length, squared)
            out = met.flatten(1).any(1)
            exits.append((alive[out], start[out], end[out], clock[alive[out]], length[out], met[out]))
            keys[alive], clock[alive] = end, clock[alive] + length
            alive = alive[~out & (length < left)]
        if exits:
            walks, *step = (torch.cat(each) for each in zip(*exits, strict=True))
            times[walks], orders[walks] = self._refine(walks, *step)
        return times, orders

    def _refine(
        self, walks: Tensor, start: Tensor, end: Tensor, time: Tensor, length: Tensor, met: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Halve steps until one pair alone meets in them; return the times of the exits and the orders there.

        start, end      keys at both ends of a step, which are changed in place, as are its `time`, its `length` and `met`,
                        the pairs (R,k,E-k) that met in it
        """
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
        of_pairs = self.gaps(start), self.gaps(end), self.squared[walks]
        before, after, squared = (each.flatten(1).gather(1, pair).squeeze(1) for each in of_pairs)
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


TIME_NODES = 96
CHI_NODES = 40
FARTHEST = 8.0  # in standard deviations: before a walk has moved that far, a probability is 0 or 1
WIDEST = 8.5  # in standard deviations: beyond, the density of a component is negligible
ROWS = 2**10  # flats whose integrals are computed together


@final
@dataclass(frozen=True)
class OccupationTimes:
    """The mean time near ties of order m, for each token: the sum over all sets of m + 1 experts."""

    time: float  # until which it was measured
    times: Tensor  # (T,): exact for isotropic noise, an upper bound otherwise
    exact: bool  # whether the times near each flat are exact; their sum is an upper bound of the time near the ties
    sampled: bool  # only some of the sets were summed, and the sum scaled to all

    @property
    def share(self) -> Tensor:
        """The times (T,) per unit of time."""
        return self.times / self.time


def probability_within(m: int, delta: Tensor, eps: float, deviation: Tensor) -> Tensor:
    """Return P(|V| <= eps) for a Gaussian V in m dimensions with mean of length `delta` and standard deviation `deviation`.

    The component along the mean is integrated; the others are a central chi-square. Arguments broadcast.
    """
    low, high = (-eps - delta) / deviation, (eps - delta) / deviation
    if m == 1:
        return (torch.special.ndtr(high) - torch.special.ndtr(low)).clamp_min(0)
    along, step = cosine_nodes(low.clamp(-WIDEST, WIDEST), high.clamp(-WIDEST, WIDEST), CHI_NODES)
    delta, deviation = torch.broadcast_tensors(delta, deviation)
    rest = ((eps / deviation.unsqueeze(-1)).square() - (delta / deviation).unsqueeze(-1).add(along).square()).clamp_min(0)
    inside = torch.special.gammainc(torch.full_like(rest, (m - 1) / 2), rest / 2)
    return (step * inside * (-along.square() / 2).exp() / math.sqrt(2 * math.pi)).sum(-1).clamp(0, 1)


def occupation_time(m: int, delta: Tensor, eps: float, time: float, sigma: float = 1.0) -> Tensor:
    """Return (N,): the mean time until `time` within eps of flats at distances `delta (N,)`, for D = sigma 1."""
    _check(eps, time)
    delta = delta.double()
    if sigma == 0:
        return torch.where(delta <= eps, time, 0.0).double()
    # Before `first` the walk has not moved: it is within eps, or it is not. Some walks do not move far enough at all.
    first = ((delta - eps) / (FARTHEST * sigma)).square().clamp(1e-10 * time, time)
    found = torch.where(delta < eps, first, 0.0)
    moving = (first < time).nonzero().squeeze(1)
    nodes, weights = legendre_nodes(TIME_NODES)
    for rows in moving.split(ROWS):
        begin = first[rows].unsqueeze(1)
        length = (time / begin).log()
        instants = begin * (length * (nodes + 1) / 2).exp()
        within = probability_within(m, delta[rows].unsqueeze(1), eps, sigma * instants.sqrt())
        found[rows] += (within * instants * length / 2 * weights).sum(1)
    return found.clamp_max(time)


def occupation_bound(
    m: int, delta: Tensor, eps: float, time: float, log_det: Tensor | None = None, largest: Tensor | None = None
) -> Tensor:
    """Return (N,): an upper bound of the mean time within eps, for any D.

    log_det, largest    (N,): log det Gamma and the largest eigenvalue of Gamma; None: D = 1
    """
    _check(eps, time)
    delta = delta.double()
    log_det = torch.zeros_like(delta) if log_det is None else log_det
    largest = torch.ones_like(delta) if largest is None else largest
    log_constant = log_ball(m) + m * math.log(eps) - m / 2 * math.log(2 * math.pi) - log_det / 2
    beta = (delta - eps).clamp_min(0).square() / (2 * largest)
    ratio = beta / time
    if m == 1:
        # Gamma(-1/2, x) = 2 (exp(-x) / sqrt(x) - Gamma(1/2, x)), times sqrt(beta)
        root = ratio.sqrt()
        integral = 2 * math.sqrt(time) * ((-ratio).exp() - math.sqrt(math.pi) * root * torch.special.erfc(root))
    else:
        # The upper incomplete gamma function, not divided by Gamma(power)
        power = m / 2 - 1
        if power > 0:
            upper = torch.special.gammaincc(torch.full_like(ratio, power), ratio) * math.gamma(power)
        else:
            require_extra("the bound of occupation times of order 2", "scipy")
            from scipy.special import exp1

            upper = torch.from_numpy(np.asarray(exp1(ratio.numpy())))
        integral = upper * beta**-power
    return (log_constant.exp() * integral).nan_to_num(nan=time, posinf=time).clamp(0, time)


def _check(eps: float, time: float) -> None:
    if not 0 < eps < math.inf or not 0 < time < math.inf:
        raise ValueError(f"eps is {eps} and the time {time}; expected positive numbers.")


@torch.no_grad()
def occupation_times(
    order: Order, tokens: Tensor, k: int, m: int, eps: float, time: float, *, noise: Noise = None, bound: bool = False
) -> OccupationTimes:
    """Return the mean time that `tokens (..., d)` spend within eps of the flats of order m until `time`.

    noise   D of the diffusion: a number gives exact times near each flat, a matrix the bound
    bound   the bound for isotropic noise too
    """
    keys = affine_keys(order, tokens, k)
    isotropic = noise is None or isinstance(noise, float | int)
    exact = isotropic and not bound
    if k == keys.experts or not 1 <= m < keys.experts:
        return OccupationTimes(time, torch.zeros(len(keys.points), dtype=torch.float64), exact, sampled=False)
    members = sets_of(keys.experts, m + 1, MOST_SETS, torch.Generator().manual_seed(0))
    scale = math.comb(keys.experts, m + 1) / len(members)
    products, noisy = keys.products(), keys.products(noise)
    # Dependent differences: the flat is empty, or it is that of a smaller set.
    numbers = torch.arange(len(products)).unsqueeze(1)
    apart = [independent(gram(products, number.expand(len(members)), members)) for number in numbers]
    members = members[torch.stack(apart).all(0)]
    across = None
    if not exact:
        rows = numbers.expand(-1, len(members))
        across = [_noise_across(gram(products, row, members), gram(noisy, row, members)) for row in rows]
    found = []
    for logits, number in zip(keys.logits, keys.index, strict=True):
        delta = project(products, number.expand(len(members)), logits.expand(len(members), -1), members).distances
        if across is None:
            each = occupation_time(m, delta, eps, time, 1.0 if noise is None else float(noise))
        else:
            each = occupation_bound(m, delta, eps, time, *across[int(number)])
        found.append(each.sum() * scale)
    times = torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)
    return OccupationTimes(time, times, exact, sampled=scale > 1)


def _noise_across(plain: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
    """Return log det Gamma and the largest eigenvalue of Gamma (N,), from A A^T and A D D^T A^T (N,m,m)."""
    factor = torch.linalg.cholesky(plain)
    half = torch.linalg.solve_triangular(factor, noisy, upper=False)
    across = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    values = torch.linalg.eigvalsh(across).clamp_min(0)
    return values.log().sum(1), values[:, -1]
