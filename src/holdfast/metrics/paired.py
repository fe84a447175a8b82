"""Figures of routers with 95% intervals: means over seeds, paired differences of two routers, and costs of attacks.

An interval has two sources: other seeds would train other models, and other test examples would give other figures. The
seeds share one test set, so neither source contains the other. Let h_s = t_(n-1) s / sqrt(n) over n seeds, and let the
interval over examples of the mean over seeds (`per_example`) reach h_e from it. Then each end is sqrt(h_s^2 + h_e^2) away:

    3 seeds or more   "seeds and examples": the only interval from which a difference may be claimed
    fewer             "these models only": the interval over examples
    no examples       "these examples only": Student's t over 3 seeds or more, where results of single examples are not known
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.metrics.per_example import Blocks, Interval, read_per_example, t_quantile

FEWEST_SEEDS = 3  # of which the spread between seeds is estimated

Over = Literal["seeds and examples", "these models only", "these examples only"]
EVERYTHING: Over = "seeds and examples"  # the only interval from which something may be claimed
Score = Mapping[str, Any]  # of a model, as stored: "figure", and under "per_example" the results of single examples


@dataclass(frozen=True)
class Difference:
    """other - baseline, the mean over seeds, and its 95% interval; `over` says what that covers."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    over: Over | None = None  # None: there is no interval

    @property
    def kind(self) -> Literal["lower", "higher", "same", "unknown"]:
        """What may be claimed: "unknown" unless there is an interval over seeds and examples."""
        if self.low is None or self.high is None or self.over != EVERYTHING:
            return "unknown"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "same"

    @property
    def shows(self) -> float:
        """Half the width of the interval: a difference above it would have been shown."""
        assert self.low is not None and self.high is not None
        return (self.high - self.low) / 2

    def __neg__(self) -> "Difference":
        """Return baseline - other."""
        low, high = (None if end is None else 0.0 - end for end in (self.high, self.low))  # 0, not -0
        return replace(self, mean=0.0 - self.mean, low=low, high=high)

    @property
    def words(self) -> str:
        """The difference as text: `+1.2 (95% interval +0.8 to +1.6, 3 seeds)`, or `no difference (...)`."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.4g}, no interval"
        interval = f"95% interval {self.low:+.4g} to {self.high:+.4g}"
        if self.over == "these models only":
            return f"{self.mean:+.4g} ({interval}, {self.over})"
        seeds = f"{self.seeds} seeds"
        if self.over == "these examples only":
            return f"{self.mean:+.4g} ({interval}, {seeds}, {self.over})"
        if self.kind != "same":
            return f"{self.mean:+.4g} ({interval}, {seeds})"
        return f"no difference ({interval}, {seeds}; above {self.shows:.2g} would show)"

    def brief(self, digits: int) -> str:
        """Return the difference as text in two or three lines, for a narrow column."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.{digits}f}, no interval"
        only = "" if self.over == EVERYTHING else f",\n{self.over}"
        mean = "no difference" if self.kind == "same" else f"{self.mean:+.{digits}f}"
        return f"{mean}\n({self.low:+.{digits - 1}f} to {self.high:+.{digits - 1}f}){only}"

    def change(self, unit: str) -> tuple[str, str]:
        """Return the verb, and the size with its interval, of a difference that may be claimed."""
        assert self.low is not None and self.high is not None
        verb, low, high = ("lowered", -self.high, -self.low) if self.mean < 0 else ("raised", self.low, self.high)
        return verb, f"{abs(self.mean):.3g}{unit} (95% interval {low:.3g} to {high:.3g})"

    def summary(self) -> dict[str, Any]:
        """Return what to store as JSON."""
        return {**asdict(self), "words": self.words}


def paired(
    baseline: Sequence[float],
    other: Sequence[float],
    *,
    examples: Interval | None = None,
    bounds: Interval = (-math.inf, math.inf),
) -> Difference:
    """Return the mean of `other[i] - baseline[i]` over seeds i, with the interval that the module describes.

    examples    the interval over examples of this mean
    bounds      the smallest and the largest possible difference; the interval stays between them
    """
    if len(baseline) != len(other) or not baseline:
        raise ValueError(
            f"{len(baseline)} seeds of the baseline and {len(other)} of the other; expected the same seeds, at least one."
        )
    for name, values in (("baseline", baseline), ("other", other)):
        broken = [index for index, value in enumerate(values) if not math.isfinite(value)]
        if broken:
            raise ValueError(f"seed {broken[0]} of the {name} is {values[broken[0]]}; a diverged run has no difference.")
    differences = [after - before for before, after in zip(baseline, other, strict=True)]
    mean, seeds = statistics.fmean(differences), len(differences)
    over_seeds = 0.0
    if seeds >= FEWEST_SEEDS:
        over_seeds = t_quantile(seeds - 1) * statistics.stdev(differences) / math.sqrt(seeds)
    elif examples is None:
        return Difference(mean, None, None, seeds)
    below, above = (0.0, 0.0) if examples is None else (mean - examples[0], examples[1] - mean)
    low, high = mean - math.hypot(over_seeds, below), mean + math.hypot(over_seeds, above)
    over: Over = EVERYTHING if seeds >= FEWEST_SEEDS else "these models only"
    return Difference(
        mean, max(low, bounds[0]), min(high, bounds[1]), seeds, "these examples only" if examples is None else over
    )


def level_of(scores: Sequence[Score]) -> Difference | None:
    """Return the mean figure of the models of one router, with its interval; None if one of them has no figure."""
    figures = [score.get("figure") for score in scores]
    if not figures or None in figures:
        return None
    examples, bounds = over_examples(scores)
    return paired([0.0] * len(figures), figures, examples=examples, bounds=bounds)  # type: ignore[arg-type]


def difference_of(before: Sequence[Score], after: Sequence[Score]) -> Difference | None:
    """Return the difference of two routers, paired by seed and by example; None if a model has no figure."""
    figures = [[score.get("figure") for score in scores] for scores in (before, after)]
    if not before or None in (*figures[0], *figures[1]):
        return None
    examples, bounds = over_examples(before, after)
    return paired(*figures, examples=examples, bounds=bounds)  # type: ignore[arg-type]


def over_examples(*routers: Sequence[Score]) -> tuple[Interval | None, Interval]:
    """Return the interval over examples, and the bounds, of a router's mean figure, or of the second's minus the first's.

    There is no interval if a score lacks the results of single examples, or if they are not of the same examples.
    """
    found = [[read_per_example(score.get("per_example")) for score in scores] for scores in routers]
    each = [[one for one in scores if one is not None] for scores in found]
    kinds = {(type(one), len(one)) for scores in each for one in scores}
    if each != found or len(kinds) != 1:
        return None, (-math.inf, math.inf)
    kind, (low, high) = type(each[0][0]), each[0][0].bounds
    if len(each) == 1:
        return kind.level(each[0]), (low, high)
    return kind.difference(*each), (low - high, high - low)


@dataclass(frozen=True)
class Cost:
    """The mean rise of the loss per word, in nats, and its 95% interval, as in `Difference`.

    exp(mean) - 1 is the relative rise of the perplexity of these words.
    """

    mean: float
    low: float | None
    high: float | None
    over: Over | None = None
    blocks: Blocks | None = None  # of one model: the rises of single blocks of text

    @property
    def words(self) -> str:
        """The rise of the perplexity as text: `+2.1% (95% interval +1.9% to +2.4%)`."""
        if self.low is None or self.high is None:
            return f"{math.expm1(self.mean):+.2%}, no interval"
        low, high = math.expm1(self.low), math.expm1(self.high)
        only = f", {self.over}" if self.over != EVERYTHING else ""
        return f"{math.expm1(self.mean):+.2%} (95% interval {low:+.2%} to {high:+.2%}{only})"

    def summary(self) -> dict[str, Any]:
        """Return what to store as JSON; "figure" is the mean again, so that it can be compared as other scores are."""
        found = {"mean": self.mean, "low": self.low, "high": self.high, "over": self.over, "words": self.words}
        return found if self.blocks is None else {**found, "figure": self.mean, "per_example": self.blocks.stored()}


def block_losses(losses: Tensor, blocks: Tensor, count: int, *, perplexity: bool = True) -> Blocks:
    """Add up `losses (n,)` by block, of `count` blocks; losses of block -1 are skipped."""
    counted = blocks >= 0
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, blocks[counted], losses[counted].double())
    return Blocks(sums.numpy(), torch.bincount(blocks[counted], minlength=count).double().numpy(), perplexity)


def cost_of_attack(clean: Blocks, attacked: Blocks) -> Cost | None:
    """Return the mean difference over untouched words, None if there are none.

    A model reads each block on its own, so the blocks are the independent examples.
    """
    if not np.array_equal(clean.words, attacked.words):
        raise ValueError("the clean and the attacked text do not have the same words in every block.")
    kept = clean.words > 0
    rise = Blocks((attacked.losses - clean.losses)[kept], clean.words[kept], perplexity=False)
    if not len(rise) or not np.isfinite(rise.losses).all():
        return None
    found = paired([0.0], [rise.mean], examples=Blocks.level([rise]))
    return Cost(found.mean, found.low, found.high, found.over, rise)
