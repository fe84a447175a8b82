"""Nodes and weights of Gauss-Legendre integrals."""

from functools import cache

import numpy as np
import torch
from torch import Tensor


@cache
def legendre_nodes(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes in (-1, 1) and their weights, in float64. Callers share them: do not change them in place."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights)
