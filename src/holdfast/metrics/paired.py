"""Figures of routers with 95% intervals: means over seeds, paired differences of two routers, and costs of attacks.

An interval has two sources: other seeds would train other models, and other test examples would give other figures. The
seeds share one test set, so neither source contains the other. Let h_s = t_(n-1) s / sqrt(n) over n seeds, and let the
interval over examples of the mean over seeds reach h_e from it. Then each end is sqrt(h_s^2 + h_e^2) away:

    3 seeds or more   "seeds and examples": the only interval from which a difference may be claimed
    fewer             "these models only": the interval over examples
    no examples       "these examples only": Student's t over 3 seeds or more, where results of single examples are not known

The interval over examples follows from what a trained model got on each test example (`PerExample`):

    Shares        of wrong answers: Wilson's interval, and Newcombe's of a paired difference (method 10 of "Improved
                  confidence intervals for the difference between binomial proportions based on paired data", 1998)
    Blocks        losses of blocks of text: Student's t over blocks, for perplexities by the delta method
    Predictions   for metrics of all labels together (F1, correlations): percentiles over examples drawn with replacement

The models of one router, one for each seed, share the test examples. So their values are averaged example by example before
the interval is computed: it does not shrink as if each seed had examples of its own.

n examples
"""

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.metrics.tasks import label_metric

CONFIDENCE = 0.95
DIGITS = 6  # of stored numbers, after the point
FEWEST_SEEDS = 3  # of which the spread between seeds is estimated
RESAMPLES = 1000

Interval = tuple[float, float]
Numbers = npt.NDArray[np.float64]  # (n,)
Over = Literal["seeds and examples", "these models only", "these examples only"]
EVERYTHING: Over = "seeds and examples"  # the only interval from which something may be claimed
Score = Mapping[str, Any]  # of a model, as stored: "figure", and under "per_example" the results of single examples


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
    def interval(cls, models: Sequence[Self], baseline: Sequence[Self] = ()) -> Interval | None:
        """Return the interval over examples of the mean figure of these models; None if it is not defined.

        With the models of a `baseline`, it is the interval of the mean figure minus that of the baseline, paired by example.
        """


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
    def interval(cls, models: Sequence[Self], baseline: Sequence[Self] = ()) -> Interval:
        shares, *others = (np.mean([one.wrong for one in each], axis=0) for each in (models, baseline) if each)
        low, high = newcombe(others[0], shares, seeds=len(models)) if others else _wilson(shares, len(models))
        return 100 * low, 100 * high


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

    @classmethod
    def interval(cls, models: Sequence[Self], baseline: Sequence[Self] = ()) -> Interval | None:
        """Return f -+ t sqrt(B / (B - 1) sum z_b^2), f the figure and z its `_influence` of B blocks; None for one block."""
        figure = sum(one._figure for one in models) / len(models)
        influence: Numbers = np.mean([one._influence for one in models], axis=0)
        if baseline:
            figure -= sum(one._figure for one in baseline) / len(baseline)
            influence = influence - np.mean([one._influence for one in baseline], axis=0)
        blocks = len(influence)
        if blocks < 2:
            return None
        half = t_quantile(blocks - 1) * math.sqrt(blocks / (blocks - 1) * float((influence**2).sum()))
        return figure - half, figure + half

    @property
    def _figure(self) -> float:
        return math.exp(self.mean) if self.perplexity else self.mean

    @property
    def _influence(self) -> Numbers:
        """How much each block moves the figure from its mean: f'(m) (s_b - m n_b) / sum n_b."""
        slope = math.exp(self.mean) if self.perplexity else 1.0
        return slope * (self.losses - self.mean * self.words) / self.words.sum()


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

    @classmethod
    def interval(cls, models: Sequence[Self], baseline: Sequence[Self] = ()) -> Interval | None:
        """Return None if there are fewer than two examples, or if the metric is not defined for half of the draws."""
        examples = len(models[0])
        if examples < 2:
            return None
        draw, figures = np.random.default_rng(0), []
        for _ in range(RESAMPLES):
            drawn = draw.integers(examples, size=examples)
            mean, *others = (np.mean([one._figure(drawn) for one in each]) for each in (models, baseline) if each)
            figures.append(mean - others[0] if others else mean)
        defined = np.array(figures)[np.isfinite(figures)]
        if len(defined) < RESAMPLES // 2:
            return None
        low, high = np.quantile(defined, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)

    def _figure(self, drawn: npt.NDArray[np.int64]) -> float:
        return label_metric(self.metric, self.predicted[drawn], self.labels[drawn])


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
        notes = [f"95% interval {self.low:+.4g} to {self.high:+.4g}"]
        notes += [] if self.over == "these models only" else [f"{self.seeds} seeds"]
        notes += [] if self.over == EVERYTHING else [str(self.over)]
        if self.kind == "same":
            return f"no difference ({', '.join(notes)}; above {self.shows:.2g} would show)"
        return f"{self.mean:+.4g} ({', '.join(notes)})"

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
        counts = f"{len(baseline)} seeds of the baseline and {len(other)} of the other"
        raise ValueError(f"{counts}; expected the same seeds, at least one.")
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
    over: Over = "these examples only" if examples is None else EVERYTHING if seeds >= FEWEST_SEEDS else "these models only"
    return Difference(mean, max(low, bounds[0]), min(high, bounds[1]), seeds, over)


def level_of(scores: Sequence[Score]) -> Difference | None:
    """Return the mean figure of the models of one router, with its interval; None if one of them has no figure."""
    return difference_of(None, scores)


def difference_of(before: Sequence[Score] | None, after: Sequence[Score]) -> Difference | None:
    """Return the difference of two routers, paired by seed and by example; None if a model has no figure.

    `before=None` means 0 for each seed: the result is the mean figure of `after`.
    """
    routers = [after] if before is None else [before, after]
    *others, figures = [[score.get("figure") for score in scores] for scores in routers]
    if not figures or None in itertools.chain(figures, *others):
        return None
    examples, bounds = over_examples(*routers)
    return paired(others[0] if others else [0.0] * len(figures), figures, examples=examples, bounds=bounds)  # type: ignore[arg-type]


def over_examples(*routers: Sequence[Score]) -> tuple[Interval | None, Interval]:
    """Return the interval over examples, and the bounds, of a router's mean figure, or of the second's minus the first's.

    There is no interval if a score lacks the results of single examples, or if they are not of the same examples.
    """
    found = [[read_per_example(score.get("per_example")) for score in scores] for scores in routers]
    each = [[one for one in scores if one is not None] for scores in found]
    kinds = {(type(one), len(one)) for scores in each for one in scores}
    if each != found or len(kinds) != 1:
        return None, (-math.inf, math.inf)
    low, high = each[0][0].bounds
    interval = type(each[0][0]).interval(*reversed(each))
    return interval, (low, high) if len(each) == 1 else (low - high, high - low)


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
    found = paired([0.0], [rise.mean], examples=Blocks.interval([rise]))
    return Cost(found.mean, found.low, found.high, found.over, rise)
