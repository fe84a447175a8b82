"""Paired comparisons with 95% intervals: of two routers over seeds, and of clean and attacked losses over untouched words.

difference of routers   other - baseline, the mean over seeds
cost of an attack       attacked - clean loss of each untouched word, the mean over words
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """other - baseline, the mean over seeds, and its 95% interval (Student's t); no interval for one seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def differs(self) -> bool | None:
        """Whether the interval excludes 0; None for one seed, which has no interval."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high

    @property
    def words(self) -> str:
        """The difference as text: `+1.2 (95% interval +0.8 to +1.6, 3 seeds)`, or `no difference (...)`."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.4g} from one seed: no interval, so nothing can be concluded"
        interval = f"95% interval {self.low:+.4g} to {self.high:+.4g}, {self.seeds} seeds"
        return f"{self.mean:+.4g} ({interval})" if self.differs else f"no difference ({interval})"

    def __str__(self) -> str:
        return self.words


def paired(baseline: Sequence[float], other: Sequence[float]) -> Difference:
    """Return the mean of `other[i] - baseline[i]` over seeds i: mean +- t_(n-1) s / sqrt(n), s the standard deviation."""
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
    if seeds == 1:
        return Difference(mean, None, None, seeds)
    half = student_quantile(seeds - 1) * statistics.stdev(differences) / math.sqrt(seeds)
    return Difference(mean, mean - half, mean + half, seeds)


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(|T| <= t) = confidence, for a whole number of degrees of freedom.

    The distribution is then a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz & Stegun 26.7.3, 26.7.4), which
    is inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return P(|T| <= sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


MANY = 1000  # degrees of freedom; with more, Student's t is the normal distribution to three digits


@dataclass(frozen=True)
class Cost:
    """The mean rise of the loss per word, in nats, and its 95% interval; no interval for one block and one seed.

    exp(mean) - 1 is the relative rise of the perplexity of these words.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        """The rise of the perplexity as text: `+2.1% (95% interval +1.9% to +2.4%)`."""
        if self.low is None or self.high is None:
            return f"{math.expm1(self.mean):+.2%}, no interval"
        low, high = math.expm1(self.low), math.expm1(self.high)
        return f"{math.expm1(self.mean):+.2%} (95% interval {low:+.2%} to {high:+.2%})"

    def summary(self) -> dict[str, Any]:
        """Return what to store as JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "words": self.words}


@dataclass(frozen=True)
class BlockLosses:
    """Sums of losses and numbers of words of each block of text."""

    sums: Tensor  # (B,) float64
    counts: Tensor  # (B,) int64

    @classmethod
    def of(cls, losses: Tensor, blocks: Tensor, count: int) -> "BlockLosses":
        """Add up `losses (n,)` by block, of `count` blocks; losses of block -1 are skipped."""
        counted = blocks >= 0
        sums = torch.zeros(count, dtype=torch.float64).index_add_(0, blocks[counted], losses[counted].double())
        return cls(sums, torch.bincount(blocks[counted], minlength=count))


def cost_of_attack(clean: BlockLosses, attacked: BlockLosses) -> Cost | None:
    """Return the mean difference over untouched words, None if there are none.

    A model reads each block on its own, so the differences d_b of blocks (of n_b words) are independent: with m =
    sum d_b / sum n_b, the standard error is sqrt(B / (B - 1) sum (d_b - m n_b)^2) / sum n_b, the interval Student's t.
    """
    if not torch.equal(clean.counts, attacked.counts):
        raise ValueError("the clean and the attacked text do not have the same words in every block.")
    counts = clean.counts[clean.counts > 0].double()
    differences = (attacked.sums - clean.sums)[clean.counts > 0]
    if not len(counts) or not bool(differences.isfinite().all()):
        return None
    total, blocks = float(counts.sum()), len(counts)
    mean = float(differences.sum()) / total
    if blocks == 1:
        return Cost(mean, None, None)
    spread = float((differences - mean * counts).square().sum()) * blocks / (blocks - 1)
    half = student_quantile(min(blocks - 1, MANY)) * math.sqrt(spread) / total
    return Cost(mean, mean - half, mean + half)


def cost_over_seeds(costs: Sequence[Cost]) -> Cost:
    """Return the mean over seeds, with the wider of two intervals: over seeds, and over blocks of text (mean over seeds).

    The seeds share one attacked text, so their intervals over blocks do not shrink with their number.
    """
    over_seeds = paired([0.0] * len(costs), [cost.mean for cost in costs])
    mean = over_seeds.mean
    halves = [(cost.high - cost.low) / 2 for cost in costs if cost.low is not None and cost.high is not None]
    widths = [sum(halves) / len(halves)] if len(halves) == len(costs) else []
    if over_seeds.high is not None:
        widths.append(over_seeds.high - mean)
    return Cost(mean, mean - max(widths), mean + max(widths)) if widths else Cost(mean, None, None)
