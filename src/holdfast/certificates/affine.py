"""Logits that are affine in a token, in float64, and how fast they can change.

l = (x * m) W^T + b, with m the scales of the token's features (AC), 1 elsewhere; T tokens, E experts, width n. The index E
is nobody: an expert with weight 0 and bias 0, which stands for a threshold.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from holdfast.routing.bounds import Norm, dual, dual_scaled, spans, stretch

HELD = 2**22  # elements of a table that is worth keeping for all tokens: 32 MiB


@dataclass(frozen=True)
class Scales:
    """m of each token: mixture (T,C) times table (C,n), and 1 for a token whose mixture is 0."""

    mixture: Tensor
    table: Tensor

    @cached_property
    def kinds(self) -> tuple[Tensor, Tensor]:
        """The different m there are (U,n), and which is whose (T,): tokens of one cluster share theirs."""
        mixtures, index = self.mixture.unique(dim=0, return_inverse=True)
        return self._factors(mixtures), index

    def _factors(self, mixture: Tensor) -> Tensor:
        return mixture @ self.table + (1 - mixture.sum(1, keepdim=True))

    def rows(self, rows: slice) -> "Scales":
        return replace(self, mixture=self.mixture[rows])

    def stretches(self, matrix: Tensor, norm: Norm) -> Tensor:
        """(T,): at least the stretch of matrix * m; equal to it where m is that of one cluster, by convexity elsewhere."""
        used = self.mixture.any(0)
        each = torch.zeros_like(self.table[:, 0])
        for cluster in used.nonzero().flatten().tolist():
            each[cluster] = stretch(matrix * self.table[cluster], norm)
        plain = 1 - self.mixture.sum(1)
        return self.mixture @ each + (plain * stretch(matrix, norm) if plain.any() else 0)


@dataclass(frozen=True)
class Affine:
    points: Tensor  # (T,n)
    weight: Tensor  # (E,n)
    bias: Tensor  # (E,)
    norm: Norm  # of perturbations of the points
    scales: Scales | None = None
    held: Tensor | None = None  # the spans of all kinds, where few

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def _kinds(self) -> tuple[Tensor, Tensor]:
        if self.scales is None:
            return torch.ones_like(self.weight[:1]), torch.zeros(
                len(self.points), dtype=torch.int64, device=self.points.device
            )
        return self.scales.kinds

    @cached_property
    def factors(self) -> Tensor | float:
        """m (T,n), or 1."""
        return 1.0 if self.scales is None else self._kinds[0][self._kinds[1]]

    @cached_property
    def logits(self) -> Tensor:
        """(T,E)"""
        return (self.points * self.factors) @ self.weight.t() + self.bias

    @cached_property
    def spans(self) -> Tensor:
        """(U,E+1,E+1): how fast l_i - l_j can change, for each kind of token."""
        if self.held is not None:
            return self.held
        with_nobody = torch.cat([self.weight, torch.zeros_like(self.weight[:1])])
        return spans(with_nobody, self._kinds[0], self.norm)

    @property
    def kind(self) -> Tensor:
        """(T,): whose spans are whose."""
        return self._kinds[1]

    @cached_property
    def slopes(self) -> Tensor:
        """(T,E): how fast l_e can change."""
        return self.spans[:, : self.experts, self.experts][self.kind]

    @cached_property
    def diameters(self) -> Tensor:
        """(T,): how fast any difference between two logits can change."""
        return self.spans[:, : self.experts, : self.experts].flatten(1).amax(1)[self.kind]

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        """(T, ...): the spans of pairs of experts, given by their indices."""
        return self.spans[self.kind.view(-1, *[1] * (one.dim() - 1)), one, other]

    def steepness(self, coefficients: Tensor) -> Tensor:
        """(T,R): how fast sum_e c_e l_e can change, for `coefficients (T,R,E)`."""
        combined = coefficients @ self.weight
        return dual(combined * (self.factors if isinstance(self.factors, float) else self.factors.unsqueeze(1)), self.norm)

    def magnitudes(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Of a matrix (E,n) of magnitudes, what the points make of it (T,E), and how fast that can grow (T,E).

        For rounding errors. Those of m itself are in it: its mixture is computed beside 1 - sum, so 1 is added.
        """
        kinds, kind = self._kinds
        widened = kinds if self.scales is None else kinds + 1
        return (self.points.abs() * widened[kind]) @ matrix.t(), dual_scaled(matrix, widened, self.norm)[kind]

    def stretches(self, matrix: Tensor) -> Tensor:
        """(T,): at least how far |matrix (x * m)|_2 can be moved."""
        if self.scales is not None:
            return self.scales.stretches(matrix, self.norm)
        return torch.full_like(self.points[:, 0], stretch(matrix, self.norm))

    def rows(self, rows: slice) -> "Affine":
        """Some of the tokens, with what is dear and few already computed."""
        if self.scales is None:
            return replace(self, points=self.points[rows], held=self.spans)
        few = len(self._kinds[0]) * (self.experts + 1) ** 2 <= HELD
        part = replace(self, points=self.points[rows], scales=self.scales.rows(rows), held=None)
        if few:
            # The part has its own, smaller list of kinds: look up where each of them is in this one's.
            first = torch.zeros(len(part._kinds[0]), dtype=torch.int64, device=self.points.device)
            first[part.kind] = self.kind[rows]
            part = replace(part, held=self.spans[first])
        return part
