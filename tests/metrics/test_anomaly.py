"""AUPR against scikit-learn's average precision."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

from holdfast.metrics import AnomalyPrecision


def reference(logits: torch.Tensor, positive: torch.Tensor) -> float:
    from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]

    return float(average_precision_score(positive.numpy(), -logits.double().softmax(-1).amax(-1).numpy()))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_aupr_equals_scikit_learns_average_precision(share: float) -> None:
    torch.manual_seed(0)
    positive = torch.rand(500) < share
    logits = torch.randn(500, 12) * (2 - positive.float().unsqueeze(1))
    metric = AnomalyPrecision()
    metric.update(logits, positive)
    assert metric.result() == pytest.approx(reference(logits, positive), rel=1e-12)


@given(examples=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=30))
def test_aupr_with_many_equal_scores_equals_scikit_learns(examples: list[tuple[int, bool]]) -> None:
    positive = torch.tensor([out for _, out in examples])
    assume(bool(positive.any()) and not bool(positive.all()))
    logits = torch.tensor([[float(height), 0.0] for height, _ in examples])
    metric = AnomalyPrecision()
    metric.update(logits, positive)
    assert metric.result() == pytest.approx(reference(logits, positive), rel=1e-12)


def test_a_model_unsure_of_strangers_only_has_an_aupr_of_1() -> None:
    metric = AnomalyPrecision()
    metric.update(torch.tensor([[5.0, 0.0]]).expand(10, 2), False)
    metric.update(torch.tensor([[0.1, 0.0]]).expand(3, 2), True)
    assert metric.result() == 1


def test_one_kind_of_examples_or_nan_is_one_clear_sentence() -> None:
    metric = AnomalyPrecision()
    metric.update(torch.randn(4, 3), True)
    with pytest.raises(ValueError, match=r"\b4 .*\b0\b"):
        metric.result()
    with pytest.raises(ValueError, match=r"1 example.*NaN"):
        metric.update(torch.tensor([[torch.nan, 1.0], [0.0, 1.0]]), False)
