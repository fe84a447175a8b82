"""How long a random walk stays near ties of each order.

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
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.geometry.affine import Noise, affine_keys
from holdfast.geometry.flats import gram, independent, project
from holdfast.geometry.thickening import MOST_SETS, sets_of
from holdfast.geometry.ties import check_k
from holdfast.geometry.volumes import legendre_nodes, log_ball
from holdfast.routing.declarations import Order

TIME_NODES = 96
CHI_NODES = 40
FARTHEST = 8.0  # in standard deviations: before a walk has moved that far, a probability is 0 or 1
WIDEST = 8.5  # in standard deviations: beyond, the density of a component is negligible
ROWS = 2**10  # flats whose integrals are computed together


@final
@dataclass(frozen=True)
class OccupationTimes:
    """The mean time near ties of order m, for each token: the sum over all sets of m + 1 experts."""

    m: int
    eps: float
    time: float
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
    nodes, weights = legendre_nodes(CHI_NODES)
    low, high = (bound.clamp(-WIDEST, WIDEST).unsqueeze(-1) for bound in (low, high))
    angle = math.pi / 2 * (nodes + 1)
    along = low + (high - low) * (1 - angle.cos()) / 2
    step = (high - low) * math.pi / 4 * angle.sin() * weights
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
        integral = _incomplete_gamma(m / 2 - 1, ratio) * beta ** (1 - m / 2)
    return (log_constant.exp() * integral).nan_to_num(nan=time, posinf=time).clamp(0, time)


def _incomplete_gamma(power: float, ratio: Tensor) -> Tensor:
    """Return the upper incomplete gamma function, not divided by Gamma(power)."""
    if power > 0:
        return torch.special.gammaincc(torch.full_like(ratio, power), ratio) * math.gamma(power)
    require_extra("the bound of occupation times of order 2", "scipy")
    from scipy.special import exp1

    return torch.from_numpy(np.asarray(exp1(ratio.numpy())))


def _check(eps: float, time: float) -> None:
    if not 0 < eps < math.inf or not 0 < time < math.inf:
        raise ValueError(f"eps is {eps} and the time {time}; expected positive numbers.")


@torch.no_grad()
def occupation_times(
    order: Order,
    tokens: Tensor,
    k: int,
    m: int,
    eps: float,
    time: float,
    *,
    noise: Noise = None,
    bound: bool = False,
    most_sets: int = MOST_SETS,
    seed: int = 0,
) -> OccupationTimes:
    """Return the mean time that `tokens (..., d)` spend within eps of the flats of order m until `time`.

    noise   D of the diffusion: a number gives exact times near each flat, a matrix the bound
    bound   the bound for isotropic noise too
    """
    keys = affine_keys(order, tokens)
    check_k(k, keys.experts)
    isotropic = noise is None or isinstance(noise, float | int)
    exact = isotropic and not bound
    if k == keys.experts or not 1 <= m < keys.experts:
        return OccupationTimes(m, eps, time, torch.zeros(len(keys.points), dtype=torch.float64), exact, sampled=False)
    members = sets_of(keys.experts, m + 1, most_sets, torch.Generator().manual_seed(seed))
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
    return OccupationTimes(m, eps, time, times, exact, sampled=scale > 1)


def _noise_across(plain: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
    """Return log det Gamma and the largest eigenvalue of Gamma (N,), from A A^T and A D D^T A^T (N,m,m)."""
    factor = torch.linalg.cholesky(plain)
    half = torch.linalg.solve_triangular(factor, noisy, upper=False)
    across = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    values = torch.linalg.eigvalsh(across).clamp_min(0)
    return values.log().sum(1), values[:, -1]
