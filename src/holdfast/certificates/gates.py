"""Routers that compare gates: sums of softmax gates (expert graphs, thresholds), and sigmoid gates with a bias.

Softmax

g_i > g_j  with  g = A p  is  sum_e c_e exp(l_e) > 0  with  c = a_i - a_j:  the sum that makes p of exp(l) cancels. With
P the experts where c > 0 and N those where c < 0 this is

    F(x) = log sum_P c_e exp(l_e) - log sum_N |c_e| exp(l_e) > 0,

the log odds of i against j. F changes by at most D |dx|, D the largest |w_e - w_f|_*; and, since the first term is convex,

    F(x + dx) >= F(x) - |dx| |w_P - w_N|_* - psi(|dx|),   w_P, w_N the means of w weighted by the terms of either sum

psi(r) = log sum_N nu_f exp(dx.(w_f - w_N)), at most (r D)^2 / 8 by Hoeffding's lemma, and at most
log(1 + sum nu_f (exp(r d_f) - 1 - r d_f)) with d_f = sum_e nu_e |w_f - w_e|_*. So the bound is exact to first order, and
exact for the identity graph. A threshold t is a row of t: sum_e t p_e = t.

The bounds from |dp| <= L |dx| with L = |Pi W|_2 / 2 are never better: F >= 4 (g_i - g_j) / range(c), by the mean value
theorem for the logit, range(c) <= sqrt(2) |c Pi|_2 and D <= sqrt(2) |Pi W|_2. They are computed to be reported.

Sigmoid, plus a correction bias, within the best groups of experts (DeepSeek-V3, GLM-4)

key = A s(l) + b, s the sigmoid, A an expert graph or the identity. A condition sum_e c_e s(l_e) + b_c > 0, by m, holds

    while  m > r |sum_e c_e s'(l_e) w_e|_* + r^2 q,   q = max|s''|/2 sum_e |c_e| |w_e|_*^2     (Taylor), and
    while  sum_e c_e s(l_e - sign(c_e) r |w_e|_*) + b_c > 0                                    (each logit at its worst)

The first is exact to first order, the second knows that sigmoids saturate; the better counts.
"""

import math
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.planes import SOFTMAX_ROUNDINGS, Problem, largest, least, tightened, with_threshold
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, unit
from holdfast.routing.declarations import Conditions

NEGLIGIBLE = 1e-7  # relative to a gate: what it must exceed underflow by
UNDERFLOW = 2.0**-126
FAR = 300.0  # nats
TINY = torch.finfo(torch.float64).tiny
STEEPEST = 1 / 4  # max s'
CURVATURE = 1 / (6 * math.sqrt(3))  # max |s''|
ROUNDINGS = 16  # of a gate between 0 and 1, in units of float32


@final
class Odds(Problem):
    """graph (E+1,E), not negative: how each key is made of softmax gates; the last row is the threshold."""

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor) -> None:
        self.values, self.graph = scoring.values, graph
        self.gates = self.values.logits.softmax(-1)
        self.keys = self.gates @ graph.t()  # (T,R)
        ahead, behind = conditions.sums(self.keys)
        super().__init__(scoring, conditions, ahead - behind)

    def radii(self, errors: Tensor | None) -> Tensor:
        if errors is not None:
            rounded = (SOFTMAX_ROUNDINGS + 2 * self.values.experts) * unit(torch.float32) + NEGLIGIBLE
            errors = (errors + rounded).unsqueeze(1)
        coefficients = self._coefficients(self.conditions.ahead, self.conditions.behind, errors)
        odds, _, _ = self._odds(coefficients)
        diameters = (self.values.diameters * ABOVE).unsqueeze(1).clamp_min(TINY)
        cheap = (odds / diameters).where(coefficients.any(-1), torch.where(self.conditions.ties_hold, torch.inf, 0.0))

        def tight(which: Tensor) -> Tensor:
            return self._tight(self._coefficients(*self.conditions.sides(which), errors))

        radii = tightened(cheap, self.conditions, tight)
        if errors is not None:  # gates that underflow have no odds; far enough above that, it is a part of the errors
            lost = UNDERFLOW * (4 + 2 * self.graph.shape[0] + 2 * float(self.graph.sum(1).max())) / NEGLIGIBLE
            ahead = self.keys.gather(1, self.conditions.ahead[..., 0])
            room = (ahead.clamp_min(TINY) / lost).log() / diameters
            constant = ~self.graph.any(1)[self.conditions.ahead[..., 0]] & ~self.graph.any(1)[self.conditions.behind[..., 0]]
            radii = radii.minimum(room.where(~constant, torch.inf))
        return radii

    def _coefficients(self, ahead: Tensor, behind: Tensor, errors: Tensor | None) -> Tensor:
        """c (T,M,E). Rounding moves each exp(l_e) by a factor, up or down, in either gate."""
        ahead, behind = self.graph[ahead[..., 0]], self.graph[behind[..., 0]]
        return ahead - behind if errors is None else ahead * (-errors).exp() - behind * errors.exp()

    def _odds(self, coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """F (T,M), and the terms of its two sums (T,M,E)."""
        terms = coefficients * self.gates.unsqueeze(1)
        above, below = terms.clamp_min(0), (-terms).clamp_min(0)
        against = below.sum(-1)
        against = torch.where((coefficients < 0).any(-1), against.clamp_min(TINY), against)  # too small is not nothing
        odds = above.sum(-1).log() - against.log()
        return odds.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), above, below

    def _tight(self, coefficients: Tensor) -> Tensor:
        odds, above, below = self._odds(coefficients)
        known = below.sum(-1) > 0
        above, below = (part / part.sum(-1, keepdim=True).clamp_min(TINY) for part in (above, below))
        slope = self.values.steepness(above - below) * ABOVE
        experts = self.values.experts
        spans = self.values.spans[:, :experts, :experts][self.values.kind] * ABOVE  # (T,E,E)
        apart = below @ spans
        diameters = self.values.diameters.unsqueeze(1) * ABOVE

        def holds(radius: Tensor) -> Tensor:
            far = radius.unsqueeze(-1) * apart
            spread = (below * (far.expm1() - far)).sum(-1).log1p().minimum((radius * diameters).square() / 8)
            return radius * slope + spread <= odds * (1 - 1e-12)

        # Beyond that far, terms that float64 cannot hold would count.
        upper = (odds.clamp_min(0) / slope.clamp_min(TINY)).minimum(FAR / diameters.clamp_min(TINY))
        return largest(holds, upper).where(known, 0.0)

    def bounds(self) -> dict[str, Tensor]:
        """Pair by pair, from the softmax's own Lipschitz constant, and proposition 1 of SymphonySMoE, m / (2 rho L)."""
        experts = self.values.experts
        centred = self.graph[:experts] - self.graph[:experts].mean(1, keepdim=True)
        weight = self.values.weight - self.values.weight.mean(0)
        lipschitz = (self.values.stretches(weight) / 2).unsqueeze(1).clamp_min(TINY)
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        if (ahead.eq(experts) | behind.eq(experts))[self.conditions.valid].any():
            return {}
        lengths = torch.stack([(centred - row).norm(dim=-1) for row in centred])  # (E,E)
        apart = lengths[ahead.clamp_max(experts - 1), behind.clamp_max(experts - 1)]
        pairwise = self.margins / (apart.clamp_min(TINY) * lipschitz * ABOVE)
        pairwise = pairwise.where((apart > 0) | (self.margins > 0), torch.where(self.conditions.ties_hold, torch.inf, 0.0))
        rho = float(torch.linalg.matrix_norm(centred, ord=2))
        proposition = self.margins / (2 * max(rho, TINY) * lipschitz * ABOVE)
        found = {"pairwise": pairwise, "proposition 1": proposition}
        return {name: self.outward(least(radii, self.conditions).radius) for name, radii in found.items()}


@final
class Sigmoids(Problem):
    """graph (E,E), not negative, or None."""

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor | None) -> None:
        self.values, self.informed = scoring.values, graph is not None
        experts, gates = self.values.experts, self.values.logits.sigmoid()
        self.bias = torch.zeros_like(gates[0]) if conditions.bias is None else conditions.bias
        own = torch.eye(experts, dtype=gates.dtype, device=gates.device) if graph is None else graph
        self.graph = torch.cat([own, torch.zeros_like(own[:1])])  # a threshold is made of no gate
        keys = (gates if graph is None else gates @ graph.t()) + self.bias
        ahead, behind = conditions.sums(with_threshold(keys, conditions.threshold))
        super().__init__(scoring, conditions, ahead - behind)

    def radii(self, errors: Tensor | None) -> Tensor:
        margins = self.margins
        if errors is not None:
            margins = margins - _both(self.conditions.sums(with_threshold(self._key_errors(errors))))
        steepest = with_threshold(STEEPEST * self.values.slopes @ self.graph[:-1].t())
        cheap = margins / (_both(self.conditions.sums(steepest)) * ABOVE).clamp_min(TINY)

        def tight(which: Tensor) -> Tensor:
            ahead, behind = self.conditions.sides(which)
            coefficients = self.graph[ahead].sum(2) - self.graph[behind].sum(2)  # (T,R,E)
            if not self.informed:  # most are 0
                return self._tight(coefficients, margins.gather(1, which), torch.cat([ahead, behind], dim=-1))
            return self._tight(coefficients, margins.gather(1, which), None)

        return tightened(cheap, self.conditions, tight)

    def _key_errors(self, errors: Tensor) -> Tensor:
        graph, u = self.graph[:-1], unit(torch.float32)
        gates = STEEPEST * errors + (ROUNDINGS + len(graph)) * u
        return gates @ graph.t() + 4 * u * (1 + self.bias.abs())

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
