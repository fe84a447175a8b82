"""Metrics of tasks and of labels: against sorting, loops, scikit-learn and scipy."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from metrics.routings import updated
from wording import assert_refused

from holdfast.metrics import ALEXNET_ERRORS, AnomalyPrecision, Perplexity, mean_corruption_error, token_nll
from holdfast.metrics.tasks import LABEL_METRICS, in_top_k, label_metric, label_metrics

FEW_VALUES = st.sampled_from([-1.0, 0.0, 0.5, 2.0])


@given(row=st.lists(FEW_VALUES, min_size=1, max_size=9), data=st.data())
def test_the_target_is_a_hit_if_it_is_among_the_first_k_in_order_ties_to_the_lower_class(
    row: list[float], data: st.DataObject
) -> None:
    target, k = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(1, 9))
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    assert in_top_k(torch.tensor([row]), torch.tensor([target]), k).item() == (target in order[:k])


@pytest.mark.parametrize("k", [1, 2])
def test_a_model_that_says_nan_is_wrong(k: int) -> None:
    rows = torch.tensor([[torch.nan] * 3, [5.0, torch.nan, torch.nan]])
    assert not in_top_k(rows, torch.tensor([0, 0]), k).any()


def test_bad_targets_are_one_clear_sentence() -> None:
    assert_refused(r"-100 to 1\b.*\b3 classes", in_top_k, torch.randn(2, 3), torch.tensor([-100, 1]))
    assert_refused(r"\(2,\)", in_top_k, torch.randn(2, 3), torch.tensor([1]))


def naive_nll(logits: list[float], target: int) -> float:
    return -math.log(math.exp(logits[target]) / sum(math.exp(value) for value in logits))


def test_token_nll_is_minus_the_log_of_the_softmax() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 9, 13), torch.randint(0, 13, (2, 9))
    got = token_nll(logits, targets)
    assert got.shape == targets.shape
    for row, target, value in zip(
        logits.view(18, 13).tolist(), targets.flatten().tolist(), got.flatten().tolist(), strict=True
    ):
        assert value == pytest.approx(naive_nll(row, target), rel=1e-5)


def test_token_nll_of_half_precision_logits_is_float32_and_ignored_targets_cost_nothing() -> None:
    nll = token_nll(torch.randn(3, 5).bfloat16(), torch.tensor([1, -100, 2]))
    assert nll.dtype == torch.float32 and nll[1] == 0 and nll[0] > 0


def test_perplexity_of_a_uniform_model_is_the_size_of_its_vocabulary() -> None:
    metric = updated(Perplexity(), token_nll(torch.zeros(2, 7, 50), torch.randint(0, 50, (2, 7))))
    assert metric.result() == pytest.approx(50)
    metric.update(torch.full((14,), 1.0))
    assert metric.result() == pytest.approx(math.exp((math.log(50) + 1) / 2))


def test_a_hopeless_perplexity_is_infinite_not_an_error() -> None:
    metric = updated(Perplexity(), torch.tensor([1e4]))
    assert metric.result() == math.inf


def test_a_model_unsure_of_strangers_only_has_an_aupr_of_1() -> None:
    metric = updated(AnomalyPrecision(), torch.tensor([[5.0, 0.0]]).expand(10, 2), False)
    metric.update(torch.tensor([[0.1, 0.0]]).expand(3, 2), True)
    assert metric.result() == 1


def test_the_aupr_is_the_sum_over_thresholds_and_equal_scores_share_one() -> None:
    metric = AnomalyPrecision()
    for height, strange in ((0.0, True), (1.0, False), (1.0, True), (2.0, True)):  # the least sure of them first
        metric.update(torch.tensor([[height, 0.0]]), strange)
    assert metric.result() == pytest.approx(1 / 3 * 1 + 1 / 3 * 2 / 3 + 1 / 3 * 3 / 4)


def test_one_kind_of_examples_or_nan_is_one_clear_sentence() -> None:
    metric = updated(AnomalyPrecision(), torch.randn(4, 3), True)
    assert_refused(r"\b4 .*\b0\b", metric.result)
    assert_refused(r"1 example.*NaN", metric.update, torch.tensor([[torch.nan, 1.0], [0.0, 1.0]]), False)


def test_mce_is_the_mean_over_corruptions_of_errors_relative_to_the_baseline() -> None:
    baseline = {"fog": 40.0, "snow": 80.0}
    errors = {"fog": 37.5, "snow": 40.0}
    assert mean_corruption_error(errors, baseline) == pytest.approx(100 * (37.5 / 40 + 40 / 80) / 2)
    relative = mean_corruption_error(errors, baseline, clean=10, baseline_clean=20)
    assert relative == pytest.approx(100 * (27.5 / 20 + 30 / 60) / 2)


def test_alexnet_has_an_mce_of_100_and_all_fifteen_corruptions() -> None:
    assert len(ALEXNET_ERRORS) == 15
    assert sum(ALEXNET_ERRORS.values()) / 15 == pytest.approx(78.9, abs=0.1)  # the mean that the paper prints
    assert mean_corruption_error(ALEXNET_ERRORS, ALEXNET_ERRORS) == pytest.approx(100)


PREDICTED = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
LABELS = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])


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
    assert_refused("no example has a label", label_metric, "accuracy", PREDICTED, np.full(10, -100))


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
        theirs = {"pearson": stats.pearsonr(predicted, labels), "spearman": stats.spearmanr(predicted, labels)}
        expected = {name: found.statistic for name, found in theirs.items()}
        assert label_metrics(predicted, labels, classes=0) == pytest.approx(expected)
