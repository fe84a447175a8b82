"""What a trained model got on each test example, and the 95% intervals over examples that follow from it.

    Shares        of wrong answers: Wilson's interval, and Newcombe's of a paired difference (method 10 of "Improved
                  confidence intervals for the difference between binomial proportions based on paired data", 1998)
    Blocks        losses of blocks of text: Student's t over blocks, for perplexities by the delta method
    Predictions   for metrics of all labels together (F1, correlations): percentiles over examples drawn with replacement

The models of one router, one for each seed, share the test examples. So their values are averaged example by example before
the interval is computed: it does not shrink as if each seed had examples of its own.

n examples
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

from holdfast.errors import require_extra
from holdfast.metrics.labels import label_metric, resampled_interval

CONFIDENCE = 0.95
DIGITS = 6  # of stored numbers, after the point

Interval = tuple[float, float]
Numbers = npt.NDArray[np.float64]  # (n,)


def t_quantile(freedom: float) -> float:
    """Return t with P(|T| <= t) = 0.95 for Student's t; infinitely many degrees of freedom are the normal distribution."""
    require_extra("computing intervals", "scipy")
    from scipy.special import ndtri, stdtrit

    half = (1 + CONFIDENCE) / 2
    return float(ndtri(half) if math.isinf(freedom) else stdtrit(freedom, half))


class PerExample(ABC):
    """The results of one model on every test example (abstract)."""

    @property
    @abstractmethod
    def bounds(self) -> Interval:
        """The smallest and the largest possible value of the figure."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def stored(self) -> dict[str, Any]:
        """Return what to store as JSON, for `read_per_example`."""

    @classmethod
    @abstractmethod
    def level(cls, seeds: Sequence[Self]) -> Interval | None:
        """Return the interval over examples of the mean figure of these models; None if it is not defined."""

    @classmethod
    @abstractmethod
    def difference(cls, before: Sequence[Self], after: Sequence[Self]) -> Interval | None:
        """Return the interval over examples of the mean figure `after` minus that `before`, paired by example."""


@final
@dataclass(frozen=True)
class Shares(PerExample):
    """The share of wrong answers to each example, 0 or 1 if there is one answer; the figure is 100 times their mean."""

    wrong: Numbers
    bounds = (0.0, 100.0)

    def __len__(self) -> int:
        return len(self.wrong)

    def stored(self) -> dict[str, Any]:
        if not np.isin(self.wrong, (0, 1)).all():
            return {"shares": self.wrong.round(DIGITS).tolist()}
        return {"wrong": np.packbits(self.wrong.astype(bool)).tobytes().hex(), "examples": len(self)}

    @classmethod
    def level(cls, seeds: Sequence[Self]) -> Interval:
        low, high = _wilson(_mean(seeds), len(seeds))
        return 100 * low, 100 * high

    @classmethod
    def difference(cls, before: Sequence[Self], after: Sequence[Self]) -> Interval:
        low, high = newcombe(_mean(before), _mean(after), seeds=len(after))
        return 100 * low, 100 * high


def _mean(seeds: Sequence[Shares]) -> Numbers:
    found: Numbers = np.mean([one.wrong for one in seeds], axis=0)
    return found


def wilson(share: float, count: float) -> Interval:
    """Return Wilson's interval of a share among `count` examples."""
    z = t_quantile(math.inf)
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def _wilson(shares: Numbers, seeds: int) -> Interval:
    """Return Wilson's interval of the mean of shares, which are means over seeds.

    Means over seeds vary less than zeros and ones, so they count as more examples: n p (1 - p) / variance, at most n seeds.
    """
    share, variance = float(shares.mean()), float(shares.var())
    most, count = seeds * len(shares), len(shares) * share * (1 - share)
    return wilson(share, min(most, count / variance) if variance > 0 else most if count > 0 else len(shares))


def newcombe(before: Numbers, after: Numbers, *, seeds: int = 1) -> Interval:
    """Return Newcombe's interval of the mean of `after` minus that of `before`, shares of the same examples.

    With Wilson's intervals (l, u) of both means p and the correlation r over examples, the lower end is p_a - p_b -
    sqrt((p_a - l_a)^2 - 2 r (p_a - l_a) (u_b - p_b) + (u_b - p_b)^2). A positive covariance is lowered by 1 / 2n first, at
    most to 0.
    """
    (low_b, high_b), (low_a, high_a) = _wilson(before, seeds), _wilson(after, seeds)
    mean_b, mean_a = float(before.mean()), float(after.mean())
    covariance = float(((before - mean_b) * (after - mean_a)).mean())
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * len(before)))
    spread = float(before.std() * after.std())
    correlation = covariance / spread if spread > 0 else 0.0

    def width(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))

    mean = mean_a - mean_b
    return mean - width(mean_a - low_a, high_b - mean_b), mean + width(high_a - mean_a, mean_b - low_b)


@final
@dataclass(frozen=True)
class Blocks(PerExample):
    """Sums of losses over the words of each block of text; the figure is their mean per word, or its exponential."""

    losses: Numbers
    words: Numbers
    perplexity: bool = True

    @property
    def bounds(self) -> Interval:
        return (1.0 if self.perplexity else -math.inf), math.inf

    @property
    def mean(self) -> float:
        """The mean loss per word."""
        return float(self.losses.sum() / self.words.sum())

    def __len__(self) -> int:
        return len(self.losses)

    def stored(self) -> dict[str, Any]:
        words = self.words.astype(int).tolist()
        return {"losses": self.losses.round(DIGITS).tolist(), "words": words, "perplexity": self.perplexity}

    def _influence(self) -> Numbers:
        """Return how much each block moves the figure from its mean: f'(m) (s_b - m n_b) / sum n_b."""
        slope = math.exp(self.mean) if self.perplexity else 1.0
        return slope * (self.losses - self.mean * self.words) / self.words.sum()

    @classmethod
    def level(cls, seeds: Sequence[Self]) -> Interval | None:
        figures = [math.exp(one.mean) if one.perplexity else one.mean for one in seeds]
        return _student(sum(figures) / len(figures), np.mean([one._influence() for one in seeds], axis=0))

    @classmethod
    def difference(cls, before: Sequence[Self], after: Sequence[Self]) -> Interval | None:
        figures = [[math.exp(one.mean) if one.perplexity else one.mean for one in each] for each in (before, after)]
        mean = sum(figures[1]) / len(after) - sum(figures[0]) / len(before)
        influences = [np.mean([one._influence() for one in each], axis=0) for each in (before, after)]
        return _student(mean, influences[1] - influences[0])


def _student(mean: float, influence: Numbers) -> Interval | None:
    """Return mean -+ t sqrt(B / (B - 1) sum z_b^2), of B blocks; None for one block."""
    blocks = len(influence)
    if blocks < 2:
        return None
    half = t_quantile(blocks - 1) * math.sqrt(blocks / (blocks - 1) * float((influence**2).sum()))
    return mean - half, mean + half


@final
@dataclass(frozen=True)
class Predictions(PerExample):
    """Predicted and right labels; the figure is a metric of all of them."""

    metric: str
    predicted: npt.NDArray[Any]
    labels: npt.NDArray[Any]

    @property
    def bounds(self) -> Interval:
        return (0.0 if "f1" in self.metric else -1.0), 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def stored(self) -> dict[str, Any]:
        return {"metric": self.metric, "predicted": self.predicted.tolist(), "labels": self.labels.tolist()}

    def _at(self, drawn: npt.NDArray[Any]) -> float:
        return label_metric(self.metric, self.predicted[drawn], self.labels[drawn])

    @classmethod
    def level(cls, seeds: Sequence[Self]) -> Interval | None:
        return resampled_interval(lambda drawn: float(np.mean([one._at(drawn) for one in seeds])), len(seeds[0]))

    @classmethod
    def difference(cls, before: Sequence[Self], after: Sequence[Self]) -> Interval | None:
        def change(drawn: npt.NDArray[Any]) -> float:
            return float(np.mean([one._at(drawn) for one in after]) - np.mean([one._at(drawn) for one in before]))

        return resampled_interval(change, len(after[0]))


def read_per_example(stored: Mapping[str, Any] | None) -> PerExample | None:
    """Return what `PerExample.stored` returned; None for None."""
    if stored is None:
        return None
    if "wrong" in stored:
        packed = np.frombuffer(bytes.fromhex(stored["wrong"]), dtype=np.uint8)
        return Shares(np.unpackbits(packed, count=stored["examples"]).astype(np.float64))
    if "shares" in stored:
        return Shares(np.array(stored["shares"], dtype=np.float64))
    if "losses" in stored:
        losses, words = (np.array(stored[key], dtype=np.float64) for key in ("losses", "words"))
        return Blocks(losses, words, stored["perplexity"])
    return Predictions(stored["metric"], np.array(stored["predicted"]), np.array(stored["labels"]))
