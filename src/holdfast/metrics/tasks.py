"""Metrics of tasks: how well a model predicts tokens or classifies images.

    in_top_k                  whether the right class is among the k largest logits
    Perplexity                exp of the mean negative log-likelihood of a token
    AnomalyPrecision          detection of unknown classes, as ImageNet-O defines it
    mean_corruption_error     errors under common corruptions, relative to a baseline's

and of predicted labels, as GLUE asks for them (`LABEL_METRICS`):

    accuracy        share of examples with the right class
    f1              2 tp / (2 tp + fp + fn) of class 1, the positive one; two classes only
    macro_f1        mean of the F1 of each class
    matthews        correlation of predicted and right classes (Gorodkin 2004), from -1 to 1
    pearson         correlation of predicted and right numbers
    spearman        Pearson's correlation of their ranks; equal numbers share the mean of their ranks

What the definitions of these leave open, as in scikit-learn:

    a label of -100             the example is skipped
    F1 without tp, fp and fn    0
    macro F1                    classes that are neither predicted nor right for any example are left out
    constant predictions        Matthews is 0; Pearson and Spearman are not defined, and are NaN

scikit-learn's own F1 and Matthews take 3 ms a call, 100 times as long as these, and an interval takes thousands of calls.

C classes, n examples
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.metrics.accumulator import Accumulator, real_rows

IGNORED = -100  # transformers' label of examples and targets that are not scored


@torch.no_grad()
def in_top_k(logits: Tensor, targets: Tensor, k: int = 1, token_mask: Tensor | None = None) -> Tensor:
    """Return (R,) bool for each real example: whether its target is among the k largest logits.

    Ties go to the lower class, as in `argmax`. Logits that are NaN rank above everything, so a model with NaN scores 0.
    """
    if logits.shape[:-1] != targets.shape:
        got, expected = f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}", tuple(logits.shape[:-1])
        raise ValueError(f"{got}; expected targets of shape {expected}, one class for each row.")
    rows, targets = real_rows(logits.reshape(-1, logits.shape[-1]), token_mask), real_rows(targets.reshape(-1), token_mask)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < rows.shape[1]:
        found = f"targets run from {int(targets.min())} to {int(targets.max())}, but there are {rows.shape[1]} classes"
        raise ValueError(f"{found}; set token_mask to False for targets that are not scored.")
    of_target = rows.gather(1, targets.unsqueeze(1))
    ahead = ~(rows <= of_target)  # not `rows > of_target`: with NaN, a target must not count as the largest
    earlier = torch.arange(rows.shape[1], device=rows.device) < targets.unsqueeze(1)
    return (ahead | ((rows == of_target) & earlier)).sum(1) < k


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(logits)[target] in float32, from `logits (...,V)` and `targets (...)`; 0 if a target is -100.

    Nothing is shifted: the logits at a position must predict the target at that position. Pass `targets != -100` to metrics
    as `token_mask`.
    """
    rows = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(rows, targets.reshape(-1), reduction="none", ignore_index=IGNORED).view(targets.shape)


class Perplexity(Accumulator[float]):
    """exp(total nll / number of tokens)."""

    def update(self, nll: Tensor, token_mask: Tensor | None = None) -> None:
        """Add `nll`, the nats of each token, for example from `token_nll`."""
        nll = real_rows(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel())

    def result(self) -> float:
        try:
            return math.exp(self._mean("nll"))
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
            counts = f"{found} out-of-distribution examples and {len(positive) - found} others"
            raise ValueError(f"AnomalyPrecision has {counts}; it needs both kinds.")
        require_extra("measuring outliers", "sklearn")
        from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]

        return float(average_precision_score(positive.numpy(), scores.numpy()))


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


def mean_corruption_error(
    errors: Mapping[str, float], baseline: Mapping[str, float], *, clean: float = 0.0, baseline_clean: float = 0.0
) -> float:
    """Return mCE = 100 * mean_c ( error_c / baseline_c ), in per cent as published; lower is better; the baseline has 100.

    errors, baseline        the error on each corruption in per cent, averaged over severities: of the baseline,
                            `ALEXNET_ERRORS` for ImageNet-C, another model's errors for other data
    clean, baseline_clean   errors without corruption, in per cent, for the relative mCE,
                            100 * mean_c ( (error_c - clean) / (baseline_c - baseline_clean) ). It measures how much
                            corruptions raise the error; a model with a large error everywhere has a low one
    """
    shares = [(errors[name] - clean) / (error - baseline_clean) for name, error in baseline.items()]
    return 100 * sum(shares) / len(shares)


Values = npt.NDArray[Any]  # (n,): classes or numbers


def _confusion(predicted: Values, labels: Values) -> npt.NDArray[np.int64]:
    """Return (C,C): how many examples of class i (row) are predicted as class j (column)."""
    classes = max(2, int(max(predicted.max(), labels.max())) + 1)
    pairs = labels.astype(np.int64) * classes + predicted.astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def accuracy(predicted: Values, labels: Values) -> float:
    return float((predicted == labels).mean())


def f1(predicted: Values, labels: Values, of: int | None = 1) -> float:
    """Return the F1 of one class; `of=None`: the mean over the classes that occur among predictions or labels."""
    table = _confusion(predicted, labels)
    wanted = table.sum(0) + table.sum(1)  # 2 tp + fp + fn
    scores = 2 * table.diagonal() / np.maximum(wanted, 1)
    return float(scores[wanted > 0].mean() if of is None else scores[of])


def matthews(predicted: Values, labels: Values) -> float:
    """Return (c n - sum_k p_k t_k) / sqrt((n^2 - sum_k p_k^2) (n^2 - sum_k t_k^2)), 0 if a factor is 0.

    c right predictions, p_k predictions of class k, t_k examples of class k
    """
    table = _confusion(predicted, labels).astype(np.float64)
    count, right = table.sum(), table.trace()
    guessed, true = table.sum(0), table.sum(1)
    spread = (count**2 - (guessed**2).sum()) * (count**2 - (true**2).sum())
    return float((right * count - (guessed * true).sum()) / math.sqrt(spread)) if spread > 0 else 0.0


def pearson(predicted: Values, labels: Values) -> float:
    """Return the correlation; NaN if all predictions or all labels are equal."""
    if len(labels) < 2 or predicted.min() == predicted.max() or labels.min() == labels.max():
        return math.nan
    return float(np.clip(np.corrcoef(predicted.astype(np.float64), labels.astype(np.float64))[0, 1], -1, 1))


def spearman(predicted: Values, labels: Values) -> float:
    require_extra("Spearman's correlation", "scipy")
    from scipy.stats import rankdata

    return pearson(rankdata(predicted), rankdata(labels))


@final
@dataclass(frozen=True)
class LabelMetric:
    """A metric of predicted labels; higher is better, and 1 is perfect."""

    name: str  # in tables
    about: str
    compute: Callable[[Values, Values], float]  # of predictions and labels
    numbers: bool = False  # whether labels are numbers to predict, not classes
    two_classes: bool = False


LABEL_METRICS: Mapping[str, LabelMetric] = {
    "accuracy": LabelMetric("accuracy", "share of examples with the right class", accuracy),
    "f1": LabelMetric("F1", "F1 of the second class", f1, two_classes=True),
    "macro_f1": LabelMetric("macro F1", "mean F1 of the classes", partial(f1, of=None)),
    "matthews": LabelMetric("Matthews", "Matthews correlation of predicted and right classes", matthews),
    "pearson": LabelMetric("Pearson", "Pearson correlation of predicted and right numbers", pearson, numbers=True),
    "spearman": LabelMetric("Spearman", "Spearman correlation of predicted and right numbers", spearman, numbers=True),
}


def label_metric(name: str, predicted: Values, labels: Values) -> float:
    """Return a metric over the examples that have a label; raise ValueError if none has."""
    kept = labels != IGNORED
    if not kept.any():
        raise ValueError("no example has a label, so there is nothing to score.")
    return LABEL_METRICS[name].compute(predicted[kept], labels[kept])


def label_metrics(predicted: Values, labels: Values, *, classes: int) -> dict[str, float]:
    """Return all metrics that these labels have; `classes` is 0 if they are numbers to predict."""
    found = {}
    for name, metric in LABEL_METRICS.items():
        if metric.numbers == (classes == 0) and (classes == 2 or not metric.two_classes):
            found[name] = label_metric(name, predicted, labels)
    return found
