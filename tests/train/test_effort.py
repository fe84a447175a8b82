"""What the training of a cell costs, and that it is stored with its result."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from train.conftest import MakeRecipe

from holdfast.train import Comparison, build_model, make_task, parse_routers
from holdfast.train.results import Results
from holdfast.train.training import flops_of_forward, step_seconds


def test_the_time_of_a_step_is_a_median_over_windows() -> None:
    even = [0.5 * step for step in range(100)]
    assert step_seconds(even) == pytest.approx(0.5)
    with_checkpoint = [time + 60 * (step >= 50) for step, time in enumerate(even)]
    assert step_seconds(with_checkpoint) == pytest.approx(0.5)
    # A GPU finishes eight steps at once: within a window the mean counts.
    in_bursts = [4.0 * (step // 8) for step in range(100)]
    assert step_seconds(in_bursts) == pytest.approx(0.5)
    assert step_seconds([0.0, 3.0, 6.0]) == pytest.approx(3.0)
    assert step_seconds([1.0]) is None and step_seconds([]) is None


def test_flops_are_those_of_the_matrix_products(tiny: MakeRecipe) -> None:
    task = make_task(tiny({"sparse.k": 1}))
    one, two = (build_model(task, "smoe", {}, seed=0, k=k) for k in (1, 2))
    probe = task.probe()
    found = [flops_of_forward(model, probe) for model in (one, two)]
    sparse, config = task.recipe.sparse, task.recipe.model.config
    expert = 3 * 2 * config["hidden_size"] * (sparse.hidden or config["intermediate_size"])  # gate, up and down
    assert found[0] is not None and found[1] is not None
    assert found[1] - found[0] == pytest.approx(expert * config["num_hidden_layers"])
    assert one.training


def test_a_cell_stores_what_it_cost_and_the_rows_their_means(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = Comparison(tiny({"training.steps": 3}), parse_routers("smoe"), 1, tmp_path / "run")
    comparison.finish(comparison.run(), command="holdfast compare --seeds 1")
    results = Results.load(tmp_path / "run")
    (cell,), (row,) = results.cells, results.rows
    stored = json.loads((tmp_path / "run" / "cells" / "smoe-seed0" / "result.json").read_text())["origin"]
    assert cell.origin.finished is not None and datetime.fromisoformat(cell.origin.finished).tzinfo is not None
    assert (cell.origin.device, cell.origin.seconds) == (stored["device"], stored["seconds"])
    assert (row.step_seconds, row.flops, row.peak_bytes) == (stored["step_seconds"], stored["flops"], stored["peak_bytes"])
    assert row.step_seconds is not None and row.step_seconds > 0 and row.flops is not None and row.flops > 0
    assert row.consistency is not None and 0 <= row.consistency.mean <= 1
    comparison.finish(comparison.run())  # Python adds nothing: the command stays
    assert Results.load(tmp_path / "run").command == "holdfast compare --seeds 1"
