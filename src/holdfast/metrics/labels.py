"""Metrics of predicted labels, as GLUE asks for them, and their intervals over examples drawn with replacement.

    accuracy        share of examples with the right class
    f1              2 tp / (2 tp + fp + fn) of class 1, the positive one; two classes only
    macro_f1        mean of the F1 of each class
    matthews        correlation of predicted and right classes (Gorodkin 2004), from -1 to 1
    pearson         correlation of predicted and right numbers
    spearman        Pearson's correlation of their ranks; equal numbers share the mean of their ranks

What the definitions leave open, as in scikit-learn:

    a label of -100             the example is skipped
    F1 without tp, fp and fn    0
    macro F1                    classes that are neither predicted nor right for any example are left out
    constant predictions        Matthews is 0; Pearson and Spearman are not defined, and are NaN

C classes, n examples
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from holdfast.errors import require_extra

IGNORED = -100  # transformers' label of examples that are not scored
RESAMPLES = 1000
CONFIDENCE = 0.95

Values = npt.NDArray[Any]  # (n,): classes or numbers


def confusion(predicted: Values, labels: Values, classes: int) -> npt.NDArray[np.int64]:
    """Return (C,C): how many examples of class i (row) are predicted as class j (column)."""
    pairs = labels.astype(np.int64) * classes + predicted.astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def accuracy(predicted: Values, labels: Values) -> float:
    return float((predicted == labels).mean())


def f1(predicted: Values, labels: Values) -> float:
    """Return the F1 of class 1."""
    return float(_f1_of_classes(predicted, labels)[1][1])


def macro_f1(predicted: Values, labels: Values) -> float:
    occurs, scores = _f1_of_classes(predicted, labels)
    return float(scores[occurs].mean())


def _f1_of_classes(predicted: Values, labels: Values) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return (C,) which classes occur among predictions or labels, and (C,) the F1 of each class."""
    table = confusion(predicted, labels, max(2, int(max(predicted.max(), labels.max())) + 1))
    hits, wanted = table.diagonal(), table.sum(0) + table.sum(1)  # wanted = 2 tp + fp + fn
    return wanted > 0, 2 * hits / np.maximum(wanted, 1)


def matthews(predicted: Values, labels: Values) -> float:
    """Return (c n - sum_k p_k t_k) / sqrt((n^2 - sum_k p_k^2) (n^2 - sum_k t_k^2)), 0 if a factor is 0.

    c right predictions, p_k predictions of class k, t_k examples of class k
    """
    table = confusion(predicted, labels, int(max(predicted.max(), labels.max())) + 1).astype(np.float64)
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
    "macro_f1": LabelMetric("macro F1", "mean F1 of the classes", macro_f1),
    "matthews": LabelMetric("Matthews", "Matthews correlation of predicted and right classes", matthews),
    "pearson": LabelMetric("Pearson", "Pearson correlation of predicted and right numbers", pearson, numbers=True),
    "spearman": LabelMetric("Spearman", "Spearman correlation of predicted and right numbers", spearman, numbers=True),
}


def label_metric(name: str, predicted: Values, labels: Values) -> float:
    """Return a metric over the examples that have a label; raise ValueError if none has."""
    kept = labels != IGNORED
    if predicted.shape != labels.shape or labels.ndim != 1:
        raise ValueError(f"predictions have shape {predicted.shape}, labels {labels.shape}; expected one of each example.")
    if not kept.any():
        raise ValueError("no example has a label, so there is nothing to score.")
    metric = LABEL_METRICS[name]
    if not metric.numbers and min(predicted[kept].min(), labels[kept].min()) < 0:
        raise ValueError("classes are numbers from 0; use -100 as the label of examples that are not scored.")
    return metric.compute(predicted[kept], labels[kept])


def label_metrics(predicted: Values, labels: Values, *, classes: int) -> dict[str, float]:
    """Return all metrics that these labels have; `classes` is 0 if they are numbers to predict."""
    fits = {
        name: metric.numbers == (classes == 0) and not (metric.two_classes and classes != 2)
        for name, metric in LABEL_METRICS.items()
    }
    return {name: label_metric(name, predicted, labels) for name, fit in fits.items() if fit}


def resampled_interval(value: Callable[[Values], float], examples: int, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of `value`, a function of the numbers of examples, which are drawn again with replacement.

    None: there are fewer than two examples, or it is not defined for half of the draws.
    """
    if examples < 2:
        return None
    draw = np.random.default_rng(seed)
    values = np.array([value(draw.integers(examples, size=examples)) for _ in range(RESAMPLES)])
    values = values[np.isfinite(values)]
    if len(values) < RESAMPLES // 2:
        return None
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
