"""The k largest with ties to the lower index."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from holdfast.kernels import select
from holdfast.kernels.select import top, top_reference

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FEW_VALUES = st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0, torch.inf])


@given(row=st.lists(FEW_VALUES, min_size=1, max_size=20), data=st.data())
def test_top_equals_sorting_tuples(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    values = torch.tensor([row])
    for device in DEVICES:
        assert torch.equal(top(values.to(device), k).cpu(), top_reference(values, k))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 3, 64])
def test_equal_values_come_in_index_order(k: int, device: str) -> None:
    assert torch.equal(top(torch.ones(5, 64, device=device), k).cpu(), torch.arange(k).expand(5, k))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [2, 4])
def test_nan_comes_first_and_never_gives_a_wild_index(k: int, device: str) -> None:
    values = torch.tensor([[1.0, torch.nan, torch.inf, -torch.nan]], device=device)
    assert top(values, k)[0, :2].tolist() == [1, 3]
    assert sorted(top(values, 4)[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("few", [0, 2**20], ids=["keys", "sort"])
def test_few_and_many_scores_are_ranked_alike(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values, both zeros and NaN: the order does not depend on how many tokens there are."""
    monkeypatch.setattr(select, "FEW_SCORES", few)
    values = torch.tensor([[1.0, 2.0, 1.0, 0.0, -0.0, torch.nan, -torch.inf, 2.0, torch.nan, torch.inf, -1.0]])
    assert top(values, 11).tolist() == [[5, 8, 9, 1, 7, 0, 2, 3, 4, 10, 6]]
    assert top(values.bfloat16(), 3).tolist() == [[5, 8, 9]]
