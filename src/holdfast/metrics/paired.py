"""Did it help? Paired differences over seeds, with an interval, and said in words."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Whether the interval leaves 0 out; None for one seed, which cannot tell."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high

    @property
    def words(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.4g} from one seed: no interval, so nothing can be said"
        interval = f"95% interval {self.low:+.4g} to {self.high:+.4g}, {self.seeds} seeds"
        return f"{self.mean:+.4g} ({interval})" if self.differs else f"no difference ({interval})"

    def __str__(self) -> str:
        return self.words


def paired(baseline: Sequence[float], other: Sequence[float]) -> Difference:
    """`other[i] - baseline[i]`, the i-th seed of each: mean +- t_(n-1) s / sqrt(n), s the sample standard deviation."""
    if len(baseline) != len(other) or not baseline:
        raise ValueError(
            f"{len(baseline)} seeds of the baseline and {len(other)} of the other; each seed needs both, one seed at least."
        )
    for name, values in (("baseline", baseline), ("other", other)):
        broken = [index for index, value in enumerate(values) if not math.isfinite(value)]
        if broken:
            raise ValueError(f"seed {broken[0]} of the {name} is {values[broken[0]]}; a run that broke has no difference.")
    differences = [after - before for before, after in zip(baseline, other, strict=True)]
    mean, seeds = statistics.fmean(differences), len(differences)
    if seeds == 1:
        return Difference(mean, None, None, seeds)
    half = student_quantile(seeds - 1) * statistics.stdev(differences) / math.sqrt(seeds)
    return Difference(mean, mean - half, mean + half, seeds)


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = confidence, for a whole number of degrees of freedom.

    For these the distribution is a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz & Stegun 26.7.3, 26.7.4),
    which is inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
