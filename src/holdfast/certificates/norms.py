"""Lengths of perturbations, and how much a linear score can change under one.

|w . dx| <= dual(w) |dx|, with equality for the worst dx: the dual of l2 is l2, that of l_inf is the sum of magnitudes.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.suggest import unknown

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
