"""`RadiusProblem`: up to which perturbation the conditions of a token are satisfied; and the problems with planes.

If the decision boundaries are planes (`PlaneDistances`), the radius is exact:

    r = min over the conditions of (l_i - l_j) / |w_i - w_j|_*        * the dual norm; l_j = t and w_j = 0 for a threshold t

This covers the top k of logits, or of any increasing function of each logit; of cosines, with the planes z.(e_i - e_j) = 0;
and ReMoE's ReLU, with the planes l_e = 0. The set changes at the nearest plane: all other conditions are satisfied there.

T tokens, E experts, M conditions per token
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, unit
from holdfast.routing.declarations import Conditions

SOFTMAX_ROUNDINGS = 224  # of exp(l - max) / sum: u |l - max| <= 104 u twice, and a few; E more for the sum
LOWEST = 80.0  # logits this far below the largest have a float32 gate of 0
MOST_TIGHTENED = 64  # conditions of a token
STEP = 1e-7  # of the largest radius: between points whose difference gives a slope


class Nearest(NamedTuple):
    """The smallest radius (T,), and the index (T,) of its condition."""

    radius: Tensor
    which: Tensor


class RadiusProblem(ABC):
    """The conditions under which some tokens keep their selected sets (abstract).

    keys  (T,E+1): what the router compares; index E is the threshold
    """

    exact = False  # whether the radii are exact, up to rounding

    def __init__(self, scoring: Scoring, conditions: Conditions, keys: Tensor) -> None:
        self.scoring, self.conditions = scoring, conditions
        ahead, behind = conditions.sums(keys)
        self.margins = ahead - behind  # (T,M)

    @abstractmethod
    def radii(self, errors: Tensor | None) -> Tensor:
        """Return (T,M) radii below which each condition is satisfied; `to_token_radius` converts them to radii of tokens.

        errors  (T,E): the largest rounding error of each logit (or key of a plane); None for real numbers
        """

    def nearest(self, errors: Tensor | None) -> Nearest:
        """Return the smallest radius of each token."""
        return smallest_radius(self.radii(errors), self.conditions)

    def at(self, which: Tensor) -> Self:
        """Return the problem with the condition `which (T,)` of each token alone."""
        one = copy(self)
        one.conditions, one.margins = self.conditions.at(which), self.margins.gather(1, which.unsqueeze(1))
        return one

    def distance(self, radius: Tensor) -> Tensor:
        """Convert a radius of `nearest` to the radius around the tokens, rounded down."""
        return self.to_token_radius(radius).nan_to_num(nan=0.0, posinf=torch.inf).clamp_min(0) / ABOVE

    def to_token_radius(self, radius: Tensor) -> Tensor:
        """Convert a radius of `radii` to a radius around the tokens."""
        return self.scoring.to_token_radius(radius)

    def errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        """Return the largest rounding errors (T,E) at any token within `reach (T,)`; None: at the unperturbed tokens."""
        return self.scoring.value_errors(arithmetic, reach)

    def margins_over(self, speeds: Tensor, margins: Tensor) -> Tensor:
        """Return `margins / speeds` (T,M); for a speed of 0, infinity if the condition is satisfied, and else 0."""
        satisfied = (margins > 0) | ((margins == 0) & self.conditions.ties_hold)
        return (margins / speeds.where(speeds > 0, 1.0)).where(speeds > 0, torch.where(satisfied, torch.inf, 0.0))

    def bounds(self) -> dict[str, Tensor]:
        """Return other known lower bounds (T,) for the same tokens, in real numbers, by name."""
        return {}


def smallest_radius(radii: Tensor, conditions: Conditions) -> Nearest:
    """Return the smallest radius of each token's conditions; infinite for a token without conditions."""
    if radii.shape[1] == 0:
        none = radii.new_full((len(radii),), torch.inf)
        return Nearest(none, torch.zeros_like(none, dtype=torch.int64))
    radius, which = conditions.required_radii(radii).min(1)
    return Nearest(radius.clamp_min(0), which)


def at_a_time(static: bool) -> int:
    """Return how many conditions of a token are tightened together: more if the rounds cannot end early."""
    return 16 if static else 4


def tighten_smallest(simple: Tensor, conditions: Conditions, tighten: Callable[[Tensor], Tensor], static: bool) -> Tensor:
    """Return radii (T,M) that are at least the `simple` ones, and tight where it matters.

    Tight bounds are expensive, and only the smallest radius of a token counts. So the smallest are tightened, a few at a
    time, until a tight one is the smallest. Every bound is sound, so stopping early is safe. If the number of rounds must be
    `static`, later rounds change nothing.
    """
    radii, left, together = simple, simple.isfinite(), at_a_time(static)
    for _ in range(math.ceil(min(MOST_TIGHTENED, simple.shape[1]) / together)):
        binding = conditions.required_radii(radii)
        candidates = binding.where(left, torch.inf)
        rows = (candidates.amin(1) < torch.inf) & (candidates.amin(1) <= binding.amin(1))
        if not static and not rows.any():
            break
        values, which = candidates.topk(min(together, simple.shape[1]), dim=1, largest=False)
        current, needed = radii.gather(1, which), values.isfinite() & rows.unsqueeze(1)  # not for finished tokens
        radii = radii.scatter(1, which, tighten(which).maximum(current).where(needed, current))
        left = left.scatter(1, which, left.gather(1, which) & ~needed)
    return radii


def bisect_largest(slack: Callable[[Tensor], Tensor], upper: Tensor, steps: int = 30) -> Tensor:
    """Return, by bisection up to `upper`, about the largest radius r at which `slack(r)` is positive; 0 if there is none.

    `slack` must decrease. The result of a bisection has no gradient, so r gets that of the equation slack(r) = 0 that it
    solves, or of `upper`:

        r - (slack(r) - constant) / slack'(r)     constant = slack(r) and slack'(r) without gradients
    """
    with torch.no_grad():
        low, high = torch.zeros_like(upper), upper
        for _ in range(steps):
            middle = (low + high) / 2
            good = slack(middle) > 0
            low, high = middle.where(good, low), high.where(good, middle)
    if not torch.is_grad_enabled():
        return low
    with torch.no_grad():
        step = STEP * upper
        slope = (slack(low + step) - slack(low - step)) / (2 * step)
        slope = slope.where(slope < 0, -torch.inf)
        is_upper = slack(upper) > 0
    value = slack(low)
    return low + torch.where(is_upper, upper - upper.detach(), (value.detach() - value) / slope)


def with_threshold(values: Tensor, threshold: float = 0.0) -> Tensor:
    """Append a column with the threshold, the key of index E: (T,E) becomes (T,E+1)."""
    return torch.cat([values, values.new_full((len(values), 1), threshold)], dim=1)


@final
class PlaneDistances(RadiusProblem):
    """Conditions on logits.

    sorted_by  what the router sorts: "logits", or "softmax" or "sigmoid", its gates. Gates have the order of the logits in
               real numbers, but rounding may make them equal
    """

    exact = True

    def __init__(self, scoring: Scoring, conditions: Conditions, sorted_by: str = "logits") -> None:
        super().__init__(scoring, conditions, with_threshold(scoring.planes.logits, conditions.threshold))
        self.sorted_by = sorted_by

    def to_token_radius(self, radius: Tensor) -> Tensor:
        return radius

    def errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        planes, errors = self.scoring.planes, self.scoring.plane_errors(arithmetic, reach)
        if self.sorted_by == "softmax":
            errors = errors + (SOFTMAX_ROUNDINGS + planes.experts) * unit(torch.float32)
        if self.sorted_by == "sigmoid":
            # Its slope is at least exp(-|l|) / 4, by which a rounding error of the gate is divided.
            farthest = planes.logits.abs() + (0 if reach is None else reach.unsqueeze(1) * planes.slopes)
            errors = errors + 64 * unit(torch.float32) * farthest.exp()
        return errors

    def radii(self, errors: Tensor | None) -> Tensor:
        planes = self.scoring.planes
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        gaps = self.margins
        if errors is not None:
            of_ahead, of_behind = self.conditions.sums(with_threshold(errors))
            gaps = gaps - of_ahead - of_behind
        radii = self.margins_over(planes.spans_between(ahead, behind) * ABOVE, gaps)
        if errors is not None and self.sorted_by == "softmax":
            below = planes.logits.amax(1, keepdim=True) - planes.logits
            room = (LOWEST - with_threshold(below).gather(1, ahead)) / planes.diameters.unsqueeze(1)
            radii = radii.minimum(room)
        return radii


@final
class ReluGates(RadiusProblem):
    """ReLU gates after an expert graph, g_j = sum_k a_jk relu(l_k): g_j > 0 while l_k > 0 for some k with a_jk > 0.

    The radius of condition j, which is about expert j, is the largest l_k / |w_k| of these k if j is selected, and the
    smallest -l_k / |w_k| if it is not.
    """

    def __init__(self, scoring: Scoring, conditions: Conditions, graph: Tensor) -> None:
        super().__init__(scoring, conditions, with_threshold(scoring.values.logits.clamp_min(0) @ graph.t()))
        self.linked = graph > 0  # (E,E)

    def radii(self, errors: Tensor | None) -> Tensor:
        values = self.scoring.values
        errors = torch.zeros_like(values.logits) if errors is None else errors
        slopes = values.slopes.clamp_min(torch.finfo(torch.float64).tiny) * ABOVE
        above, below = (values.logits - errors) / slopes, (-values.logits - errors) / slopes
        inside = above.unsqueeze(1).where(self.linked, -torch.inf).amax(-1)
        outside = below.unsqueeze(1).where(self.linked, torch.inf).amin(-1)
        radii = torch.where(self.conditions.chosen, inside, outside)
        return radii.gather(1, self.conditions.ahead.minimum(self.conditions.behind).squeeze(-1))
