"""Bounds for the change of a dot product when a token is perturbed, and for its rounding error.

|w . dx| <= dual(w) |dx|, with equality for the worst dx; the dual norm of l2 is l2, that of l_inf is l_1
|computed - exact| <= gamma_n sum_q |x_q w_q| for n terms in any order, gamma_n = n u / (1 - n u)  (Higham 2002, 3.1)
"""

import math
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from holdfast.errors import require_known

Norm = Literal["l2", "linf"]
NORMS: tuple[Norm, ...] = get_args(Norm)
TINY = torch.finfo(torch.float64).tiny
SQUARINGS = 40  # of a matrix: smaller eigenvalues count for less than 10^-12 of the largest
ABOVE = 1 + 1e-9  # a factor for every upper bound: float64 rounds too


def check_norm(norm: str) -> None:
    require_known("norm", norm, NORMS)


def lengths(rows: Tensor, norm: Norm) -> Tensor:
    """Return (...): the norms of `rows (..., d)`."""
    return rows.norm(dim=-1) if norm == "l2" else rows.abs().amax(-1)


def dual(rows: Tensor, norm: Norm) -> Tensor:
    """Return (...): the dual norms of `rows (..., d)`, the largest change of a score for a perturbation of length 1."""
    return rows.norm(dim=-1) if norm == "l2" else rows.abs().sum(-1)


def dual_scaled(rows: Tensor, scales: Tensor, norm: Norm) -> Tensor:
    """Return (U,n): dual(rows * scales) for `rows (n,d)` and positive `scales (U,d)`, without a tensor (U,n,d)."""
    if norm == "l2":
        return safe_sqrt(scales.square() @ rows.square().t())
    return scales @ rows.abs().t()


def spans(weight: Tensor, scales: Tensor, norm: Norm) -> Tensor:
    """Return (U,n,n): dual((w_i - w_j) * scales_u). Differences, because a Gram matrix cancels for nearly equal experts."""
    return torch.stack([dual_scaled(weight - row, scales, norm) for row in weight], dim=1)


def safe_sqrt(values: Tensor) -> Tensor:
    """Return the square root, with the gradient 0 instead of infinity at 0."""
    positive = values > 0
    return values.where(positive, 1.0).sqrt().where(positive, 0.0)


def spectral_norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value (...) of `matrix (...,n,m)`, without a decomposition, for which a GPU waits.

    With G = M M^T, G^(2^40) over its trace is the projection P onto the eigenvectors of the largest eigenvalue tr(P G). The
    gradient through P is 0, because P maximises the trace.
    """
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    with torch.no_grad():
        power = gram
        for _ in range(SQUARINGS):
            power = power / power.flatten(-2).norm(dim=-1)[..., None, None].clamp_min(TINY)
            power = power @ power
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(TINY)
    return safe_sqrt((power / trace * gram).sum((-2, -1)))


def stretch(matrix: Tensor, norm: Norm) -> Tensor:
    """Return an upper bound of |M dx|_2 for |dx| = 1: the operator norm, or for l_inf the least of three upper bounds.

    The matrix may have leading dimensions (...), which the result has too.
    """
    spectral = spectral_norm(matrix)
    if norm == "l2":
        return spectral * ABOVE
    by_rows, by_columns = dual(matrix, norm).norm(dim=-1), matrix.norm(dim=-2).sum(-1)
    return (spectral * math.sqrt(matrix.shape[-1])).minimum(by_rows).minimum(by_columns) * ABOVE


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff u: the largest relative error of rounding to the nearest number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, u: float) -> float:
    """Return n u / (1 - n u); infinity if n u >= 1, where there is no bound."""
    return terms * u / (1 - terms * u) if terms * u < 1 else math.inf


def largest_in_sequence(values: Tensor, real: Tensor) -> Tensor:
    """Return (T,): the largest of `values (T,)`, which are not negative, among the real tokens of the same sequence."""
    table = values.view(real.shape).where(real, 0.0)
    return table.amax(1, keepdim=True).expand_as(table).reshape(-1)


@final
@dataclass(frozen=True)
class DotProductChange:
    """A bound for `Mixing.change`: how much u_i.v_j / tau can change for any token j of the sequence of i.

    u = R x and v = Q x; Q is R in a symmetric comparison, and both are the identity without a rank. In l2, for tokens
    perturbed by up to r and R = Q = 1, the bound is (r |u_i| + r |u_j| + r^2) / tau.
    """

    lengths: Tensor  # (T,) dual norm of u
    longest: Tensor  # (T,) largest dual norm of v in the sequence
    sizes: Tensor  # (T,) norm of |R| |x|, at least that of u, for rounding
    largest: Tensor  # (T,) largest norm of |Q| |x| in the sequence
    query_speed: Tensor  # largest change of u for a change of x by 1
    key_speed: Tensor  # largest change of v
    width: float  # the factor of r^2
    terms: int  # number of terms of the rounded sums
    tau: float

    @classmethod
    def at(
        cls, rows: Tensor, real: Tensor, reduce: Tensor | None, tau: float, norm: Norm, reduce_keys: Tensor | None = None
    ) -> "DotProductChange":
        """Return the bound for tokens `rows (T,d)` in float64, `real (B,N)`, R = `reduce (n,d)` and Q = `reduce_keys`.

        R = None is the identity, Q = None is R.
        """
        width = rows.shape[1]
        if reduce is None:
            of_query = of_key = (dual(rows, norm), dual(rows, norm), rows.new_ones(()))
            squared, terms = 1.0 if norm == "l2" else float(width), width + 8
        else:
            of_query, of_key = (
                ((rows @ matrix.t()).norm(dim=-1), (rows.abs() @ matrix.abs().t()).norm(dim=-1), stretch(matrix.abs(), norm))
                for matrix in (reduce, reduce if reduce_keys is None else reduce_keys)
            )
            squared, terms = 1.0, 2 * width + len(reduce) + 8
        longest, largest = (largest_in_sequence(values, real) for values in of_key[:2])
        return cls(of_query[0], longest, of_query[1], largest, of_query[2], of_key[2], squared, terms, tau)

    def __call__(self, radius: Tensor, rounded: bool) -> Tensor:
        far, key_far = radius * self.query_speed, radius * self.key_speed
        change = far * self.longest + key_far * self.lengths + self.width * far * key_far
        if rounded:  # both dot products, before and after the perturbation, are rounded
            error = gamma(self.terms, unit(torch.float32))
            change = change + 2 * error * (self.sizes + far * self.width) * (self.largest + key_far * self.width)
        return change / self.tau
