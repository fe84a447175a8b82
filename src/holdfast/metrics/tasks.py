"""Metrics of tasks: how well a model predicts tokens or classifies images.

    Accuracy                                    whether the right class is among the k largest logits
    Perplexity, WordPerplexity, BitsPerByte     the same sum of negative log-likelihoods per token, word or byte
    AnomalyPrecision                            detection of unknown classes, as ImageNet-O defines it
    MeanCorruptionError                         errors under common corruptions, relative to a baseline's

Values per word or per byte can be compared between tokenisers; values per token cannot, because tokens differ.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.errors import unknown_name
from holdfast.metrics.accumulator import Accumulator, real_rows


class Accuracy(Accumulator[float]):
    """The share of examples whose target is among the `k` largest logits; k=1 is accuracy, k=5 top-5 accuracy.

    Ties go to the lower class, as in `argmax`. Logits that are NaN rank above everything, so a model with NaN scores 0.
    """

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1.")
        self.k = k

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.k,)

    def update(self, logits: Tensor, targets: Tensor, token_mask: Tensor | None = None) -> None:
        """Add `logits (...,C)` and `targets (...)`, of tokens or of whole examples."""
        right = in_top_k(logits, targets, self.k, token_mask)
        self._add(right=right.sum(), examples=right.numel())

    def result(self) -> float:
        return self._mean("right", "examples")


@torch.no_grad()
def in_top_k(logits: Tensor, targets: Tensor, k: int = 1, token_mask: Tensor | None = None) -> Tensor:
    """Return (R,) bool for each real example: whether its target is among the k largest logits."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; expected targets of shape "
            f"{tuple(logits.shape[:-1])}, one class for each row."
        )
    rows, targets = real_rows(logits.reshape(-1, logits.shape[-1]), token_mask), real_rows(targets.reshape(-1), token_mask)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < rows.shape[1]:
        raise ValueError(
            f"targets run from {int(targets.min())} to {int(targets.max())}, but there are {rows.shape[1]} classes; "
            "set token_mask to False for targets that are not scored."
        )
    own = rows.gather(1, targets.unsqueeze(1))
    ahead = ~(rows <= own)  # not `rows > own`: with NaN, a target must not count as the largest
    earlier = torch.arange(rows.shape[1], device=rows.device) < targets.unsqueeze(1)
    return (ahead | ((rows == own) & earlier)).sum(1) < k


IGNORED = -100  # transformers' label of targets that are not scored


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(logits)[target] in float32, from `logits (...,V)` and `targets (...)`; 0 if a target is -100.

    Nothing is shifted: the logits at a position must predict the target at that position. Pass `targets != -100` to metrics
    as `token_mask`.
    """
    flat = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), reduction="none", ignore_index=IGNORED
    )
    return flat.view(targets.shape)


class Perplexity(Accumulator[float]):
    """exp(total nll / number of tokens)."""

    def update(self, nll: Tensor, token_mask: Tensor | None = None) -> None:
        """Add `nll`, the nats of each token, for example from `token_nll`."""
        nll = real_rows(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel())

    def result(self) -> float:
        return _exp(self._mean("nll"))


class WordPerplexity(Accumulator[float]):
    """exp(total nll / number of words), the word-level perplexity for tokenisers that split words."""

    def update(self, nll: Tensor, words: int, token_mask: Tensor | None = None) -> None:
        """Add the nats of tokens; `words` is the number of words of their text."""
        nll = real_rows(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel(), words=words)

    def result(self) -> float:
        return _exp(self._mean("nll", "words"))


class BitsPerByte(Accumulator[float]):
    """total nll / (ln 2 * number of bytes), which enwik8 calls bits per character."""

    def update(self, nll: Tensor, byte_count: int, token_mask: Tensor | None = None) -> None:
        """Add the nats of tokens; `byte_count` is the number of UTF-8 bytes of their text."""
        nll = real_rows(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel(), bytes=byte_count)

    def result(self) -> float:
        return self._mean("nll", "bytes") / math.log(2)


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


class AnomalyPrecision:
    """AUPR = sum_n (R_n - R_(n-1)) P_n over decreasing thresholds n (Hendrycks et al. 2021, ImageNet-O).

    The anomaly score is minus the largest softmax probability and out-of-distribution is the positive class. The curve needs
    every score, so that unlike other metrics it stores 9 bytes per example.
    """

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._positive: list[Tensor] = []

    def update(self, logits: Tensor, out_of_distribution: Tensor | bool, token_mask: Tensor | None = None) -> None:
        """Add `logits (...,C)`; `out_of_distribution (...)` is bool, or one bool for all."""
        rows = logits.detach().reshape(-1, logits.shape[-1])
        positive = torch.as_tensor(out_of_distribution, dtype=torch.bool).cpu().expand(logits.shape[:-1]).reshape(-1)
        rows, positive = real_rows(rows, token_mask), real_rows(positive, token_mask)
        scores = -torch.softmax(rows.double(), dim=-1).amax(-1).cpu()
        if scores.isnan().any():
            raise ValueError(f"{int(scores.isnan().sum())} examples have NaN or infinite logits; they cannot be ranked.")
        self._scores.append(scores)
        self._positive.append(positive)

    def merge(self, other: Self) -> Self:
        """Add the data of `other`; change and return this metric."""
        self._scores += other._scores
        self._positive += other._positive
        return self

    def result(self) -> float:
        scores = torch.cat([torch.empty(0, dtype=torch.float64), *self._scores])
        positive = torch.cat([torch.empty(0, dtype=torch.bool), *self._positive])
        found = int(positive.sum())
        if found in (0, len(positive)):
            raise ValueError(
                f"AnomalyPrecision has {found} out-of-distribution examples and {len(positive) - found} others; "
                "it needs both kinds."
            )
        scores, order = scores.sort(descending=True)
        last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores share a threshold
        caught = positive[order].cumsum(0)[last].double()
        flagged = (torch.arange(len(scores)) + 1)[last]
        gained = torch.diff(caught, prepend=torch.zeros(1, dtype=torch.float64))
        return float((gained * caught / flagged).sum() / found)


# AlexNet's top-1 errors on ImageNet-C in per cent, means over the five severities (Hendrycks & Dietterich 2019). They are
# divisors for ImageNet-C only; on other data, divide by the errors of a baseline on that data.
ALEXNET_ERRORS: Mapping[str, float] = {
    "gaussian_noise": 88.6,
    "shot_noise": 89.4,
    "impulse_noise": 92.3,
    "defocus_blur": 82.0,
    "glass_blur": 82.6,
    "motion_blur": 78.6,
    "zoom_blur": 79.8,
    "snow": 86.7,
    "frost": 82.7,
    "fog": 81.9,
    "brightness": 56.5,
    "contrast": 85.3,
    "elastic_transform": 64.6,
    "pixelate": 71.8,
    "jpeg_compression": 60.7,
}
ALEXNET_CLEAN_ERROR = 43.5  # on ImageNet's own validation images, in per cent


class MeanCorruptionError(Accumulator[float]):
    """mCE = 100 * mean_c ( mean_s error_cs / baseline_c ), in per cent as published; lower is better; the baseline has 100.

    `baseline` has the baseline's error on each corruption in per cent, averaged over severities: `ALEXNET_ERRORS` for
    ImageNet-C, another run's `errors()` for other data. A mean over fewer corruptions or severities than the baseline's is
    another metric, so `result()` raises ValueError unless all are present.
    """

    def __init__(self, baseline: Mapping[str, float], *, severities: Iterable[int] = (1, 2, 3, 4, 5)) -> None:
        super().__init__()
        self.baseline, self.severities = dict(baseline), tuple(severities)
        if not self.baseline or not self.severities:
            raise ValueError("mCE needs a baseline error for at least one corruption, and at least one severity.")
        for corruption, error in self.baseline.items():
            if not 0 < error <= 100:
                raise ValueError(
                    f"the baseline's error on {corruption} is {error}; expected a percentage above 0 and up to 100."
                )

    @property
    def settings(self) -> tuple[object, ...]:
        return (tuple(sorted(self.baseline.items())), self.severities)

    def update(
        self, corruption: str, severity: int, logits: Tensor, targets: Tensor, token_mask: Tensor | None = None
    ) -> None:
        """Add `logits (...,C)` of corrupted images and their `targets (...)`."""
        if corruption not in self.baseline:
            raise ValueError(unknown_name("corruption", corruption, self.baseline))
        if severity not in self.severities:
            raise ValueError(f"severity is {severity}; expected one of {_listed(self.severities)}.")
        right = in_top_k(logits, targets, token_mask=token_mask)
        wrong = right.numel() - int(right.sum())
        self._add(**{f"wrong {corruption} {severity}": wrong, f"images {corruption} {severity}": right.numel()})

    def errors(self) -> dict[str, float]:
        """Return the error on each corruption in per cent, the mean over severities."""
        cells = [(corruption, severity) for corruption in self.baseline for severity in self.severities]
        missing = [f"{c} {s}" for c, s in cells if float(self._sums.get(f"images {c} {s}", 0)) == 0]
        if missing:
            raise ValueError(f"mCE has no images of {_listed(missing[:5])} ({len(missing)} of {len(cells)} are missing).")
        rates = {(c, s): 100 * float(self._sums[f"wrong {c} {s}"]) / float(self._sums[f"images {c} {s}"]) for c, s in cells}
        return {c: sum(rates[c, s] for s in self.severities) / len(self.severities) for c in self.baseline}

    def result(self) -> float:
        errors = self.errors()
        return 100 * sum(error / self.baseline[corruption] for corruption, error in errors.items()) / len(errors)

    def relative(self, clean: float, baseline_clean: float) -> float:
        """Return the relative mCE: 100 * mean_c ( (error_c - clean) / (baseline_c - baseline_clean) ).

        It measures how much corruptions raise the error; a model with a large error everywhere has a low one. `clean` and
        `baseline_clean` are errors without corruption, in per cent.
        """
        if low := [corruption for corruption, error in self.baseline.items() if error <= baseline_clean]:
            raise ValueError(f"the baseline's clean error is {baseline_clean}, not below its error on {low[0]}.")
        errors = self.errors()
        shares = [(error - clean) / (self.baseline[corruption] - baseline_clean) for corruption, error in errors.items()]
        return 100 * sum(shares) / len(shares)


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))
