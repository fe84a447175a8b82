"""Accuracy against sorting every row."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from holdfast.metrics import Accuracy

FEW_VALUES = st.sampled_from([-1.0, 0.0, 0.5, 2.0])


@given(row=st.lists(FEW_VALUES, min_size=1, max_size=9), data=st.data())
def test_the_target_is_a_hit_if_it_is_among_the_first_k_in_order_ties_to_the_lower_class(
    row: list[float], data: st.DataObject
) -> None:
    target, k = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(1, 9))
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    metric = Accuracy(k)
    metric.update(torch.tensor([row]), torch.tensor([target]))
    assert metric.result() == float(target in order[:k])


@pytest.mark.parametrize("k", [1, 5])
def test_accuracy_is_the_share_of_hits(k: int) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 21, 10), torch.randint(0, 10, (3, 21))
    in_top_k = [
        target in row.argsort(descending=True)[:k]
        for row, target in zip(logits.view(63, 10), targets.flatten().tolist(), strict=True)
    ]
    metric = Accuracy(k)
    metric.update(logits, targets)
    assert metric.result() == pytest.approx(sum(in_top_k) / 63)


@pytest.mark.parametrize("k", [1, 2])
def test_a_model_that_says_nan_is_wrong(k: int) -> None:
    metric = Accuracy(k)
    metric.update(torch.tensor([[torch.nan] * 3, [5.0, torch.nan, torch.nan]]), torch.tensor([0, 0]))
    assert metric.result() == 0


def test_bad_targets_are_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match=r"-100 to 1\b.*\b3 classes"):
        Accuracy().update(torch.randn(2, 3), torch.tensor([-100, 1]))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        Accuracy().update(torch.randn(2, 3), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"\bk\b.* 0"):
        Accuracy(0)
