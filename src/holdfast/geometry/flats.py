"""Keys that are affine in the token, from what a router declares; every router whose ties are not flats is refused.

`Score.order` declares keys l = (x * m) W^T + b that have the order of the logits. A tie of some experts is then a flat
(an affine subspace), and everything about flats follows from the keys of a token and from the products of the rows of
W * m. For cosine scores the keys are z.e, whose order is that of the cosines. For AC the factors m of a token's cluster are
fixed: a perturbation of the token does not change its cluster.

T tokens, E experts, d width of a token, U distinct factors m

Project keys onto the flats on which some experts tie, without the tokens themselves.

    F_T = {x : the keys of all experts in T are equal}        A_T the differences of their weights, one row less than |T|

The projection moves x by -A_T^T mu, mu = (A_T A_T^T)^-1 A_T-differences of the keys. So the keys move by -W A_T^T mu: both
the distance, sqrt(differences . mu), and the keys of all other experts at the projection follow from W W^T.

N sets of s experts each, E experts, U matrices of products
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.certificates.planes import PlaneDistances
from holdfast.certificates.router_conditions import CertifiedRouter, Gate, describe_gate, describe_router
from holdfast.certificates.score_geometry import score_geometry
from holdfast.routing import Context, Router
from holdfast.routing.declarations import NoCertificate, Order
from holdfast.routing.selection import check_k

MOST_ELEMENTS = 2**22  # of the largest tensor


class NoGeometry(ValueError):
    """The ties of a router are not flats, or not those of a top-k, so that the geometry of ties does not describe them."""


@final
@dataclass(frozen=True)
class AffineKeys:
    """Keys of some tokens, in float64. Token t has the keys weights(index[t]) x_t + bias."""

    points: Tensor  # (T,n): the tokens; with several blocks (modalities), each in the columns of its block
    weight: Tensor  # (E,n)
    bias: Tensor  # (E,)
    factors: Tensor  # (U,n): the distinct factors m of features; ones if the score scales nothing
    index: Tensor  # (T,): which factors a token has
    width: int  # d, the same as n with one block

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def logits(self) -> Tensor:
        """The keys (T,E). They have the order of the logits, and for linear scores they are the logits."""
        return (self.points * self.factors[self.index]) @ self.weight.t() + self.bias

    def weights(self, number: int) -> Tensor:
        """Return the weights (E,n) that tokens with the factors `number` are multiplied with."""
        return self.weight * self.factors[number]

    def products(self, noise: "Noise" = None) -> Tensor:
        """Return (U,E,E): the products of the rows of (W - mean) * m. They determine all distances between flats.

        noise   the matrix D of a diffusion dX = D dB: the rows are multiplied with D first, which gives the covariance of
                the keys, up to what is common to all experts. A number, (d,) for a diagonal D, (d,d), or None for 1
        """
        return torch.stack([self.products_of(number, noise) for number in range(len(self.factors))])

    def products_of(self, number: int, noise: "Noise" = None) -> Tensor:
        """Return (E,E): the same for the factors `number`."""
        rows = self.weights(number)
        # Only differences of rows matter. Without their mean, products of nearly equal rows lose no digits.
        rows = times_noise(rows - rows.mean(0), noise)
        return rows @ rows.t()

    def rows(self, rows: Tensor | slice) -> "AffineKeys":
        """Return the keys of some of the tokens."""
        return replace(self, points=self.points[rows], index=self.index[rows])

    def parts(self) -> Iterator[tuple[slice, "AffineKeys"]]:
        """Yield some tokens at a time, as rows, with their keys, so that a tensor (T,E,E) of them is not too large."""
        step = max(1, MOST_ELEMENTS // self.experts**2)
        for start in range(0, max(1, len(self.points)), step):
            rows = slice(start, start + step)
            yield rows, self.rows(rows)

    def order_of(self, number: int) -> Order:
        """Return the order of experts of tokens with the factors `number`, without factors: keys W x + b, W (E,d)."""
        blocks = self.weights(number).unflatten(1, (-1, self.width))
        return Order(blocks.sum(1), self.bias)  # of several blocks, all but one are 0

    def orders(self) -> Iterator[tuple[Tensor, Order]]:
        """Yield the tokens that share one order of experts, as rows, with that order."""
        for number in self.index.unique().tolist():
            yield (self.index == number).nonzero().flatten(), self.order_of(number)


Noise = float | Tensor | None  # the matrix D of a diffusion: D = sigma 1, a diagonal (d,), or (d,d); None is 1


def times_noise(rows: Tensor, noise: Noise) -> Tensor:
    """Return `rows (n,d)` times D; raise ValueError if the shape of D is not that of a matrix on tokens."""
    if noise is None:
        return rows
    matrix = torch.as_tensor(noise, dtype=rows.dtype, device=rows.device)
    shape, width = tuple(matrix.shape), rows.shape[1]
    if shape not in ((), (width,), (width, width)) or not matrix.isfinite().all():
        raise ValueError(f"the noise has shape {shape}; expected finite numbers: one, ({width},) or ({width}, {width}).")
    return rows @ matrix if matrix.dim() == 2 else rows * matrix


def affine_keys(order: Order, tokens: Tensor, k: int | None = None) -> AffineKeys:
    """Return the keys that `order` declares, at `tokens (..., d)`, on the CPU: the work on sets of experts is done there.

    Raise ValueError if so many experts cannot select `k`.
    """
    if not tokens.isfinite().all():
        raise ValueError("the tokens contain NaN or infinite numbers; leave them out.")
    with torch.no_grad():
        planes = score_geometry("the score", order, tokens, "l2").planes
    tensors = (planes.points, planes.weight, planes.bias, *planes.distinct_factors)
    points, weight, bias, factors, index = (each.cpu() for each in tensors)
    if k is not None:
        check_k(k, len(weight))
    return AffineKeys(points, weight, bias, factors, index, tokens.shape[-1])


@torch.no_grad()
def affine_order(subject: Router | Gate, tokens: Tensor, context: Context | None = None) -> tuple[Order, int]:
    """Return the order that a router declares at `tokens (B,N,d)` or `(T,d)`, and k; raise NoGeometry with the reason.

    subject   a Router in evaluation mode, or the weights and the rule of a native `Gate`
    """
    tokens = tokens if tokens.dim() == 3 else tokens.unsqueeze(0)
    context = context or Context()
    try:
        if isinstance(subject, Router):
            if subject.training:
                raise ValueError("the router is in training mode, where it updates state; call eval() first.")
            described = describe_router(subject, tokens, context, "l2")
            order = subject.order(tokens, context)
        else:
            described = describe_gate(subject, tokens, "l2")
            order = Order(subject.weight, subject.bias)
        k = _selected(described)
    except NoCertificate as reason:
        raise NoGeometry(f"the geometry of its ties is not known: {reason}.") from None
    if order is None:
        raise NoGeometry("the geometry of its ties is not known: it selects without reading the token.")
    return order, k


def _selected(described: CertifiedRouter) -> int:
    """Return k of a router that selects the k largest keys; raise NoCertificate for every other."""
    first = next((problem for _, problem in described.problems()), None)
    if first is None:
        raise NoCertificate("there are no tokens")
    if not isinstance(first, PlaneDistances):
        raise NoCertificate(f"{described.declared_by} compares informed or nonlinear gates, whose ties are not flats")
    # Top-k: each of k chosen experts is ahead of each other expert, and none of a threshold.
    conditions, counts = first.conditions, first.conditions.chosen.sum(1)
    k, experts = int(counts[0]), conditions.experts
    is_top_k = k > 0 and bool((counts == k).all()) and conditions.way is None and conditions.ahead.shape[-1] == 1
    if is_top_k:
        with_threshold = ((conditions.ahead == experts) | (conditions.behind == experts)).squeeze(-1) & conditions.valid
        is_top_k = bool((conditions.valid.sum(1) == k * (experts - k)).all()) and not with_threshold.any()
    if not is_top_k:
        raise NoCertificate(f"{described.declared_by} does not select the k largest logits")
    return k


DEPENDENT = 1e-10  # an eigenvalue this small, relative to the largest, is 0: the differences of the weights are dependent
INCONSISTENT = 1e-7  # a larger residual, relative to the differences of keys, means that the flat is empty


class Projection(NamedTuple):
    """The projection of some tokens onto flats."""

    distances: Tensor  # (N,); infinite if the flat is empty
    multipliers: Tensor  # (N,s): the token moves by the sum of these times the weights of the set's experts; they sum to 0


def gram(products: Tensor, index: Tensor, members: Tensor) -> Tensor:
    """Return A_T A_T^T (N,s-1,s-1) for the sets `members (N,s)`, with the products `index (N,)` of `products (U,E,E)`."""
    among = products[index.view(-1, 1, 1), members.unsqueeze(2), members.unsqueeze(1)]
    return among[:, 1:, 1:] - among[:, 1:, :1] - among[:, :1, 1:] + among[:, :1, :1]


def independent(matrix: Tensor) -> Tensor:
    """Return (N,) bool: where the differences of the weights are independent, for `matrix (N,m,m)` = A_T A_T^T."""
    values = torch.linalg.eigvalsh(matrix)
    return values[:, 0] > DEPENDENT * values[:, -1]


def project(products: Tensor, index: Tensor, logits: Tensor, members: Tensor) -> Projection:
    """Project tokens with the keys `logits (N,E)` onto the flats of the sets `members (N,s)`, s >= 2."""
    values = logits.gather(1, members)
    differences = values[:, 1:] - values[:, :1]
    matrix = gram(products, index, members)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots, sizes = factor.diagonal(dim1=1, dim2=2).square(), matrix.diagonal(dim1=1, dim2=2).amax(1)
    bad = (failed > 0) | ~(pivots.amin(1) > DEPENDENT * sizes)
    factor = torch.where(bad.view(-1, 1, 1), torch.eye(factor.shape[1], dtype=factor.dtype), factor)
    mu = torch.cholesky_solve(differences.unsqueeze(2), factor).squeeze(2)
    empty = torch.zeros_like(bad)
    if bad.any():
        mu[bad], empty[bad] = _solve_dependent(matrix[bad], differences[bad], values[bad].abs().amax(1))
    squared = (differences * mu).sum(1).clamp_min(0)
    multipliers = torch.cat([mu.sum(1, keepdim=True), -mu], dim=1)
    return Projection(squared.sqrt().where(~empty, torch.inf), multipliers)


def _solve_dependent(matrix: Tensor, differences: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shortest solution of matrix mu = differences, and where there is none."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > DEPENDENT * values.amax(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    inverse = torch.where(kept, 1 / values, 0.0)
    mu = (vectors @ (inverse.unsqueeze(2) * (vectors.mT @ differences.unsqueeze(2)))).squeeze(2)
    residual = (matrix @ mu.unsqueeze(2)).squeeze(2) - differences
    return mu, residual.abs().amax(1) > INCONSISTENT * scale.maximum(differences.abs().amax(1))


def keys_at(products: Tensor, index: Tensor, logits: Tensor, members: Tensor, found: Projection) -> Tensor:
    """Return the keys (N,E) at the projections, up to a number that is the same for all experts of a token."""
    if len(products) == 1:
        spread = torch.zeros_like(logits).scatter(1, members, found.multipliers)
        return logits + spread @ products[0]
    return logits + (found.multipliers.unsqueeze(1) @ products[index.unsqueeze(1), members]).squeeze(1)


def at_threshold(keys: Tensor, members: Tensor, k: int, scale: Tensor) -> Tensor:
    """Return (N,) bool: at keys (N,E) where `members (N,s)` tie, whether the tie is between the k-th and (k+1)-th key.

    Others above the tie: fewer than k; others above or in it, and the members: more than k. `scale (N,)` is the size of the
    keys: others that are as close as rounding belong to the tie.
    """
    level = keys.gather(1, members).mean(1, keepdim=True)
    slack = 1e-9 * scale.unsqueeze(1)
    others = torch.ones_like(keys, dtype=torch.bool).scatter(1, members, False)
    above = ((keys > level + slack) & others).sum(1)
    not_below = ((keys >= level - slack) & others).sum(1) + members.shape[1]
    return (above < k) & (not_below > k)
