"""Metrics of labels: numbers computed by hand, scikit-learn and scipy, and the cases that definitions leave open."""

import math

import numpy as np
import pytest

from holdfast.metrics.labels import (
    LABEL_METRICS,
    confusion,
    label_metric,
    label_metrics,
)

# tp 3, fp 2, fn 1, tn 4
PREDICTED = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
LABELS = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])


def test_two_classes_by_hand() -> None:
    assert confusion(PREDICTED, LABELS, 2).tolist() == [[4, 2], [1, 3]]
    found = label_metrics(PREDICTED, LABELS, classes=2)
    assert found["accuracy"] == 0.7
    assert found["f1"] == pytest.approx(2 * 3 / (2 * 3 + 2 + 1))
    assert found["macro_f1"] == pytest.approx((6 / 9 + 8 / 11) / 2)
    assert found["matthews"] == pytest.approx((3 * 4 - 2 * 1) / math.sqrt(5 * 4 * 6 * 5))
    assert set(found) == {"accuracy", "f1", "macro_f1", "matthews"}


def test_numbers_by_hand() -> None:
    predicted, labels = np.array([1.0, 2.0, 3.0, 10.0]), np.array([2.0, 4.0, 6.0, 5.0])
    found = label_metrics(predicted, labels, classes=0)
    # Means 4 and 4.25; deviations (-3, -2, -1, 6) and (-2.25, -0.25, 1.75, 0.75).
    assert found["pearson"] == pytest.approx((6.75 + 0.5 - 1.75 + 4.5) / math.sqrt(50 * 8.75))
    assert found["spearman"] == pytest.approx(1 - 6 * (0 + 0 + 1 + 1) / (4 * 15))
    assert set(found) == {"pearson", "spearman"}


def test_constant_predictions_have_stated_answers() -> None:
    constant = np.zeros(4, dtype=np.int64)
    labels = np.array([0, 1, 0, 1])
    assert label_metric("matthews", constant, labels) == 0
    assert label_metric("matthews", labels, constant) == 0
    assert label_metric("f1", constant, labels) == 0
    assert math.isnan(label_metric("pearson", constant, labels))
    assert math.isnan(label_metric("spearman", labels.astype(float), np.full(4, 2.5)))
    assert math.isnan(label_metric("pearson", np.array([1.0]), np.array([1.0])))


def test_absent_classes_have_stated_answers() -> None:
    zeros = np.zeros(3, dtype=np.int64)
    assert label_metric("f1", zeros, zeros) == 0  # neither predicted nor right
    assert label_metric("macro_f1", zeros, zeros) == 1  # class 1 is left out
    assert label_metric("macro_f1", np.array([0, 0, 3]), np.array([0, 0, 0])) == pytest.approx((4 / 5 + 0) / 2)


def test_ignored_labels_are_skipped_by_every_metric() -> None:
    for name, metric in LABEL_METRICS.items():
        one, two = (PREDICTED + 0.1 * np.arange(10), LABELS + 0.0) if metric.numbers else (PREDICTED, LABELS)
        padded = np.append(one, one[:2]), np.append(two, [-100, -100])
        assert label_metric(name, *padded) == label_metric(name, one, two)
    with pytest.raises(ValueError, match="no example has a label"):
        label_metric("accuracy", PREDICTED, np.full(10, -100))
    with pytest.raises(ValueError, match=r"shape \(9,\)"):
        label_metric("accuracy", PREDICTED[:9], LABELS)
    with pytest.raises(ValueError, match="from 0"):
        label_metric("accuracy", PREDICTED, LABELS - 1)


@pytest.mark.parametrize("classes", [2, 5])
def test_they_equal_those_of_scikit_learn(classes: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(classes)
    for size in (2, 7, 63, 500):
        predicted, labels = draw.integers(classes, size=(2, size))
        expected = {
            "accuracy": metrics.accuracy_score(labels, predicted),
            "macro_f1": metrics.f1_score(labels, predicted, average="macro", zero_division=0),
            "matthews": metrics.matthews_corrcoef(labels, predicted),
        }
        if classes == 2:
            expected["f1"] = metrics.f1_score(labels, predicted, zero_division=0)
        assert label_metrics(predicted, labels, classes=classes) == pytest.approx(expected)


def test_correlations_equal_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    for size in (3, 60, 400):
        predicted = draw.normal(size=size)
        labels = np.round(predicted + draw.normal(size=size), 1)  # with ties
        found = label_metrics(predicted, labels, classes=0)
        assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, labels).statistic)
        assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, labels).statistic)
