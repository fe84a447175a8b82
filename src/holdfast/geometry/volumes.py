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

`thickening_share`: how much of a ball lies near ties of each order, for the router of a model.

The ties of order m are pieces of the flats F_T, T any m + 1 experts (Theorems 4.2, 4.4 and 4.7 of "Geometric and Stochastic
Analysis of Discontinuities in Sparse Mixture-of-Experts"). With the share s_T of the ball near F_T (`volumes`):

    bound       sum over T of s_T: the union is not larger
    exact       sum over T of rho_T s_T, rho_T the share of F_T on which the tie is at the threshold
    law         the same with the asymptotic s_T. It falls as (eps / R)^m: the ratio of two orders is
                law_m' / law_m = (omega_m' omega_{d-m'} sum rho) / (omega_m omega_{d-m} sum rho) (eps / R)^(m' - m)

The slice density rho_T is the probability that k - m <= a <= k - 1, a the number of other experts above the tie, in a random
direction of F_T; it is estimated by random draws, and so is the sum over T where there are many sets. "exact" is exact for
routers without bias, up to overlaps of the neighbourhoods of two flats; with a bias, rho_T is that of large balls.

T tokens, E experts, M orders, n values of eps, N sets
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import require_extra, unknown_name
from holdfast.geometry.flats import affine_keys, gram, independent, keys_at, project
from holdfast.routing.declarations import Order
from holdfast.routing.selection import check_k

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


def cosine_nodes(low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (N,count) each: nodes between `low (N,)` and `high (N,)`, and weights. A cosine removes roots at both ends."""
    nodes, weights = legendre_nodes(count)
    angle = math.pi / 2 * (nodes + 1)
    low, width = low.unsqueeze(-1), (high - low).unsqueeze(-1)
    return low + width * (1 - angle.cos()) / 2, width * math.pi / 4 * angle.sin() * weights


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
    rho, step = cosine_nodes(low, high, NODES)
    inside = (1 - (rho / radius).square()).clamp_min(0)
    log_density = torch.special.xlogy(m - 1, rho / radius) + (dim - m) / 2 * inside.log()
    log_beta = math.lgamma(m / 2) + math.lgamma((dim - m) / 2 + 1) - math.lgamma(dim / 2 + 1)
    log_density = log_density + math.log(2 / radius) - log_beta
    if cap is not None:
        delta, eps = cap
        log_density = log_density + _log_cap(m, rho, delta.unsqueeze(1), eps)
    terms = (log_density + step.log()).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    return terms.logsumexp(1).where(high > low, -torch.inf)


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


MOST_SETS = 2000  # of experts; beyond, the sum over all sets is estimated from as many random ones
MOST_FACTORS = 16  # distinct factors of AC; beyond, the most frequent ones
FEWEST_DRAWS = 64  # directions in each flat
MOST_DRAWS = 2**17  # directions in all flats of one order, if they are not given
ROWS = 2**15  # directions that are drawn together
CONFIDENCE = 1.959964  # of an interval of 95%


@final
@dataclass(frozen=True)
class Thickening:
    """Shares of a ball near ties, in natural logarithms, each (n,M); the properties without `log_` are the shares."""

    eps: Tensor  # (n,)
    orders: tuple[int, ...]
    radius: float  # of the ball
    form: Form
    log_law: Tensor
    log_exact: Tensor
    log_bound: Tensor
    error: Tensor  # (n,M): the half-width of a 95% interval of `exact` and `law`, relative: of draws and of sampled sets
    density: Tensor  # (M,): the mean slice density of the sets
    sampled: tuple[bool, ...]  # by order: whether only some of the sets were summed

    @property
    def law(self) -> Tensor:
        return self.log_law.exp()

    @property
    def exact(self) -> Tensor:
        return self.log_exact.exp()

    @property
    def bound(self) -> Tensor:
        return self.log_bound.exp()

    def ratio(self, higher: int, lower: int) -> Tensor:
        """Return (n,): the law of one order divided by that of another (Theorem 4.4)."""
        one, other = (self.orders.index(order) for order in (higher, lower))
        return (self.log_law[:, one] - self.log_law[:, other]).exp()


@final
@dataclass(frozen=True)
class SliceDensity:
    """The share of each flat on which its tie is at the threshold."""

    members: Tensor  # (N,m+1): the experts that tie
    density: Tensor  # (N,)
    low: Tensor  # (N,): the 95% interval of Clopper and Pearson
    high: Tensor


def ball_radius(tokens: Tensor) -> float:
    """Return the radius of the ball whose uniform points have the mean squared length of `tokens (..., d)`."""
    rows = tokens.detach().double().reshape(-1, tokens.shape[-1])
    width = rows.shape[1]
    return math.sqrt(float(rows.square().sum(1).mean()) * (width + 2) / width)


@torch.no_grad()
def thickening_share(
    order: Order,
    tokens: Tensor,
    k: int,
    eps: Sequence[float] | Tensor,
    *,
    orders: Sequence[int] = (1, 2, 3),
    radius: float | None = None,
    form: Form = "euclidean",
    draws: int | None = None,
    most_sets: int = MOST_SETS,
    seed: int = 0,
) -> Thickening:
    """Return the share of a ball within `eps (n,)` of ties of each order: the law, the exact integrals and the bound.

    tokens      (..., d): they give the clusters of AC, over which shares are averaged, and the default radius
    radius      of the ball about 0; None: that of `ball_radius(tokens)`
    draws       random directions in each flat; None: 131,072 in all flats of one order together, at least 64 in each
    form        "euclidean": within eps of a tie, in the norm of tokens; "logit": the keys of the tie differ by at most eps
    """
    if form not in FORMS:
        raise ValueError(unknown_name("form", form, FORMS))
    keys = affine_keys(order, tokens, k)
    widths = torch.as_tensor(eps, dtype=torch.float64).reshape(-1).cpu()
    size = ball_radius(tokens) if radius is None else float(radius)
    if not (widths > 0).all() or not 0 < size < math.inf:
        raise ValueError(f"eps is {widths.tolist()} and the radius {size}; expected positive numbers.")
    orders = tuple(orders)
    counts = torch.bincount(keys.index.cpu(), minlength=len(keys.factors))
    frequent = counts.argsort(descending=True)[:MOST_FACTORS]
    frequent = frequent[counts[frequent] > 0] if counts.any() else frequent[:1]
    share = counts[frequent].double().clamp_min(1e-300)
    log_share = (share / share.sum()).log()
    dim = tokens.shape[-1]
    found, densities = [], []
    for number in frequent.tolist():
        products = keys.products_of(number)
        flats = [_flats_of(products, keys.bias, k, m, draws=draws, most=most_sets, seed=seed) for m in orders]
        shares = (_shares(each, min(m, dim), dim, widths, size, form) for m, each in zip(orders, flats, strict=True))
        found.append([torch.stack(each, dim=1) for each in zip(*shares, strict=True)])
        densities.append(torch.stack([each.density.mean().nan_to_num(nan=0.0) for each in flats]))
    # (U,n,M) each: averaged over the distinct factors
    *logarithms, error = (torch.stack(each) for each in zip(*found, strict=True))
    law, exact, bound = ((each + log_share.view(-1, 1, 1)).logsumexp(0) for each in logarithms)
    density = torch.stack(densities).mean(0)
    sampled = tuple(math.comb(keys.experts, m + 1) > most_sets for m in orders)
    return Thickening(widths, orders, size, form, law, exact, bound, error.amax(0), density, sampled)


@final
@dataclass(frozen=True)
class _Flats:
    """The flats of some sets of m + 1 experts with independent differences of weights."""

    members: Tensor  # (N,m+1)
    matrices: Tensor  # (N,m,m): A_T A_T^T
    offsets: Tensor  # (N,m): the differences of the biases
    delta: Tensor  # (N,): distances from 0
    density: Tensor  # (N,): slice densities
    draws: int
    scale: float  # the number of all sets divided by that of the sets that were drawn

    @property
    def log_det(self) -> Tensor:
        return torch.linalg.slogdet(self.matrices).logabsdet


def _flats_of(
    products: Tensor, bias: Tensor, k: int, m: int, *, draws: int | None, most: int, seed: int, smooth: bool = False
) -> _Flats:
    """Return the flats of order m, with their slice densities; `smooth` as for `slice_densities`."""
    source, experts = torch.Generator().manual_seed(seed), len(products)
    members, scale = torch.zeros(0, m + 1, dtype=torch.int64), 1.0
    if k < experts and m < experts:
        members = sets_of(experts, m + 1, most, source)
        scale = math.comb(experts, m + 1) / len(members)
    index = torch.zeros(len(members), dtype=torch.int64)
    matrices = gram(products.unsqueeze(0), index, members)
    # Dependent differences: the flat is empty, or it is that of a smaller set.
    kept = independent(matrices)
    members, matrices, index = members[kept], matrices[kept], index[kept]
    offsets = bias[members[:, 1:]] - bias[members[:, :1]]
    delta = project(products.unsqueeze(0), index, bias.expand(len(members), -1), members).distances
    draws = max(FEWEST_DRAWS, MOST_DRAWS // max(1, len(members))) if draws is None else draws
    hits = _draw_ties(products, members, k, draws, source, smooth)
    return _Flats(members, matrices, offsets, delta, hits.double() / draws, draws, scale)


def _shares(flats: _Flats, m: int, dim: int, eps: Tensor, radius: float, form: Form) -> tuple[Tensor, ...]:
    """Return sums over the flats of one order: the logarithms of law, exact share and bound, and the relative error (n,)."""
    nothing = torch.full_like(eps, -torch.inf)
    if not len(flats.members):
        return nothing, nothing, nothing, torch.zeros_like(eps)
    log_density, weight = flats.density.log(), math.log(flats.scale)
    if form == "euclidean":
        laws = log_law(m, dim, eps, radius).unsqueeze(1)
        shares = torch.stack([log_share_within(m, dim, flats.delta, float(width), radius) for width in eps])
    else:
        laws = log_law(m, dim, eps.unsqueeze(1), radius, flats.log_det)
        shares = log_share_spread(m, dim, flats.matrices, flats.offsets, eps, radius)
    law, exact, bound = ((each + weight).logsumexp(1) for each in (laws + log_density, shares + log_density, shares))
    # The half-width of a 95% interval of sum rho_T s_T, relative to the sum
    relative, density = (shares - shares.amax(1, keepdim=True)).exp(), flats.density
    terms = relative * density
    of_draws = (relative.square() * density * (1 - density) / flats.draws).sum(1)
    variance = terms.var(1) * terms.shape[1] if flats.scale > 1 else of_draws
    error = (CONFIDENCE * variance.sqrt() / terms.sum(1)).nan_to_num(nan=0.0)
    return law, exact, bound, error


def sets_of(experts: int, size: int, most: int, source: torch.Generator) -> Tensor:
    """Return (N,size): all sets of experts of this size, or `most` random ones if there are more."""
    if math.comb(experts, size) <= most:
        return torch.tensor(list(combinations(range(experts), size)), dtype=torch.int64).view(-1, size)
    return torch.rand(most, experts, generator=source).argsort(1)[:, :size].sort(1).values


def _draw_ties(products: Tensor, members: Tensor, k: int, draws: int, source: torch.Generator, smooth: bool) -> Tensor:
    """Return (N,): in how many of `draws` random directions of a flat its tie is at the threshold."""
    values, vectors = torch.linalg.eigh(products)
    root = vectors * values.clamp_min(0).sqrt()
    fewest = k - 1 if smooth else k - members.shape[1] + 1  # experts above the tie; the most are k - 1
    hits = []
    for part in members.split(max(1, ROWS // draws)):
        repeated = part.repeat_interleave(draws, dim=0)
        drawn = torch.randn(len(repeated), len(products), generator=source, dtype=torch.float64) @ root.t()
        index = torch.zeros(len(repeated), dtype=torch.int64)
        found = project(products.unsqueeze(0), index, drawn, repeated)
        at = keys_at(products.unsqueeze(0), index, drawn, repeated, found)
        level = at.gather(1, repeated).mean(1, keepdim=True)
        others = torch.ones_like(at, dtype=torch.bool).scatter(1, repeated, False)
        above = ((at > level) & others).sum(1)
        hits.append(((above >= fewest) & (above < k)).view(-1, draws).sum(1))
    return torch.cat(hits)


@torch.no_grad()
def slice_densities(
    weight: Tensor, k: int, m: int, *, draws: int = 10_000, most_sets: int = MOST_SETS, smooth: bool = False, seed: int = 0
) -> SliceDensity:
    """Return the slice densities of the flats of `weight (E,d)` of order m, with intervals.

    smooth  count only ties with exactly k - 1 experts above: the others of the tie are then the extra experts of `smooth`
    """
    require_extra("the interval of a slice density", "scipy")
    from scipy.special import betaincinv

    source = torch.Generator().manual_seed(seed)
    keys = affine_keys(Order(weight), torch.zeros_like(weight[:1]), k)
    members = sets_of(len(weight), m + 1, most_sets, source)
    hits = _draw_ties(keys.products_of(0), members, k, draws, source, smooth)
    counts = hits.double().numpy()
    low = torch.from_numpy(betaincinv(counts, draws - counts + 1, 0.025)).nan_to_num(0.0)
    high = torch.from_numpy(betaincinv(counts + 1, draws - counts, 0.975)).nan_to_num(1.0)
    return SliceDensity(members, hits.double() / draws, low, high)


@torch.no_grad()
def extra_experts_law(
    weight: Tensor, k: int, eps: Tensor, radius: float, *, m: int = 1, draws: int | None = None, seed: int = 0
) -> Tensor:
    """Return (n,): the asymptotic share of a ball where `smooth` with the strip `eps (n,)` uses at least m extra experts.

        omega_{d-m} / (omega_d R^m) eps^m  sum over T of (m + 1) rho_T / sqrt(det A_T A_T^T)

    with rho_T the share of the flat with exactly k - 1 experts above.
    """
    keys = affine_keys(Order(weight), torch.zeros_like(weight[:1]), k)
    flats = _flats_of(keys.products_of(0), keys.bias, k, m, draws=draws, most=MOST_SETS, seed=seed, smooth=True)
    widths = torch.as_tensor(eps, dtype=torch.float64).reshape(-1)
    laws = log_law(m, weight.shape[1], widths.unsqueeze(1), radius, flats.log_det.unsqueeze(0))
    return (laws + flats.density.log()).logsumexp(1).exp() * flats.scale


@torch.no_grad()
def slice_density_bounds(weight: Tensor, k: int, members: Sequence[int]) -> tuple[float, float]:
    """Return bounds of the slice density of the flat of `members`, for `weight (E,d)` (Lemma A.16 of the paper).

    A slice has given experts above the tie and the others below. It contains a cap about a direction in which none of them
    ties, and it is contained in a half: I_{sin^2 theta}((n - 1) / 2, 1 / 2) / 2 <= share <= 1/2, theta the angle of the cap,
    n = d - m, I the regularised incomplete beta function. The density of the flat is the sum over its slices, and may
    exceed 1/2. The lower bound falls exponentially with the width: in hundreds of dimensions it says nothing.
    """
    require_extra("the bounds of a slice density", "scipy")
    from scipy.special import betainc

    check_k(k, len(weight))
    rows, m = weight.double(), len(members) - 1
    others = [expert for expert in range(len(rows)) if expert not in members]
    first = rows[members[0]]
    inside = torch.linalg.svd(rows[list(members[1:])] - first).Vh[m:]  # an orthonormal basis of the flat's directions
    forms = torch.nn.functional.normalize((rows[others] - first) @ inside.t(), dim=1)
    low, slices = 0.0, 0
    for count in range(max(0, k - m), min(k - 1, len(others)) + 1):
        for above in combinations(range(len(others)), count):
            signs = torch.full((len(others), 1), -1.0, dtype=torch.float64)
            signs[list(above)] = 1.0
            slices += 1
            direction = torch.linalg.pinv(signs * forms).sum(1)  # the same margin for all, 1 if there is such a direction
            margin = float((signs * forms @ direction).min()) if others else 0.0
            if margin > 0.5:
                squared = min(1.0, margin**2 / float(direction.square().sum()))
                low += float(betainc((len(inside) - 1) / 2, 0.5, squared)) / 2
    if not others:  # all experts tie, at the threshold
        return 1.0, 1.0
    return low, min(1.0, slices / 2)
