"""How much a dot product can change when a token is moved, and what rounding can do to it.

|w . dx| <= dual(w) |dx|, with equality for the worst dx: the dual of l2 is l2, that of l_inf is the sum of magnitudes
|computed - exact| <= gamma_n sum_q |x_q w_q|  for n terms in any order, gamma_n = n u / (1 - n u)  (Higham 2002, 3.1)
"""

import math
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from holdfast.errors import unknown

Norm = Literal["l2", "linf"]
NORMS: tuple[Norm, ...] = get_args(Norm)
ABOVE = 1 + 1e-9  # on every quotient and norm that must not be too small: float64 rounds too


def check_norm(norm: str) -> None:
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))


def lengths(rows: Tensor, norm: Norm) -> Tensor:
    """(...) of `rows (..., d)`."""
    return rows.norm(dim=-1) if norm == "l2" else rows.abs().amax(-1)


def dual(rows: Tensor, norm: Norm) -> Tensor:
    """(...): the most that `rows (..., d)` can change a score by, for each unit of a perturbation's length."""
    return rows.norm(dim=-1) if norm == "l2" else rows.abs().sum(-1)


def dual_scaled(rows: Tensor, scales: Tensor, norm: Norm) -> Tensor:
    """(U,n): dual(rows * scales) for `rows (n,d)` and positive `scales (U,d)`, without a tensor of all three sizes."""
    if norm == "l2":
        return (scales.square() @ rows.square().t()).sqrt()
    return scales @ rows.abs().t()


def spans(weight: Tensor, scales: Tensor, norm: Norm) -> Tensor:
    """(U,n,n): dual((w_i - w_j) * scales_u), from differences: of nearly equal experts a Gram matrix keeps nothing."""
    return torch.stack([dual_scaled(weight - row, scales, norm) for row in weight], dim=1)


def stretch(matrix: Tensor, norm: Norm) -> float:
    """The largest |M dx|_2 for |dx| = 1. Of l_inf it is hard to find: the least of three upper bounds."""
    spectral = float(torch.linalg.matrix_norm(matrix, ord=2))
    if norm == "l2":
        return spectral * ABOVE
    by_rows, by_columns = float(dual(matrix, norm).norm()), float(matrix.norm(dim=0).sum())
    return min(spectral * math.sqrt(matrix.shape[1]), by_rows, by_columns) * ABOVE


def unit(dtype: torch.dtype) -> float:
    """Return u, the largest relative error of rounding to the nearest number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, u: float) -> float:
    """Return n u / (1 - n u); infinity where n u >= 1, and nothing can be said."""
    return terms * u / (1 - terms * u) if terms * u < 1 else math.inf


def largest_in_sequence(values: Tensor, real: Tensor) -> Tensor:
    """(T,): the largest of `values (T,)`, none negative, among the real tokens (B,N) of each one's sequence."""
    table = values.view(real.shape).where(real, 0.0)
    return table.amax(1, keepdim=True).expand_as(table).reshape(-1)


@final
@dataclass(frozen=True)
class DotProductChange:
    """How far u_i.u_j / tau can change for any token j of i's sequence, u = R x: a bound for `Mixing.change`.

    At most (r |u_i| + r |u_j| + r^2) / tau in l2, for tokens moved by r and R = 1.
    """

    lengths: Tensor  # (T,) of u, in the dual norm
    longest: Tensor  # (T,) of u in the token's sequence
    sizes: Tensor  # (T,), of |R| |x|, for rounding; at least as long as u
    largest: Tensor  # (T,) of sizes in the token's sequence
    speed: float  # how far u moves for each unit of x
    width: float  # what r^2 is multiplied with
    terms: int  # of the sums that are rounded
    tau: float

    @classmethod
    def at(cls, rows: Tensor, real: Tensor, reduce: Tensor | None, tau: float, norm: Norm) -> "DotProductChange":
        """For tokens given as `rows (T,d)` in float64, `real (B,N)`, and R = `reduce (n,d)`; None is the identity."""
        width = rows.shape[1]
        if reduce is None:
            lengths = sizes = dual(rows, norm)
            speed, squared, terms = 1.0, 1.0 if norm == "l2" else float(width), width + 8
        else:
            lengths, sizes = (rows @ reduce.t()).norm(dim=-1), (rows.abs() @ reduce.abs().t()).norm(dim=-1)
            speed, squared, terms = stretch(reduce.abs(), norm), 1.0, 2 * width + len(reduce) + 8
        longest, largest = (largest_in_sequence(values, real) for values in (lengths, sizes))
        return cls(lengths, longest, sizes, largest, speed, squared, terms, tau)

    def __call__(self, radius: Tensor, rounded: bool) -> Tensor:
        far = radius * self.speed
        change = far * (self.lengths + self.longest) + self.width * far.square()
        if rounded:  # before and after
            growth = far * self.width
            error = gamma(self.terms, unit(torch.float32))
            change = change + 2 * error * (self.sizes + growth) * (self.largest + growth)
        return change / self.tau
