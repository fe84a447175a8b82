"""Routers whose tokens share their gates (similarity, attention posterior): every token of a sequence may move.

g_i = sum_j W_ij p_j A^T, W a distribution over the tokens of a sequence. With c = a_i - a_j and all tokens moved by up to r:

    |change of g_i - g_j| <= range(c) (max_j tanh(r D_j / 4) + strength tanh(delta(r) / 2))

since a softmax whose logit differences change by at most 2 t moves by at most tanh(t / 2) in total variation. D_j is the
largest |w_e - w_f|_* at token j. delta is 0 where W comes from the attention before the router, which a move of the router's
input leaves as it is; where it comes from the tokens themselves, the informer declares delta (`Mixing.change`).
"""

from typing import final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.planes import SOFTMAX_ROUNDINGS, Nearest, Problem, largest, least
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, largest_in_sequence, unit
from holdfast.routing.declarations import Conditions, Mixing

TINY = torch.finfo(torch.float64).tiny
FARTHEST = 2.0**20  # times the longest token: an upper end for bisection


@final
class Mixed(Problem):
    """keys     (T,E+1): the router's own gates, and the threshold
    graph       (E+1,E): how keys are made of gates; the last row is the threshold
    real        (B,N) bool: which of the tokens, T = B N, are real
    """

    def __init__(
        self, scoring: Scoring, conditions: Conditions, keys: Tensor, graph: Tensor, mixing: Mixing, real: Tensor
    ) -> None:
        ahead, behind = conditions.sums(keys)
        super().__init__(scoring, conditions, ahead - behind)
        self.graph, self.mixing, self.real = graph, mixing, real
        # Of the token that is easiest to move.
        self.speed = self._over_sequence(scoring.values.diameters) * ABOVE
        self.pace = self._over_sequence(scoring.pace)
        self.ranges = torch.stack([(graph - row).amax(1) - (graph - row).amin(1) for row in graph]) * ABOVE  # (E+1,E+1)

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        return self._worst(self.scoring.value_errors(arithmetic, self._over_sequence(reach)))

    def errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        return self._worst(self.scoring.value_errors_in_place(arithmetic))

    def _worst(self, errors: Tensor) -> Tensor:
        """(T,1): of the worst logit of the sequence."""
        return self._over_sequence(errors.amax(1)).unsqueeze(1)

    def _over_sequence(self, values: Tensor) -> Tensor:
        return largest_in_sequence(values, self.real)

    def outward(self, radius: Tensor) -> Tensor:
        return radius

    def radii(self, errors: Tensor | None) -> Tensor:
        """(T,M): by how much, relative to the most there is, each condition may lose. Not yet radii."""
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        margins, ranges = self.margins, self.ranges[ahead, behind]
        if errors is not None:  # once in the gates that margins were read from, once at the moved tokens
            roundings = SOFTMAX_ROUNDINGS + 3 * self.graph.shape[0] + 2 * self.real.shape[1]
            largest_gates = self.graph.amax(1)
            rounded = torch.tensor(roundings * unit(torch.float32)).expm1() * (largest_gates[ahead] + largest_gates[behind])
            margins = margins - 2 * (ranges * torch.tanh(errors / 2) + rounded) - 1e-30
        never = (margins > 0) | ((margins == 0) & self.conditions.ties_hold)
        return (margins / ranges.clamp_min(TINY)).where(ranges > 0, torch.where(never, torch.inf, 0.0))

    def nearest(self, errors: Tensor | None) -> Nearest:
        shares, which = least(self.radii(errors), self.conditions)
        change = self.mixing.change

        def holds(radius: Tensor) -> Tensor:
            drift = torch.tanh(self.scoring.moved(radius * self.pace) * self.speed / 4)
            if change is not None:
                drift = drift + self.mixing.strength * torch.tanh(change(radius, errors is not None) / 2)
            return drift < shares

        return Nearest(largest(holds, self._farthest(), steps=60).where(shares < torch.inf, torch.inf), which)

    def _farthest(self) -> Tensor:
        longest = self._over_sequence(self.scoring.planes.points.norm(dim=-1))
        return FARTHEST * (longest + 1)
