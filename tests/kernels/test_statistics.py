"""Order statistics by radix selection against sorting."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from holdfast.kernels.statistics import midpoint, smallest

NUMBERS = st.floats(width=32, allow_nan=False)


@given(numbers=st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=60), data=st.data())
def test_the_selected_number_is_the_sorted_one(numbers: list[tuple[float, bool]], data: st.DataObject) -> None:
    values, valid = torch.tensor([v for v, _ in numbers]), torch.tensor([ok for _, ok in numbers])
    ranked = (values[valid] + 0.0).sort().values
    ranks = data.draw(st.lists(st.integers(0, len(numbers)), min_size=2, max_size=2))
    expected = [float(ranked[r]) if r < len(ranked) else torch.inf for r in ranks]
    assert smallest(values, valid, torch.tensor(ranks), lambda x: x).tolist() == expected


@given(numbers=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60), below=st.integers(0, 70))
def test_the_wanted_number_of_values_is_below_the_midpoint(numbers: list[float], below: int) -> None:
    values = torch.tensor([numbers, [torch.inf] * len(numbers)]).t()
    middle = midpoint(values, None, torch.tensor(below), lambda x: x)
    ranked = sorted(numbers)
    if below == 0:
        assert middle == 0
    elif below < len(ranked):
        assert ranked[below - 1] <= middle <= ranked[below]
    else:
        assert middle == 2 * ranked[-1]
