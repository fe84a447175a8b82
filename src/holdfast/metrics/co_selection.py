"""The co-selection graph: which experts are chosen together, and how well that connects them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import only_real
from holdfast.routing import Routing


@dataclass(frozen=True)
class CoSelectionGraph:
    counts: list[list[int]]  # E x E: tokens that chose both; on the diagonal, tokens that chose the expert
    spectral_gap: float  # 0: the experts fall into groups that never meet; 1: no structure at all


class CoSelection(Accumulator[CoSelectionGraph]):
    """C = Z^T Z with Z (T,E) the 0/1 matrix of the selected sets (Symphony, Algorithm 1), and the spectral gap 1 - lambda_2.

    lambda_2 is the second largest eigenvalue of the row-normalised counts D^-1 C, Symphony's graph, over the experts that
    were chosen at all. It is similar to D^-1/2 C D^-1/2, so its eigenvalues are real, and lie in [0, 1] because C is a
    product Z^T Z: lambda_2 is the rho of Symphony's Proposition 1. With one expert a token the graph is diagonal, the gap 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen.double()
        self._add(counts=chosen.t() @ chosen, tokens=chosen.shape[0])

    def result(self) -> CoSelectionGraph:
        self._per("tokens")
        counts = self._sums["counts"]
        return CoSelectionGraph([[int(count) for count in row] for row in counts.tolist()], spectral_gap(counts))


def spectral_gap(counts: Tensor) -> float:
    """1 - lambda_2 of D^-1 C, for a symmetric `counts (E,E)` whose unused rows are 0; 1 where fewer than two are used."""
    used = counts.diagonal() > 0
    counts = counts[used][:, used].double()
    if len(counts) < 2:
        return 1.0
    scale = counts.sum(1).rsqrt()
    second = float(torch.linalg.eigvalsh(scale.unsqueeze(1) * counts * scale)[-2])
    return min(1.0, max(0.0, 1 - second))
