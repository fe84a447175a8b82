"""Cells side by side: the numbers of one after the other, and a cell that fails takes no other with it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.train import Comparison, Contender, Recipe, contenders

STEPS = 3


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a machine with two cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_side_by_side_gives_the_numbers_of_one_after_the_other(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    """In a model so large that threads would round differently, and beside a cell that fails."""
    large = {"model.config.hidden_size": 64, "model.config.intermediate_size": 64, "sparse.hidden": 64, "data.length": 64}
    recipe = tiny({**large, "training.batch": 16, "training.steps": STEPS, "data.vocabulary": 2000})
    folder, routers = tmp_path / "jobs", contenders("smoe,symphony+smooth")
    told: list[tuple[str, int]] = []
    with pytest.raises(ValueError, match="tau is -1") as caught:
        Comparison(recipe, [*routers, Contender("broken", "similarity", {"tau": -1.0})], 1, folder).run(
            lambda cell, steps: told.append((cell.name, steps)), jobs=2
        )
    assert "\n" not in str(caught.value)
    assert any(steps == STEPS for _, steps in told) and {name for name, _ in told} <= {"smoe-seed0", "symphony+smooth-seed0"}

    finished = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/result.json")}
    assert sorted(path.parent.name for path in finished) == ["smoe-seed0", "symphony+smooth-seed0"]
    side_by_side = Comparison(recipe, routers, 1, folder).run()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # none was trained again
    one_after_the_other = Comparison(recipe, routers, 1, tmp_path / "alone").run()
    assert json.dumps(side_by_side, sort_keys=True) == json.dumps(one_after_the_other, sort_keys=True)
    assert torch.get_num_threads() == 2


def test_finished_cells_need_no_workers(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny({"training.steps": 1})
    first = Comparison(recipe, contenders("smoe"), 1, tmp_path / "run").run()

    def started(*_: Any) -> None:
        raise AssertionError("a finished cell was trained again")

    monkeypatch.setattr("holdfast.train.workers._train", started)
    assert Comparison(recipe, contenders("smoe"), 1, tmp_path / "run").run(jobs=2) == first
