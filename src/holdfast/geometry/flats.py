"""Project keys onto the flats on which some experts tie, without the tokens themselves.

    F_T = {x : the keys of all experts in T are equal}        A_T the differences of their weights, one row less than |T|

The projection moves x by -A_T^T mu, mu = (A_T A_T^T)^-1 A_T-differences of the keys. So the keys move by -W A_T^T mu: both
the distance, sqrt(differences . mu), and the keys of all other experts at the projection follow from W W^T.

N sets of s experts each, E experts, U matrices of products
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
    if bad.any():
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
