"""Fluctuation while training, and consistency under noise."""

from typing import Any

import pytest
from report.stored import stored, stored_once

from holdfast.report.plot_data import Plot, consistency, fluctuation
from holdfast.report.stored_comparison import parse


def curve(plot: Plot, meta: dict[str, Any]) -> dict[str, Any]:
    (found,) = [trace for trace in plot.data if trace["meta"] == meta]
    return found


@pytest.mark.parametrize(("layer", "percent"), [("0", [41.0, 21.0]), ("1", [31.0, 11.0]), ("all", [36.0, 16.0])])
def test_fluctuation_is_a_mean_over_seeds_at_the_step_of_the_later_snapshot(layer: str, percent: list[float]) -> None:
    found = curve(fluctuation(parse(stored())), {"router": 1, "layer": layer})
    assert found["x"] == [8, 12]
    assert found["y"] == pytest.approx(percent)


def test_seeds_with_other_snapshots_keep_their_own_steps() -> None:
    content = stored(["smoe"], seeds=2)
    content["cells"][1]["snapshots"]["steps"] = [4, 6, 12]
    found = curve(fluctuation(parse(content)), {"router": 0, "layer": "0"})
    assert found["x"] == [6, 8, 12]
    assert found["y"] == pytest.approx([41.0, 40.0, 20.5])


def test_one_snapshot_has_nothing_to_fluctuate_from() -> None:
    content = stored(["smoe"], seeds=1)
    snapshots = content["cells"][0]["snapshots"]
    snapshots["steps"] = [12]
    for layer in snapshots["layers"]:
        layer.update(fluctuation=[], graphs=layer["graphs"][:1])
    assert fluctuation(parse(content)).data == []


def test_consistency_has_a_mean_for_each_layer_and_the_range_of_the_seeds() -> None:
    plot = consistency(parse(stored()))
    found = curve(plot, {"router": 1})
    assert found["x"] == [0, 1]  # the middle one of three
    assert found["y"] == pytest.approx([89 + 2 / 3, 79 + 2 / 3])
    assert found["error_y"]["array"] == pytest.approx([7 / 3, 7 / 3])
    assert found["error_y"]["arrayminus"] == pytest.approx([5 / 3, 5 / 3])
    assert "5%" in plot.caption


def test_results_without_snapshots_have_neither() -> None:
    results = parse(stored_once())
    assert fluctuation(results).data == [] and consistency(results).data == []
