"""The picture of a slice shows the stored numbers of one geometry report, and nothing else."""

from itertools import combinations
from types import ModuleType
from typing import Any

import figures
import pytest


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return figures.script("slice")


@pytest.fixture(scope="module")
def stored() -> Any:
    return figures.numbers("slice")


def test_cells_cover_the_square_and_only_those_of_the_stored_sets_exist(script: ModuleType, stored: Any) -> None:
    low, high = stored["slice"]["low"], stored["slice"]["high"]
    whole = (high[0] - low[0]) * (high[1] - low[1])
    every = {chosen: script.cell(stored, list(chosen)) for chosen in combinations(range(len(stored["slice"]["keys"])), 2)}
    areas = {chosen: script._area(polygon) if len(polygon) > 2 else 0.0 for chosen, polygon in every.items()}
    assert sum(areas.values()) == pytest.approx(whole, rel=1e-9)
    found = {chosen for chosen, area in areas.items() if area > 1e-3 * whole}
    assert found <= {tuple(chosen) for chosen in stored["slice"]["sets"]} and len(found) >= 5


def test_strips_are_where_an_expert_outside_is_close(script: ModuleType, stored: Any) -> None:
    keys, checked = stored["slice"]["keys"], 0
    for chosen in stored["slice"]["sets"]:
        for polygon in script.strips(stored, chosen):
            x, y = (sum(each) / len(polygon) for each in zip(*polygon, strict=True))
            values = [across * x + up * y + offset for across, up, offset in keys]
            least = min(values[expert] for expert in chosen)
            others = [value for expert, value in enumerate(values) if expert not in chosen]
            assert least >= max(others) - 1e-9 and least - max(others) < stored["strip"]
            checked += 1
    assert checked > 5
