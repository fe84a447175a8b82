"""Routers that switch at planes: exact radii.

    r = min over the conditions of (l_i - l_j) / |w_i - w_j|_*        * the dual norm; l_j = 0 and w_j = 0 for nobody

Top k of logits, or of any increasing function of each logit; of cosines, whose planes are z.(e_i - e_j) = 0; and ReMoE's
ReLU, which switches at l_e = 0. The nearest plane is where the set changes: all other conditions still hold there.
"""

from typing import Literal

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, unit
from holdfast.certificates.pairs import Pairs
from holdfast.certificates.problem import Problem
from holdfast.certificates.scoring import Scoring
from holdfast.routing.bounds import ABOVE

Read = Literal["logits", "softmax", "sigmoid"]
SOFTMAX_ROUNDINGS = 224  # of exp(l - max) / sum: u |l - max| <= 104 u twice, and a few; E more for the sum
LOWEST = 80.0  # nats below the largest logit: further down float32 gates become 0


def with_nobody(values: Tensor, nobody: float = 0.0) -> Tensor:
    """(T,E+1) of (T,E)."""
    return torch.cat([values, values.new_full((len(values), 1), nobody)], dim=1)


class Planes(Problem):
    """read: what the router really sorts. Gates have the order of the logits, but not all of it once they are rounded."""

    exact = True

    def __init__(self, scoring: Scoring, pairs: Pairs, chosen: Tensor, read: Read = "logits") -> None:
        ahead, behind = pairs.sums(with_nobody(scoring.planes.logits))
        super().__init__(scoring, pairs, chosen, ahead - behind)
        self.read = read

    def outward(self, radius: Tensor) -> Tensor:
        return radius

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        planes = self.scoring.planes
        errors = self.scoring.plane_errors(arithmetic, reach)
        if self.read == "softmax":
            errors = errors + (SOFTMAX_ROUNDINGS + planes.experts) * unit(torch.float32)
        if self.read == "sigmoid":  # as flat as exp(-|l|)/4 at l: a rounding of the gate is that many logits
            errors = errors + 64 * unit(torch.float32) * (planes.logits.abs() + reach.unsqueeze(1) * planes.slopes).exp()
        return errors

    def radii(self, errors: Tensor | None) -> Tensor:
        planes, (ahead, behind) = self.scoring.planes, (side[..., 0] for side in self.pairs[:2])
        gaps = self.margins
        if errors is not None:
            of_ahead, of_behind = self.pairs.sums(with_nobody(errors))
            gaps = gaps - of_ahead - of_behind
        spans = planes.between(ahead, behind)
        never = (gaps > 0) | ((gaps == 0) & self.pairs.ties_hold)
        radii = (gaps / (spans * ABOVE)).where(spans > 0, torch.where(never, torch.inf, 0.0))
        if errors is not None and self.read == "softmax":
            below = planes.logits.amax(1, keepdim=True) - planes.logits
            room = (LOWEST - with_nobody(below).gather(1, ahead)) / planes.diameters.unsqueeze(1)
            radii = radii.minimum(room)
        return radii


class Supports(Problem):
    """ReLU gates after an expert graph, g_j = sum_k a_jk relu(l_k): g_j > 0 while one l_k > 0 with a_jk > 0.

    For a chosen j the largest l_k / |w_k| of these k, for another j the least of -l_k / |w_k|.
    """

    def __init__(self, scoring: Scoring, pairs: Pairs, chosen: Tensor, graph: Tensor) -> None:
        gates = scoring.values.logits.clamp_min(0) @ graph.t()
        super().__init__(scoring, pairs, chosen, gates)
        self.linked = graph > 0  # (E,E)

    def radii(self, errors: Tensor | None) -> Tensor:
        values = self.scoring.values
        errors = torch.zeros_like(values.logits) if errors is None else errors
        slopes = values.slopes.clamp_min(torch.finfo(torch.float64).tiny) * ABOVE
        above, below = (values.logits - errors) / slopes, (-values.logits - errors) / slopes
        inside = above.unsqueeze(1).where(self.linked, -torch.inf).amax(-1)
        outside = below.unsqueeze(1).where(self.linked, torch.inf).amin(-1)
        return torch.where(self.chosen, inside, outside)
