"""`RadiusProblem`: up to which perturbation the conditions of a token are satisfied; and the problems with planes.

If the decision boundaries are planes (`PlaneDistances`), the radius is exact:

    r = min over the conditions of (l_i - l_j) / |w_i - w_j|_*        * the dual norm; l_j = t and w_j = 0 for a threshold t

This covers the top k of logits, or of any increasing function of each logit; of cosines, with the planes z.(e_i - e_j) = 0;
and ReMoE's ReLU, with the planes l_e = 0. The set changes at the nearest plane: all other conditions are satisfied there.

T tokens, E experts, M conditions per token
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.score_geometry import Scoring
from holdfast.routing.bounds import ABOVE, unit
from holdfast.routing.declarations import Conditions

SOFTMAX_ROUNDINGS = 224  # of exp(l - max) / sum: u |l - max| <= 104 u twice, and a few; E more for the sum
LOWEST = 80.0  # logits this far below the largest have a float32 gate of 0
AT_A_TIME = 4  # conditions of a token that are tightened together
ROUNDS = 16  # of tightening, at most


class Nearest(NamedTuple):
    """The smallest radius (T,), and the index (T,) of its condition."""

    radius: Tensor
    which: Tensor


class RadiusProblem(ABC):
    """The conditions under which some tokens keep their selected sets (abstract)."""

    exact = False  # whether the radii are exact, up to rounding

    def __init__(self, scoring: Scoring, conditions: Conditions, margins: Tensor) -> None:
        self.scoring, self.conditions = scoring, conditions
        self.margins = margins  # (T,M): left side minus right side of each condition, in what the router compares

    @abstractmethod
    def radii(self, errors: Tensor | None) -> Tensor:
        """Return (T,M) radii below which each condition is satisfied; `to_token_radius` converts them to radii of tokens.

        errors  (T,E): the largest rounding error of each logit (or key of a plane); None for real numbers
        """

    def nearest(self, errors: Tensor | None) -> Nearest:
        """Return the smallest radius of each token."""
        return smallest_radius(self.radii(errors), self.conditions)

    def to_token_radius(self, radius: Tensor) -> Tensor:
        """Convert a radius of `radii` to a radius around the tokens."""
        return self.scoring.to_token_radius(radius)

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        """Return the largest rounding errors (T,E) at any token within `reach`."""
        return self.scoring.value_errors(arithmetic, reach)

    def errors_at_tokens(self, arithmetic: Arithmetic) -> Tensor:
        """Return the largest rounding errors (T,E) at the unperturbed tokens."""
        return self.scoring.value_errors_at_tokens(arithmetic)

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


def tighten_smallest(simple: Tensor, conditions: Conditions, tighten: Callable[[Tensor], Tensor]) -> Tensor:
    """Return radii (T,M) that are at least the `simple` ones, and tight where it matters.

    Tight bounds are expensive, and only the smallest radius of a token counts. So the smallest are tightened, a few at a
    time, until a tight one is the smallest. Every bound is sound, so stopping early is safe.
    """
    radii, left = simple, simple.isfinite()
    for _ in range(ROUNDS if simple.shape[1] else 0):
        binding = conditions.required_radii(radii)
        candidates = binding.where(left, torch.inf)
        rows = (candidates.amin(1) < torch.inf) & (candidates.amin(1) <= binding.amin(1))
        if not rows.any():
            break
        values, which = candidates.topk(min(AT_A_TIME, simple.shape[1]), dim=1, largest=False)
        current, needed = radii.gather(1, which), values.isfinite() & rows.unsqueeze(1)  # not for finished tokens
        radii = radii.scatter(1, which, tighten(which).maximum(current).where(needed, current))
        left = left.scatter(1, which, left.gather(1, which) & ~needed)
    return radii


def bisect_largest(is_satisfied: Callable[[Tensor], Tensor], upper: Tensor, steps: int = 30) -> Tensor:
    """Return, by bisection up to `upper`, about the largest radius at which `is_satisfied` is True; 0 if there is none.

    `is_satisfied` must be True up to some radius and False beyond it.
    """
    low, high = torch.zeros_like(upper), upper
    for _ in range(steps):
        middle = (low + high) / 2
        good = is_satisfied(middle)
        low, high = middle.where(good, low), high.where(good, middle)
    return low


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
        ahead, behind = conditions.sums(with_threshold(scoring.planes.logits, conditions.threshold))
        super().__init__(scoring, conditions, ahead - behind)
        self.sorted_by = sorted_by

    def to_token_radius(self, radius: Tensor) -> Tensor:
        return radius

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        planes = self.scoring.planes
        errors = self.scoring.plane_errors(arithmetic, reach)
        if self.sorted_by == "softmax":
            errors = errors + (SOFTMAX_ROUNDINGS + planes.experts) * unit(torch.float32)
        if self.sorted_by == "sigmoid":
            # Its slope is at least exp(-|l|) / 4, by which a rounding error of the gate is divided.
            errors = errors + 64 * unit(torch.float32) * (planes.logits.abs() + reach.unsqueeze(1) * planes.slopes).exp()
        return errors

    def errors_at_tokens(self, arithmetic: Arithmetic) -> Tensor:
        # If gates are sorted, their rounding errors are added to those of the logits.
        nowhere = torch.zeros_like(self.scoring.planes.points[:, 0])
        in_reals = Arithmetic(torch.float64, torch.float64)
        return self.errors(in_reals, nowhere) + self.scoring.plane_errors_at_tokens(arithmetic)

    def radii(self, errors: Tensor | None) -> Tensor:
        planes = self.scoring.planes
        ahead, behind = self.conditions.ahead[..., 0], self.conditions.behind[..., 0]
        gaps = self.margins
        if errors is not None:
            of_ahead, of_behind = self.conditions.sums(with_threshold(errors))
            gaps = gaps - of_ahead - of_behind
        spans = planes.spans_between(ahead, behind)
        never = (gaps > 0) | ((gaps == 0) & self.conditions.ties_hold)
        radii = (gaps / (spans * ABOVE)).where(spans > 0, torch.where(never, torch.inf, 0.0))
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
