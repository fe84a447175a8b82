"""How far a token may be moved before one of its conditions can fail: for each condition a radius, and the least of them.

T tokens, M conditions a token
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.pairs import Pairs
from holdfast.certificates.scoring import Scoring

AT_A_TIME = 4  # conditions of a token whose bound is made tight together
ROUNDS = 16


class Nearest(NamedTuple):
    """The least radius (T,), and which condition (T,) it belongs to."""

    radius: Tensor
    which: Tensor


class Problem(ABC):
    """The conditions under which some tokens keep their sets (abstract)."""

    exact = False  # are the radii exact, up to rounding?

    def __init__(self, scoring: Scoring, pairs: Pairs, chosen: Tensor, margins: Tensor) -> None:
        self.scoring, self.pairs, self.chosen = scoring, pairs, chosen
        self.margins = margins  # (T,M): by how much conditions hold, in what the router compares

    @abstractmethod
    def radii(self, errors: Tensor | None) -> Tensor:
        """(T,M): below this, measured where `outward` takes it from, a condition holds.

        errors  (T,E): rounding may move each logit (or key of a plane) this far; None for real numbers
        """

    def nearest(self, errors: Tensor | None) -> Nearest:
        return least(self.radii(errors), self.pairs)

    def outward(self, radius: Tensor) -> Tensor:
        """A radius of `radii` as one around the tokens."""
        return self.scoring.outward(radius)

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        """(T,E): what rounding can do, at any token within `reach`."""
        return self.scoring.value_errors(arithmetic, reach)

    def spread(self, errors: Tensor) -> Tensor:
        """Errors of logits (T,E) as `radii` takes them."""
        return errors

    def bounds(self) -> dict[str, Tensor]:
        """Other bounds that are known for the same tokens (T,), in real numbers."""
        return {}


def least(radii: Tensor, pairs: Pairs) -> Nearest:
    """The least radius of each token's conditions; infinite where there is none."""
    if radii.shape[1] == 0:
        none = radii.new_full((len(radii),), torch.inf)
        return Nearest(none, torch.zeros_like(none, dtype=torch.int64))
    radius, which = pairs.settled(radii).min(1)
    return Nearest(radius.clamp_min(0), which)


def tightened(cheap: Tensor, pairs: Pairs, tighten: Callable[[Tensor], Tensor]) -> Tensor:
    """Radii (T,M), at least the `cheap` ones, tight where it matters.

    Tight bounds are dear, and only the least radius of a token counts: so the smallest are made tight, a few at a time,
    until a tight one is the least. Every bound is sound, so it does no harm to stop early.
    """
    radii, left = cheap, cheap.isfinite()
    for _ in range(ROUNDS if cheap.shape[1] else 0):
        binding = pairs.settled(radii)
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
