"""`thickening_share`: how much of a ball lies near ties of each order, for the router of a model.

The ties of order m are pieces of the flats F_T, T any m + 1 experts (Theorems 4.2, 4.4 and 4.7 of "Geometric and Stochastic
Analysis of Discontinuities in Sparse Mixture-of-Experts"). With the share s_T of the ball near F_T (`volumes`):

    bound       sum over T of s_T: the union is not larger
    exact       sum over T of rho_T s_T, rho_T the share of F_T on which the tie is at the threshold
    law         the same with the asymptotic s_T. It falls as (eps / R)^m: the ratio of two orders is
                law_m' / law_m = (omega_m' omega_{d-m'} sum rho) / (omega_m omega_{d-m} sum rho) (eps / R)^(m' - m)

The slice density rho_T is the probability that m - k <= -a <= -1, a the number of other experts above the tie, in a random
direction of F_T; it is estimated by random draws, and so is the sum over T where there are many sets. "exact" is exact for
routers without bias, up to overlaps of the neighbourhoods of two flats; with a bias, rho_T is that of large balls.

T tokens, E experts, M orders, n values of eps, N sets
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import final

import torch
from torch import Tensor

from holdfast.errors import require_extra, unknown_name
from holdfast.geometry.affine import AffineKeys, affine_keys
from holdfast.geometry.flats import Projection, gram, independent, keys_at, project
from holdfast.geometry.ties import check_k
from holdfast.geometry.volumes import FORMS, Form, log_law, log_share_spread, log_share_within
from holdfast.routing.declarations import Order

MOST_SETS = 2000  # of experts; beyond, the sum over all sets is estimated from as many random ones
MOST_FACTORS = 16  # distinct factors of AC; beyond, the most frequent ones
DRAWS = 256  # directions in each flat
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
    draws: int = DRAWS,
    most_sets: int = MOST_SETS,
    seed: int = 0,
) -> Thickening:
    """Return the share of a ball within `eps (n,)` of ties of each order: the law, the exact integrals and the bound.

    tokens      (..., d): they give the clusters of AC, over which shares are averaged, and the default radius
    radius      of the ball about 0; None: that of `ball_radius(tokens)`
    form        "euclidean": within eps of a tie, in the norm of tokens; "logit": the keys of the tie differ by at most eps
    """
    if form not in FORMS:
        raise ValueError(unknown_name("form", form, FORMS))
    keys = affine_keys(order, tokens)
    check_k(k, keys.experts)
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
    found = [
        [_of_order(keys, int(number), tokens.shape[-1], k, m, widths, size, form, draws, most_sets, seed) for m in orders]
        for number in frequent
    ]
    merged = []
    for place in range(3):
        stacked = torch.stack([torch.stack([one[place] for one in row], dim=1) for row in found])  # (U,n,M)
        merged.append((stacked + log_share.view(-1, 1, 1)).logsumexp(0))
    error = torch.stack([torch.stack([one[3] for one in row], dim=1) for row in found]).amax(0)
    density = torch.stack([torch.stack([one[4] for one in row]) for row in found]).mean(0)
    sampled = tuple(math.comb(keys.experts, m + 1) > most_sets for m in orders)
    law, exact, bound = merged
    return Thickening(widths, orders, size, form, law, exact, bound, error, density, sampled)


def _of_order(
    keys: AffineKeys,
    number: int,
    dim: int,
    k: int,
    m: int,
    eps: Tensor,
    radius: float,
    form: Form,
    draws: int,
    most_sets: int,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log law, log exact, log bound, relative error (n,) and the mean density, for the factors `number`."""
    nothing = torch.full_like(eps, -torch.inf)
    if k == keys.experts or m >= keys.experts or m > dim:
        return nothing, nothing, nothing, torch.zeros_like(eps), torch.zeros((), dtype=torch.float64)
    source = torch.Generator().manual_seed(seed)
    products, bias = keys.products_of(number).cpu(), keys.bias.cpu()
    members = sets_of(keys.experts, m + 1, most_sets, source)
    weight = math.log(math.comb(keys.experts, m + 1) / len(members))
    # Dependent differences: the flat is empty, or it is that of a smaller set.
    members = members[independent(gram(products.unsqueeze(0), torch.zeros(len(members), dtype=torch.int64), members))]
    if not len(members):
        return nothing, nothing, nothing, torch.zeros_like(eps), torch.zeros((), dtype=torch.float64)
    index = torch.zeros(len(members), dtype=torch.int64)
    matrices = gram(products.unsqueeze(0), index, members)
    hits = _draw_ties(products, members, range(max(0, k - m), k), draws, source)
    log_det = torch.linalg.slogdet(matrices).logabsdet
    offsets = bias[members[:, 1:]] - bias[members[:, :1]]
    delta = project(products.unsqueeze(0), index, bias.expand(len(members), -1), members).distances
    density = hits.double() / draws
    log_density = density.log()
    laws, exacts, bounds, errors = [], [], [], []
    for width in eps:
        if form == "euclidean":
            each = log_share_within(m, dim, delta, float(width), radius)
            law = log_law(m, dim, width, radius).expand(len(members))
        else:
            each = log_share_spread(m, dim, matrices, offsets, float(width), radius)
            law = log_law(m, dim, width, radius, log_det)
        laws.append((law + log_density).logsumexp(0) + weight)
        exacts.append((each + log_density).logsumexp(0) + weight)
        bounds.append(each.logsumexp(0) + weight)
        errors.append(_relative_error(each, density, draws, weight > 0))
    return torch.stack(laws), torch.stack(exacts), torch.stack(bounds), torch.stack(errors), density.mean()


def _relative_error(log_shares: Tensor, density: Tensor, draws: int, sampled: bool) -> Tensor:
    """Return the half-width of a 95% interval of sum rho_T s_T, relative to the sum."""
    shares = (log_shares - log_shares.amax()).exp()
    terms = shares * density
    of_draws = (shares.square() * density * (1 - density) / draws).sum()
    variance = terms.var() * len(terms) if sampled else of_draws
    return (CONFIDENCE * variance.sqrt() / terms.sum()).nan_to_num(nan=0.0)


def sets_of(experts: int, size: int, most: int, source: torch.Generator) -> Tensor:
    """Return (N,size): all sets of experts of this size, or `most` random ones if there are more."""
    if math.comb(experts, size) <= most:
        return torch.tensor(list(combinations(range(experts), size)), dtype=torch.int64).view(-1, size)
    return torch.rand(most, experts, generator=source).argsort(1)[:, :size].sort(1).values


def _draw_ties(products: Tensor, members: Tensor, above: Iterable[int], draws: int, source: torch.Generator) -> Tensor:
    """Return (N,): in how many of `draws` random directions of a flat the number of experts above the tie is in `above`."""
    values, vectors = torch.linalg.eigh(products)
    root = vectors * values.clamp_min(0).sqrt()
    wanted = torch.tensor(list(above), dtype=torch.int64)
    hits = []
    for part in members.split(max(1, ROWS // draws)):
        repeated = part.repeat_interleave(draws, dim=0)
        drawn = torch.randn(len(repeated), len(products), generator=source, dtype=torch.float64) @ root.t()
        index = torch.zeros(len(repeated), dtype=torch.int64)
        found: Projection = project(products.unsqueeze(0), index, drawn, repeated)
        at = keys_at(products.unsqueeze(0), index, drawn, repeated, found)
        level = at.gather(1, repeated).mean(1, keepdim=True)
        others = torch.ones_like(at, dtype=torch.bool).scatter(1, repeated, False)
        counts = ((at > level) & others).sum(1)
        hits.append(torch.isin(counts, wanted).view(-1, draws).sum(1))
    return torch.cat(hits)


@torch.no_grad()
def slice_densities(
    weight: Tensor, k: int, m: int, *, draws: int = 10_000, most_sets: int = MOST_SETS, smooth: bool = False, seed: int = 0
) -> SliceDensity:
    """Return the slice densities of the flats of `weight (E,d)` of order m, with intervals.

    smooth  count only ties with exactly k - 1 experts above: the others of the tie are then the extra experts of `smooth`
    """
    require_extra("the interval of a slice density", "scipy")
    from scipy.stats import beta

    check_k(k, len(weight))
    source = torch.Generator().manual_seed(seed)
    keys = affine_keys(Order(weight), torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    members = sets_of(len(weight), m + 1, most_sets, source)
    above = range(k - 1, k) if smooth else range(max(0, k - m), k)
    hits = _draw_ties(keys.products_of(0), members, above, draws, source)
    counts = hits.double().numpy()
    low = torch.from_numpy(beta.ppf(0.025, counts, draws - counts + 1)).nan_to_num(0.0)
    high = torch.from_numpy(beta.ppf(0.975, counts + 1, draws - counts)).nan_to_num(1.0)
    return SliceDensity(members, hits.double() / draws, low, high)


@torch.no_grad()
def extra_experts_law(
    weight: Tensor, k: int, eps: Tensor, radius: float, *, m: int = 1, draws: int = DRAWS, seed: int = 0
) -> Tensor:
    """Return (n,): the asymptotic share of a ball where `smooth` with the strip `eps (n,)` uses at least m extra experts.

        omega_{d-m} / (omega_d R^m) eps^m  sum over T of (m + 1) rho_T / sqrt(det A_T A_T^T)

    with rho_T the share of the flat with exactly k - 1 experts above.
    """
    check_k(k, len(weight))
    source = torch.Generator().manual_seed(seed)
    keys = affine_keys(Order(weight), torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    products, experts, dim = keys.products_of(0), keys.experts, weight.shape[1]
    members = sets_of(experts, m + 1, MOST_SETS, source)
    scale = math.comb(experts, m + 1) / len(members)
    members = members[independent(gram(products.unsqueeze(0), torch.zeros(len(members), dtype=torch.int64), members))]
    if not len(members):
        return torch.zeros_like(torch.as_tensor(eps, dtype=torch.float64).reshape(-1))
    density = _draw_ties(products, members, range(k - 1, k), draws, source).double() / draws
    log_det = torch.linalg.slogdet(
        gram(products.unsqueeze(0), torch.zeros(len(members), dtype=torch.int64), members)
    ).logabsdet
    widths = torch.as_tensor(eps, dtype=torch.float64).reshape(-1)
    laws = log_law(m, dim, widths.unsqueeze(1), radius, log_det.unsqueeze(0))
    return (laws + density.log()).logsumexp(1).exp() * scale
