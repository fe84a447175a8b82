"""The share of a ball that lies near a flat, exactly and for large balls, in logarithms, so that no width overflows.

F is a flat of codimension m at distance delta from the centre of a ball of radius R in d dimensions. A uniform point of the
ball has a component V of m dimensions across the flat, with the density

    omega_{d-m} / (omega_d R^m) (1 - |v|^2 / R^2)^((d-m)/2)         omega_n the volume of the unit ball in n dimensions

so that |V| has the density f(rho) = 2 rho^(m-1) (1 - rho^2/R^2)^((d-m)/2) / (R^m B(m/2, (d-m)/2 + 1)). Two neighbourhoods:

    euclidean   within eps of the flat: the integral over rho of f(rho) cap_m(c), with c = (rho^2 + delta^2 - eps^2)
                / (2 rho delta) and cap_m(c) the share of a sphere in m dimensions whose cosine with one direction is >= c
    logit       the keys of the m + 1 experts that tie on the flat differ by at most eps: a polytope of volume
                (m + 1) eps^m in their m differences, the union of m + 1 cubes, one for each expert with the smallest key

As R grows, both tend to omega_{d-m} / (omega_d R^m) times the volume across the flat:

    euclidean   omega_m eps^m                logit       (m + 1) eps^m / sqrt(det A A^T), A the differences of the weights

which needs R^2 much larger than d (delta + eps)^2. Tokens of a model have R^2 of about d: use the exact integrals there.

N flats
"""

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import require_extra

Form = Literal["euclidean", "logit"]
FORMS: tuple[Form, ...] = ("euclidean", "logit")
NODES = 160  # of an integral over rho
CUBE_NODES = {1: 16, 2: 10, 3: 6}  # of an integral over each side of a cube, by its dimension; 4 beyond
NEGLIGIBLE = 60.0  # exp(-this) of the largest value is left out of an integral


@cache
def legendre_nodes(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes in (-1, 1) and their weights, in float64. Callers share them: do not change them in place."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def log_ball(dim: int) -> float:
    """Return the logarithm of omega_n, the volume of the unit ball in n dimensions."""
    return dim / 2 * math.log(math.pi) - math.lgamma(dim / 2 + 1)


def log_law(m: int, dim: int, eps: Tensor, radius: float, log_det: Tensor | None = None) -> Tensor:
    """Return the logarithm of the asymptotic share of a ball near one flat.

    log_det     (N,): log det A A^T gives the logit form; None: the Euclidean form. `eps` is a tensor that broadcasts with it
    """
    common = log_ball(dim - m) - log_ball(dim) + m * (torch.as_tensor(eps, dtype=torch.float64).log() - math.log(radius))
    return common + (log_ball(m) if log_det is None else math.log(m + 1) - log_det / 2)


def log_share_within(m: int, dim: int, delta: Tensor, eps: float, radius: float) -> Tensor:
    """Return (N,): the logarithm of the share of a ball within eps of flats at distances `delta (N,)`, exactly."""
    check_dimensions(m, dim)
    delta, index = delta.double().unique(return_inverse=True)  # without a bias, all flats contain 0
    whole = _log_integral(m, dim, radius, torch.zeros_like(delta), (eps - delta).clamp(0, radius), None)
    shell = _log_integral(m, dim, radius, (delta - eps).abs(), (delta + eps).clamp_max(radius), (delta, eps))
    return torch.logaddexp(whole.where(delta < eps, -torch.inf), shell).clamp_max(0.0)[index]


def check_dimensions(m: int, dim: int) -> None:
    if not 1 <= m <= dim:
        raise ValueError(f"the codimension is {m}; expected 1 to the width of a token, {dim}.")


def _log_integral(m: int, dim: int, radius: float, low: Tensor, high: Tensor, cap: tuple[Tensor, float] | None) -> Tensor:
    """Return (N,): log of the integral of f(rho) cap_m from `low` to `high`; `cap` is (delta, eps), None is cap_m = 1."""
    peak = radius * math.sqrt((m - 1) / max(1, dim - 1))
    base = low.maximum(torch.full_like(low, peak)).minimum(high)
    # Beyond `far`, f is negligible: the nodes are placed where the integrand is not.
    rest = (1 - (base / radius).square()).clamp_min(0) * math.exp(-2 * (NEGLIGIBLE + m) / max(1, dim - m))
    far = radius * (1 - rest).clamp_min(0).sqrt()
    high = high.minimum(far)
    nodes, weights = legendre_nodes(NODES)
    angle = math.pi / 2 * (nodes + 1)  # a cosine removes the square roots at both ends
    width = (high - low).unsqueeze(1)
    rho = low.unsqueeze(1) + width * (1 - angle.cos()) / 2
    step = width * math.pi / 4 * angle.sin() * weights
    inside = (1 - (rho / radius).square()).clamp_min(0)
    log_density = (m - 1) * (rho / radius).log() + (dim - m) / 2 * inside.log()
    if m == 1:
        log_density = (dim - m) / 2 * inside.log()
    log_beta = math.lgamma(m / 2) + math.lgamma((dim - m) / 2 + 1) - math.lgamma(dim / 2 + 1)
    log_density = log_density + math.log(2 / radius) - log_beta
    if cap is not None:
        delta, eps = cap
        log_density = log_density + _log_cap(m, rho, delta.unsqueeze(1), eps)
    return (
        (log_density + step.log()).nan_to_num(nan=-torch.inf, posinf=-torch.inf).logsumexp(1).where(high > low, -torch.inf)
    )


def _log_cap(m: int, rho: Tensor, delta: Tensor, eps: float) -> Tensor:
    """Return the logarithm of cap_m at c = (rho^2 + delta^2 - eps^2) / (2 rho delta), for -1 < c < 1."""
    if m == 1:
        return torch.full_like(rho, math.log(0.5))
    # 1 - c without cancellation: it is small where the integrand of a distant flat is largest.
    beyond = ((eps**2 - (rho - delta).square()) / (2 * rho * delta)).clamp(0, 2)
    if m == 2:
        return (2 / math.pi * (beyond / 2).sqrt().asin()).log()
    if m == 3:
        return (beyond / 2).log()
    require_extra("the volume near ties of more than four experts", "scipy")
    from scipy.special import betainc

    half = torch.from_numpy(betainc((m - 1) / 2, 0.5, (beyond * (2 - beyond)).clamp(0, 1).numpy())) / 2
    return half.where(beyond <= 1, 1 - half).log()


def log_share_spread(m: int, dim: int, gram: Tensor, offsets: Tensor, eps: Tensor, radius: float) -> Tensor:
    """Return (n,N): the logarithm of the share of a ball where the keys of m + 1 experts differ by at most `eps (n,)`.

    gram        (N,m,m): A A^T, A the differences of the weights to those of the first expert
    offsets     (N,m): the same differences of the biases
    """
    check_dimensions(m, dim)
    nodes, weights = legendre_nodes(CUBE_NODES.get(m, 4))
    cube = torch.cartesian_prod(*[(nodes + 1) / 2] * m).view(-1, m)
    log_weights = torch.cartesian_prod(*[(weights / 2).log()] * m).view(-1, m).sum(1).repeat(m + 1) - math.log(m + 1)
    pieces = []
    for smallest in range(m + 1):
        keys = torch.cat([cube[:, :smallest], torch.zeros_like(cube[:, :1]), cube[:, smallest:]], dim=1)
        pieces.append(keys[:, 1:] - keys[:, :1])
    factor = torch.linalg.cholesky(gram)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    # A point at the differences eps c is across the flat by factor^-1 (eps c - offset).
    points = torch.linalg.solve_triangular(factor, torch.cat(pieces).t().expand(len(gram), -1, -1), upper=False) / radius
    start = torch.linalg.solve_triangular(factor, offsets.unsqueeze(2), upper=False) / radius
    squared, crossed, fixed = points.square().sum(1), (points * start).sum(1), start.square().sum(1)
    shares = []
    for width in eps.double():
        inside = (1 - (width.square() * squared - 2 * width * crossed + fixed)).clamp_min(0)
        log_values = ((dim - m) / 2 * inside.log()).nan_to_num(nan=-torch.inf)  # outside the ball, where dim = m
        shares.append(log_law(m, dim, width, radius, log_det) + (log_values + log_weights).logsumexp(1))
    return torch.stack(shares)
