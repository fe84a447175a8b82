"""Radii of routers that compare gates: softmax gates (expert graphs, thresholds), sigmoid gates, gates that tokens share.

**Softmax gates.** g_i > g_j with g = A p is sum_e c_e exp(l_e) > 0 with c = a_i - a_j: the denominator of p cancels. With P
the experts where c > 0 and N those where c < 0 this is

    F(x) = log sum_P c_e exp(l_e) - log sum_N |c_e| exp(l_e) > 0,

the log odds of i against j. F changes by at most D |dx|, D the largest |w_e - w_f|_*; and, since the first term is convex,

    F(x + dx) >= F(x) - |dx| |w_P - w_N|_* - psi(|dx|),   w_P, w_N the means of w weighted by the terms of either sum

psi(r) = log sum_N nu_f exp(dx.(w_f - w_N)), at most (r D)^2 / 8 by Hoeffding's lemma, and at most
log(1 + sum nu_f (exp(r d_f) - 1 - r d_f)) with d_f = sum_e nu_e |w_f - w_e|_*. So the bound is exact to first order, and
exact for the identity graph. A threshold t is a row of t: sum_e t p_e = t.

The bounds from |dp| <= L |dx| with L = |Pi W|_2 / 2 are never better: F >= 4 (g_i - g_j) / range(c), by the mean value
theorem for the logit, range(c) <= sqrt(2) |c Pi|_2 and D <= sqrt(2) |Pi W|_2. They are computed to be reported.

**Sigmoid gates**, plus a correction bias, within the best groups of experts (DeepSeek-V3, GLM-4). key = A s(l) + b, s the
sigmoid, A an expert graph or the identity. A condition sum_e c_e s(l_e) + b_c > 0 with margin m is satisfied

    while  m > r |sum_e c_e s'(l_e) w_e|_* + r^2 q,   q = max|s''|/2 sum_e |c_e| |w_e|_*^2     (Taylor), and
    while  sum_e c_e s(l_e - sign(c_e) r |w_e|_*) + b_c > 0                                    (each logit at its worst)

The first is exact to first order, the second uses that sigmoids saturate; the larger radius counts.

**Gates that tokens share** (similarity, attention posterior): every token of a sequence may be perturbed. The gates of token
i are sum_j W_ij p_j A^T, W_i a distribution over the tokens of its sequence. For experts e and f with c = a_e - a_f and all
tokens perturbed by up to r,

    |change of g_e - g_f| <= range(c) (max_j tanh(r D_j / 4) + strength tanh(delta(r) / 2))

since a softmax whose logit differences change by at most 2 t moves by at most tanh(t / 2) in total variation. D_j is the
largest |w_e - w_f|_* at token j. delta is 0 where W comes from the attention before the router, which does not depend on the
router's input; where it comes from the tokens themselves, the informer declares delta (`Mixing.change`).
"""

import math
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.planes import (
    SOFTMAX_ROUNDINGS,
    Nearest,
    RadiusProblem,
    bisect_largest,
    smallest_radius,
    tighten_smallest,
    with_threshold,
)
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, TINY, largest_in_sequence, safe_sqrt, unit
from holdfast.routing.declarations import Conditions, Mixing

NEGLIGIBLE = 1e-7  # underflow may be this part of a gate
UNDERFLOW = 2.0**-126
LARGEST_EXPONENT = 300.0  # of terms that are exponentiated in float64
STEEPEST = 1 / 4  # max s'
CURVATURE = 1 / (6 * math.sqrt(3))  # max |s''|
LARGEST_RADIUS = 2.0**20  # times the longest token: where bisection starts
SIGMOID_ROUNDINGS = 16  # of a gate between 0 and 1, in units of float32


def _log(values: Tensor) -> Tensor:
    """Return the logarithm, with the gradient 0 instead of infinity at 0."""
    positive = values > 0
    return values.where(positive, 1.0).log().where(positive, -torch.inf)


@final
class SoftmaxGates(RadiusProblem):
    """Conditions on sums of softmax gates.

    graph  (E+1,E), not negative: keys = gates graph^T; the last row is the threshold
    """

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor) -> None:
        self.values, self.graph = scoring.values, graph
        self.gates = self.values.logits.softmax(-1)
        self.keys = self.gates @ graph.t()  # (T,R)
        super().__init__(scoring, conditions, self.keys)

    def radii(self, errors: Tensor | None) -> Tensor:
        if errors is not None:
            rounded = (SOFTMAX_ROUNDINGS + 2 * self.values.experts) * unit(torch.float32) + NEGLIGIBLE
            errors = (errors + rounded).unsqueeze(1)
        coefficients = self._coefficients(self.conditions.ahead, self.conditions.behind, errors)
        odds, _, _ = self._odds(coefficients)
        diameters = (self.values.diameters * ABOVE).unsqueeze(1).clamp_min(TINY)
        finite = odds.isfinite()
        simple = (odds.where(finite, 0.0) / diameters).where(finite, odds)
        simple = simple.where(coefficients.any(-1), torch.where(self.conditions.ties_hold, torch.inf, 0.0))

        def tight(which: Tensor) -> Tensor:
            return self._tight_radii(self._coefficients(*self.conditions.sides(which), errors))

        radii = tighten_smallest(simple, self.conditions, tight, self.scoring.static)
        if errors is not None:  # the odds of gates that underflow are unknown; far above that, underflow is negligible
            lost = UNDERFLOW * (4 + 2 * self.graph.shape[0] + 2 * float(self.graph.sum(1).max())) / NEGLIGIBLE
            ahead, _ = self.conditions.sums(self.keys)
            room = (ahead.clamp_min(TINY) / lost).log() / diameters
            varies = self.graph.any(1)
            constant = ~(varies[self.conditions.ahead] | varies[self.conditions.behind]).any(-1)
            radii = radii.minimum(room.where(~constant, torch.inf))
        return radii

    def _coefficients(self, ahead: Tensor, behind: Tensor, errors: Tensor | None) -> Tensor:
        """Return c (T,M,E). Rounding multiplies each exp(l_e) by a factor, up or down, in either gate."""
        ahead, behind = self.graph[ahead].sum(2), self.graph[behind].sum(2)
        return ahead - behind if errors is None else ahead * (-errors).exp() - behind * errors.exp()

    def _odds(self, coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return F (T,M), and the terms of its two sums (T,M,E)."""
        terms = coefficients * self.gates.unsqueeze(1)
        above, below = terms.clamp_min(0), (-terms).clamp_min(0)
        against = below.sum(-1)
        against = torch.where((coefficients < 0).any(-1), against.clamp_min(TINY), against)  # an underflowing term is not 0
        favour = above.sum(-1)
        odds = _log(favour) - _log(against)
        return odds.where((favour > 0) | (against > 0), 0.0), above, below

    def _tight_radii(self, coefficients: Tensor) -> Tensor:
        """Return radii (T,R) from the bound that is exact to first order."""
        odds, above, below = self._odds(coefficients)
        odds = odds.where(odds.isfinite(), 0.0)  # infinite ones need no bound, and have no gradient
        known = below.sum(-1) > 0
        above, below = (part / part.sum(-1, keepdim=True).clamp_min(TINY) for part in (above, below))
        slope = self.values.change_rate(above - below) * ABOVE
        apart = below @ (self.values.expert_spans() * ABOVE)
        diameters = self.values.diameters.unsqueeze(1) * ABOVE

        def slack(radius: Tensor) -> Tensor:
            far = radius.unsqueeze(-1) * apart
            spread = (below * (far.expm1() - far)).sum(-1).log1p().minimum((radius * diameters).square() / 8)
            return odds * (1 - 1e-12) - radius * slope - spread

        # Larger radii would need exponentials that overflow in float64.
        upper = (odds.clamp_min(0) / slope.clamp_min(TINY)).minimum(LARGEST_EXPONENT / diameters.clamp_min(TINY))
        return bisect_largest(slack, upper).where(known, 0.0)

    def bounds(self) -> dict[str, Tensor]:
        """Return the bound of each pair from the Lipschitz constant L of the softmax, and proposition 1 of SymphonySMoE.

        Proposition 1 is m / (2 rho L), with rho the norm of the centred graph.
        """
        experts = self.values.experts
        centred = self.graph[:experts] - self.graph[:experts].mean(1, keepdim=True)
        weight = self.values.weight - self.values.weight.mean(0)
        lipschitz = (self.values.stretches(weight) / 2).unsqueeze(1).clamp_min(TINY)
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        has_sums = self.conditions.ahead.shape[-1] > 1
        if has_sums or (ahead.eq(experts) | behind.eq(experts))[self.conditions.valid].any():
            return {}
        lengths = torch.stack([(centred - row).norm(dim=-1) for row in centred])  # (E,E)
        apart = lengths[ahead.clamp_max(experts - 1), behind.clamp_max(experts - 1)]
        pairwise = self.margins / (apart.clamp_min(TINY) * lipschitz * ABOVE)
        pairwise = pairwise.where((apart > 0) | (self.margins > 0), torch.where(self.conditions.ties_hold, torch.inf, 0.0))
        rho = float(torch.linalg.matrix_norm(centred, ord=2))
        proposition = self.margins / (2 * max(rho, TINY) * lipschitz * ABOVE)
        found = {"pairwise": pairwise, "proposition 1": proposition}
        return {name: self.to_token_radius(smallest_radius(radii, self.conditions).radius) for name, radii in found.items()}


@final
class SigmoidGates(RadiusProblem):
    """Conditions on sigmoid gates plus a bias. `graph (E,E)` is not negative; None is the identity."""

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor | None) -> None:
        self.values, self.informed = scoring.values, graph is not None
        experts, gates = self.values.experts, self.values.logits.sigmoid()
        self.bias = torch.zeros_like(gates[0]) if conditions.bias is None else conditions.bias
        own = torch.eye(experts, dtype=gates.dtype, device=gates.device) if graph is None else graph
        self.graph = torch.cat([own, torch.zeros_like(own[:1])])  # the threshold contains no gate
        keys = (gates if graph is None else gates @ graph.t()) + self.bias
        super().__init__(scoring, conditions, with_threshold(keys, conditions.threshold))

    def radii(self, errors: Tensor | None) -> Tensor:
        margins = self.margins
        if errors is not None:
            u, graph = unit(torch.float32), self.graph[:-1]
            of_gates = STEEPEST * errors + (SIGMOID_ROUNDINGS + len(graph)) * u
            of_keys = with_threshold(of_gates @ graph.t() + 4 * u * (1 + self.bias.abs()))
            margins = margins - torch.add(*self.conditions.sums(of_keys))
        steepest = with_threshold(STEEPEST * self.values.slopes @ self.graph[:-1].t())
        simple = margins / (torch.add(*self.conditions.sums(steepest)) * ABOVE).clamp_min(TINY)

        def tight(which: Tensor) -> Tensor:
            ahead, behind = self.conditions.sides(which)
            coefficients = self.graph[ahead].sum(2) - self.graph[behind].sum(2)  # (T,R,E); without a graph, most are 0
            members = None if self.informed else torch.cat([ahead, behind], dim=-1)
            return self._tight_radii(coefficients, margins.gather(1, which), members)

        return tighten_smallest(simple, self.conditions, tight, self.scoring.static)

    def _tight_radii(self, coefficients: Tensor, margins: Tensor, members: Tensor | None) -> Tensor:
        """Return radii (T,R) for `coefficients (T,R,E)`. If `members (T,R,n)` are given, all others have coefficient 0."""
        logits, slopes = (values.unsqueeze(1) for values in (self.values.logits, self.values.slopes * ABOVE))
        gates = logits.sigmoid()
        slope = self.values.change_rate(coefficients * gates * (1 - gates)) * ABOVE
        if members is not None:
            shape, index = members.shape[:2], members.clamp_max(self.values.experts - 1)
            logits, slopes = (values.expand(*shape, -1).gather(2, index) for values in (logits, slopes))
            coefficients = coefficients.gather(2, index).where(members < self.values.experts, 0.0)
            gates = logits.sigmoid()
        weights, signs = coefficients.abs(), coefficients.sign()
        bend = CURVATURE / 2 * (weights * slopes.square()).sum(-1)
        room = margins.clamp_min(0)
        taylor = 2 * room / ((slope + safe_sqrt(slope.square() + 4 * bend * room)) * ABOVE).clamp_min(TINY)
        towards = signs * slopes

        def slack(radius: Tensor) -> Tensor:
            worst = torch.sigmoid(logits - radius.unsqueeze(-1) * towards)
            return margins * (1 - 1e-12) - (coefficients * (gates - worst)).sum(-1)

        # If the sigmoids can never lose as much as the margin, the condition never fails.
        never = (coefficients * (gates - (coefficients < 0).to(gates))).sum(-1) < margins
        upper = (4 * taylor).maximum(8 * room / (STEEPEST * (weights * slopes).sum(-1)).clamp_min(TINY))
        return taylor.maximum(bisect_largest(slack, upper)).where(~never, torch.inf).where(margins > 0, 0.0)


@final
class MixedGates(RadiusProblem):
    """Conditions on softmax gates that the tokens of a sequence share.

    keys   (T,E+1): the router's gates as computed, and the threshold
    graph  (E+1,E): keys = gates graph^T; the last row is the threshold
    real   (B,N) bool: which of the tokens, T = B N, are real
    """

    def __init__(
        self, scoring: Scoring, conditions: Conditions, keys: Tensor, graph: Tensor, mixing: Mixing, real: Tensor
    ) -> None:
        super().__init__(scoring, conditions, keys)
        self.graph, self.mixing, self.real = graph, mixing, real
        # Those of the most sensitive token of the sequence.
        self.speed = self._over_sequence(scoring.values.diameters) * ABOVE
        self.point_speed = self._over_sequence(scoring.point_speed)
        self.ranges = torch.stack([(graph - row).amax(1) - (graph - row).amin(1) for row in graph]) * ABOVE  # (E+1,E+1)

    def errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        """Return the error (T,1) of the worst logit of the sequence."""
        errors = self.scoring.value_errors(arithmetic, None if reach is None else self._over_sequence(reach))
        return self._over_sequence(errors.amax(1)).unsqueeze(1)

    def _over_sequence(self, values: Tensor) -> Tensor:
        return largest_in_sequence(values, self.real)

    def to_token_radius(self, radius: Tensor) -> Tensor:
        return radius

    def radii(self, errors: Tensor | None) -> Tensor:
        """Return margins over ranges (T,M): the share of its range that each condition may lose."""
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        margins, ranges = self.margins, self.ranges[ahead, behind]
        if errors is not None:  # twice: in the gates of the margins, and at the perturbed tokens
            roundings = SOFTMAX_ROUNDINGS + 3 * self.graph.shape[0] + 2 * self.real.shape[1] + self.mixing.roundings
            largest_gates = self.graph.amax(1)
            rounded = torch.tensor(roundings * unit(torch.float32)).expm1() * (largest_gates[ahead] + largest_gates[behind])
            margins = margins - 2 * (ranges * torch.tanh(errors / 2) + rounded) - 1e-30
        return self.margins_over(ranges, margins)

    def nearest(self, errors: Tensor | None) -> Nearest:
        shares, which = smallest_radius(self.radii(errors), self.conditions)
        change = self.mixing.change

        def slack(radius: Tensor) -> Tensor:
            drift = torch.tanh(self.scoring.point_distance(radius * self.point_speed) * self.speed / 4)
            if change is not None:
                drift = drift + self.mixing.strength * torch.tanh(change(radius, errors is not None) / 2)
            return shares - drift

        longest = self._over_sequence(self.scoring.planes.points.norm(dim=-1))
        radius = bisect_largest(slack, LARGEST_RADIUS * (longest + 1), steps=60)
        return Nearest(radius.where(shares < torch.inf, torch.inf), which)
