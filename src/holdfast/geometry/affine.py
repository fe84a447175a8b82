"""Keys that are affine in the token, from what a router declares; every router whose ties are not flats is refused.

`Score.order` declares keys l = (x * m) W^T + b that have the order of the logits. A tie of some experts is then a flat
(an affine subspace), and everything about flats follows from the keys of a token and from the products of the rows of
W * m. For cosine scores the keys are z.e, whose order is that of the cosines. For AC the factors m of a token's cluster are
fixed: a perturbation of the token does not change its cluster.

T tokens, E experts, d width of a token, U distinct factors m
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.planes import PlaneDistances
from holdfast.certificates.router_conditions import CertifiedRouter, Gate, describe_gate, describe_router
from holdfast.certificates.score_geometry import score_geometry
from holdfast.routing import Context, Router
from holdfast.routing.declarations import Conditions, NoCertificate, Order


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
        return AffineKeys(self.points[rows], self.weight, self.bias, self.factors, self.index[rows])


Noise = float | Tensor | None  # the matrix D of a diffusion: D = sigma 1, a diagonal (d,), or (d,d); None is 1


def times_noise(rows: Tensor, noise: Noise) -> Tensor:
    """Return `rows (n,d)` times D; raise ValueError if the shape of D is not that of a matrix on tokens."""
    if noise is None:
        return rows
    matrix = torch.as_tensor(noise, dtype=rows.dtype, device=rows.device)
    width = rows.shape[1]
    if tuple(matrix.shape) not in ((), (width,), (width, width)) or not matrix.isfinite().all():
        raise ValueError(
            f"the noise has shape {tuple(matrix.shape)}; expected finite numbers: one, ({width},) or ({width}, {width})."
        )
    return rows @ matrix if matrix.dim() == 2 else rows * matrix


def affine_keys(order: Order, tokens: Tensor) -> AffineKeys:
    """Return the keys that `order` declares, at `tokens (..., d)`, on the CPU: the work on sets of experts is done there."""
    if not tokens.isfinite().all():
        raise ValueError("the tokens contain NaN or infinite numbers; leave them out.")
    planes = score_geometry("the score", order, tokens.detach(), "l2").planes
    if planes.scales is None:
        factors = torch.ones_like(planes.weight[:1])
        index = torch.zeros(len(planes.points), dtype=torch.int64, device=planes.points.device)
    else:
        factors, index = planes.scales.distinct
    return AffineKeys(*(each.cpu() for each in (planes.points, planes.weight, planes.bias, factors, index)))


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
            declared = subject.score.declares.order
            order = None if declared is None else declared(tokens, context)
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
    k = _k_of(first.conditions)
    if k is None:
        raise NoCertificate(f"{described.declared_by} does not select the k largest logits")
    return k


def _k_of(conditions: Conditions) -> int | None:
    """Return k if the conditions are that each of k chosen experts is ahead of each other expert; else None."""
    counts = conditions.chosen.sum(1)
    k = int(counts[0])
    if k == 0 or bool((counts != k).any()) or conditions.way.any() or conditions.ahead.shape[-1] > 1:
        return None
    all_pairs = bool((conditions.valid.sum(1) == k * (conditions.experts - k)).all())
    with_threshold = ((conditions.ahead == conditions.experts) | (conditions.behind == conditions.experts)).squeeze(-1)
    return k if all_pairs and not (with_threshold & conditions.valid).any() else None
