"""How far a token may be moved before one of its conditions can fail; and routers that switch at planes, with exact radii.

    r = min over the conditions of (l_i - l_j) / |w_i - w_j|_*        * the dual norm; l_j = t and w_j = 0 for a threshold t

Top k of logits, or of any increasing function of each logit; of cosines, whose planes are z.(e_i - e_j) = 0; and ReMoE's
ReLU, which switches at l_e = 0. The nearest plane is where the set changes: all other conditions still hold there.

T tokens, E experts, M conditions a token
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, unit
from holdfast.routing.declarations import Conditions

Read = Literal["logits", "softmax", "sigmoid"]
SOFTMAX_ROUNDINGS = 224  # of exp(l - max) / sum: u |l - max| <= 104 u twice, and a few; E more for the sum
LOWEST = 80.0  # nats below the largest logit: further down float32 gates become 0
AT_A_TIME = 4  # conditions of a token whose bound is made tight together
ROUNDS = 16


class Nearest(NamedTuple):
    """The least radius (T,), and which condition (T,) it belongs to."""

    radius: Tensor
    which: Tensor


class Problem(ABC):
    """The conditions under which some tokens keep their sets (abstract)."""

    exact = False  # are the radii exact, up to rounding?

    def __init__(self, scoring: Scoring, conditions: Conditions, margins: Tensor) -> None:
        self.scoring, self.conditions = scoring, conditions
        self.margins = margins  # (T,M): by how much conditions hold, in what the router compares

    @abstractmethod
    def radii(self, errors: Tensor | None) -> Tensor:
        """(T,M): below this, measured where `outward` takes it from, a condition holds.

        errors  (T,E): rounding may move each logit (or key of a plane) this far; None for real numbers
        """

    def nearest(self, errors: Tensor | None) -> Nearest:
        return least(self.radii(errors), self.conditions)

    def outward(self, radius: Tensor) -> Tensor:
        """A radius of `radii` as one around the tokens."""
        return self.scoring.outward(radius)

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        """(T,E): what rounding can do, at any token within `reach`."""
        return self.scoring.value_errors(arithmetic, reach)

    def errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        """(T,E): what rounding can do at the tokens as they are."""
        return self.scoring.value_errors_in_place(arithmetic)

    def bounds(self) -> dict[str, Tensor]:
        """Other bounds that are known for the same tokens (T,), in real numbers."""
        return {}


def least(radii: Tensor, conditions: Conditions) -> Nearest:
    """The least radius of each token's conditions; infinite where there is none."""
    if radii.shape[1] == 0:
        none = radii.new_full((len(radii),), torch.inf)
        return Nearest(none, torch.zeros_like(none, dtype=torch.int64))
    radius, which = conditions.settled(radii).min(1)
    return Nearest(radius.clamp_min(0), which)


def tightened(cheap: Tensor, conditions: Conditions, tighten: Callable[[Tensor], Tensor]) -> Tensor:
    """Radii (T,M), at least the `cheap` ones, tight where it matters.

    Tight bounds are dear, and only the least radius of a token counts: so the smallest are made tight, a few at a time,
    until a tight one is the least. Every bound is sound, so it does no harm to stop early.
    """
    radii, left = cheap, cheap.isfinite()
    for _ in range(ROUNDS if cheap.shape[1] else 0):
        binding = conditions.settled(radii)
        candidates = binding.where(left, torch.inf)
        rows = (candidates.amin(1) < torch.inf) & (candidates.amin(1) <= binding.amin(1))
        if not rows.any():
            break
        values, which = candidates.topk(min(AT_A_TIME, cheap.shape[1]), dim=1, largest=False)
        now, wanted = radii.gather(1, which), values.isfinite() & rows.unsqueeze(1)  # not for tokens that are done
        radii = radii.scatter(1, which, tighten(which).maximum(now).where(wanted, now))
        left = left.scatter(1, which, left.gather(1, which) & ~wanted)
    return radii


def largest(holds: Callable[[Tensor], Tensor], upper: Tensor, steps: int = 30) -> Tensor:
    """By bisection, a radius at which `holds` is True, near the largest one up to `upper`; 0 where there is none.

    `holds` must be True up to some radius and False beyond it.
    """
    low, high = torch.zeros_like(upper), upper
    for _ in range(steps):
        middle = (low + high) / 2
        good = holds(middle)
        low, high = middle.where(good, low), high.where(good, middle)
    return low


def with_threshold(values: Tensor, threshold: float = 0.0) -> Tensor:
    """(T,E+1) of (T,E): the last is what the index E, no expert, is compared by."""
    return torch.cat([values, values.new_full((len(values), 1), threshold)], dim=1)


@final
class Planes(Problem):
    """read: what the router really sorts. Gates have the order of the logits, but not all of it once they are rounded."""

    exact = True

    def __init__(self, scoring: Scoring, conditions: Conditions, read: Read = "logits") -> None:
        ahead, behind = conditions.sums(with_threshold(scoring.planes.logits, conditions.threshold))
        super().__init__(scoring, conditions, ahead - behind)
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

    def errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        # Of planes that are read through gates, what rounding the gates does comes on top.
        unmoved = torch.zeros_like(self.scoring.planes.points[:, 0])
        in_reals = Arithmetic(torch.float64, torch.float64)
        return self.errors(in_reals, unmoved) + self.scoring.plane_errors_in_place(arithmetic)

    def radii(self, errors: Tensor | None) -> Tensor:
        planes = self.scoring.planes
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        gaps = self.margins
        if errors is not None:
            of_ahead, of_behind = self.conditions.sums(with_threshold(errors))
            gaps = gaps - of_ahead - of_behind
        spans = planes.between(ahead, behind)
        never = (gaps > 0) | ((gaps == 0) & self.conditions.ties_hold)
        radii = (gaps / (spans * ABOVE)).where(spans > 0, torch.where(never, torch.inf, 0.0))
        if errors is not None and self.read == "softmax":
            below = planes.logits.amax(1, keepdim=True) - planes.logits
            room = (LOWEST - with_threshold(below).gather(1, ahead)) / planes.diameters.unsqueeze(1)
            radii = radii.minimum(room)
        return radii


@final
class Supports(Problem):
    """ReLU gates after an expert graph, g_j = sum_k a_jk relu(l_k): g_j > 0 while one l_k > 0 with a_jk > 0.

    For a chosen j the largest l_k / |w_k| of these k, for another j the least of -l_k / |w_k|.
    Condition j is about expert j.
    """

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor) -> None:
        gates = scoring.values.logits.clamp_min(0) @ graph.t()
        super().__init__(scoring, conditions, gates)
        self.linked = graph > 0  # (E,E)

    def radii(self, errors: Tensor | None) -> Tensor:
        values = self.scoring.values
        errors = torch.zeros_like(values.logits) if errors is None else errors
        slopes = values.slopes.clamp_min(torch.finfo(torch.float64).tiny) * ABOVE
        above, below = (values.logits - errors) / slopes, (-values.logits - errors) / slopes
        inside = above.unsqueeze(1).where(self.linked, -torch.inf).amax(-1)
        outside = below.unsqueeze(1).where(self.linked, torch.inf).amin(-1)
        return torch.where(self.conditions.chosen, inside, outside)
