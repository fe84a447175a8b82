"""Routers that compare sigmoid gates plus a correction bias, within the best groups of experts (DeepSeek-V3, GLM-4).

key = A s(l) + b, s the sigmoid, A an expert graph or the identity. A condition sum_e c_e s(l_e) + b_c > 0, by m, holds

    while  m > r |sum_e c_e s'(l_e) w_e|_* + r^2 q,   q = max|s''|/2 sum_e |c_e| |w_e|_*^2     (Taylor), and
    while  sum_e c_e s(l_e - sign(c_e) r |w_e|_*) + b_c > 0                                    (each logit at its worst)

The first is exact to first order, the second knows that sigmoids saturate; the better counts.
"""

import math

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import unit
from holdfast.certificates.pairs import Pairs
from holdfast.certificates.planes import with_nobody
from holdfast.certificates.problem import Problem, largest, tightened
from holdfast.certificates.scoring import Scoring
from holdfast.routing.bounds import ABOVE

STEEPEST = 1 / 4  # max s'
CURVATURE = 1 / (6 * math.sqrt(3))  # max |s''|
ROUNDINGS = 16  # of a gate between 0 and 1, in units of float32
TINY = torch.finfo(torch.float64).tiny


def sigmoid_keys(logits: Tensor, graph: Tensor | None, correction: Tensor) -> Tensor:
    """(T,E)"""
    gates = logits.sigmoid()
    return (gates if graph is None else gates @ graph.t()) + correction


class Sigmoids(Problem):
    """graph (E,E) or None, correction (E,)."""

    def __init__(self, scoring: Scoring, pairs: Pairs, chosen: Tensor, graph: Tensor | None, correction: Tensor) -> None:
        self.values, self.correction, self.informed = scoring.values, correction, graph is not None
        experts = self.values.experts
        own = torch.eye(experts, dtype=torch.float64, device=correction.device) if graph is None else graph
        self.graph = torch.cat([own, torch.zeros_like(own[:1])])  # nobody has a key of 0
        ahead, behind = pairs.sums(with_nobody(sigmoid_keys(self.values.logits, graph, correction)))
        super().__init__(scoring, pairs, chosen, ahead - behind)

    def radii(self, errors: Tensor | None) -> Tensor:
        margins = self.margins
        if errors is not None:
            margins = margins - _both(self.pairs.sums(with_nobody(self._key_errors(errors))))
        steepest = with_nobody(STEEPEST * self.values.slopes @ self.graph[:-1].t())
        cheap = margins / (_both(self.pairs.sums(steepest)) * ABOVE).clamp_min(TINY)

        def tight(which: Tensor) -> Tensor:
            ahead, behind = self.pairs.sides(which)
            coefficients = self.graph[ahead].sum(2) - self.graph[behind].sum(2)  # (T,R,E)
            if not self.informed:  # most are 0
                return self._tight(coefficients, margins.gather(1, which), torch.cat([ahead, behind], dim=-1))
            return self._tight(coefficients, margins.gather(1, which), None)

        return tightened(cheap, self.pairs, tight)

    def _key_errors(self, errors: Tensor) -> Tensor:
        graph, u = self.graph[:-1], unit(torch.float32)
        gates = STEEPEST * errors + (ROUNDINGS + len(graph)) * u
        return gates @ graph.t() + 4 * u * (1 + self.correction.abs())

    def _tight(self, coefficients: Tensor, margins: Tensor, members: Tensor | None) -> Tensor:
        """(T,R) of `coefficients (T,R,E)`; where given, all that are not 0 belong to the `members (T,R,n)`."""
        logits, slopes = (values.unsqueeze(1) for values in (self.values.logits, self.values.slopes * ABOVE))
        gates = logits.sigmoid()
        grade = self.values.steepness(coefficients * gates * (1 - gates)) * ABOVE
        if members is not None:
            shape, index = members.shape[:2], members.clamp_max(self.values.experts - 1)
            logits, slopes = (values.expand(*shape, -1).gather(2, index) for values in (logits, slopes))
            coefficients = coefficients.gather(2, index).where(members < self.values.experts, 0.0)
            gates = logits.sigmoid()
        weights, signs = coefficients.abs(), coefficients.sign()
        bend = CURVATURE / 2 * (weights * slopes.square()).sum(-1)
        room = margins.clamp_min(0)
        taylor = 2 * room / ((grade + (grade.square() + 4 * bend * room).sqrt()) * ABOVE).clamp_min(TINY)
        towards = signs * slopes

        def holds(radius: Tensor) -> Tensor:
            worst = torch.sigmoid(logits - radius.unsqueeze(-1) * towards)
            return (coefficients * (gates - worst)).sum(-1) <= margins * (1 - 1e-12)

        # Where all that can be lost is less than the margin, a condition never fails.
        never = (coefficients * (gates - (coefficients < 0).to(gates))).sum(-1) < margins
        upper = (4 * taylor).maximum(8 * room / (STEEPEST * (weights * slopes).sum(-1)).clamp_min(TINY))
        return taylor.maximum(largest(holds, upper)).where(~never, torch.inf).where(margins > 0, 0.0)


def _both(sides: tuple[Tensor, Tensor]) -> Tensor:
    return sides[0] + sides[1]
