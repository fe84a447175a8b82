"""Curves over training: every measure of a snapshot, by layer, as means over seeds."""

from typing import Any

import pytest
from report.stored import SNAPSHOTS, parse, stored

from holdfast.report.curves import curves
from holdfast.report.plot_data import Plot
from holdfast.report.plots import over_training
from holdfast.train.results import ValidationCurve


def measures(content: dict[str, Any]) -> dict[str, list[dict[int, dict[int, float]]]]:
    """Return by measure, layer and router the value at each step."""
    return {
        measure["name"]: [
            {trace["router"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in panel["data"]}
            for panel in measure["panels"]
        ]
        for measure in curves(parse(content))
    }


def test_every_measure_that_was_stored_has_a_curve_and_no_other() -> None:
    content = stored()
    found = measures(content)
    near = [f"{kind}{width}{end}" for kind, end in (("near-ties, gap below ", ""), ("experts within ", " of the boundary"))
            for width in ("0.001", "0.01", "0.1")]  # fmt: skip
    usual = ["experts per token", "strip width", *near, "load unevenness", "dead experts", "entropy"]
    assert list(found) == [*usual, "entropy relative to smoe", "graph sparsity", "fluctuation"]
    for cell in content["cells"]:
        for layer in cell["snapshots"]["layers"]:
            for at, state in enumerate(layer["states"]):
                state |= {"dropped": {"share": 0.25}, "interference": 0.1 * at + 0.03 * cell["seed"]}
    more = measures(content)
    assert set(more) - set(found) == {"dropped experts", "gradient interference"}
    assert more["gradient interference"][1][2] == pytest.approx({4: 0.03, 8: 0.13, 12: 0.23})
    assert more["dropped experts"][0][0] == dict.fromkeys(SNAPSHOTS, 25.0)


def test_a_curve_is_the_mean_over_seeds_of_its_layer() -> None:
    found = measures(stored())
    assert found["strip width"][0] == {1: pytest.approx({4: 0.03, 8: 0.05, 12: 0.07})}  # the others have no strip
    assert found["experts per token"][1][1] == pytest.approx({4: 2.0, 8: 2.1, 12: 2.2})
    assert found["entropy"][1][2] == pytest.approx(dict.fromkeys(SNAPSHOTS, 1.3 - 0.1 - 0.1 - 0.01))
    assert found["entropy relative to smoe"][1].keys() == {1, 2}
    assert found["entropy relative to smoe"][1][2] == pytest.approx(dict.fromkeys(SNAPSHOTS, 1.09 / 1.19), rel=1e-4)
    assert found["near-ties, gap below 0.01"][0][1] == pytest.approx({4: 3.0, 8: 4.0, 12: 5.0})
    assert found["experts within 0.1 of the boundary"][0][0] == dict.fromkeys(SNAPSHOTS, 0.2)
    assert found["graph sparsity"][0][0] == pytest.approx({4: 50, 8: 40, 12: 30})


@pytest.mark.parametrize(("layer", "percent"), [(0, [41.0, 21.0]), (1, [31.0, 11.0])])
def test_fluctuation_is_a_mean_over_seeds_at_the_step_of_the_later_snapshot(layer: int, percent: list[float]) -> None:
    assert measures(stored())["fluctuation"][layer][1] == pytest.approx(dict(zip((8, 12), percent, strict=True)))


def test_seeds_with_other_snapshots_keep_their_own_steps() -> None:
    content = stored(["smoe"], seeds=2)
    content["cells"][1]["snapshots"]["steps"] = [4, 6, 12]
    assert measures(content)["fluctuation"][0][0] == pytest.approx({6: 41.0, 8: 40.0, 12: 20.5})


def test_one_snapshot_has_nothing_to_fluctuate_from() -> None:
    content = stored(["smoe"], seeds=1)
    snapshots = content["cells"][0]["snapshots"]
    snapshots["steps"] = [12]
    for layer in snapshots["layers"]:
        layer.update(fluctuation=[], graphs=layer["graphs"][:1], states=layer["states"][:1])
    found = measures(content)
    assert "fluctuation" not in found and found["entropy"][0][0].keys() == {12}


def test_in_a_sweep_entropies_are_relative_to_the_baseline_of_the_same_setting() -> None:
    content = stored(["smoe", "smooth", "ac"], seeds=1)
    for place, (row, cell) in enumerate(zip(content["rows"], content["cells"], strict=True)):
        row["router"] = cell["router"] = "smoe" if place != 1 else "smooth"
        row["settings"] = cell["settings"] = {"sparse.k": 1 if place == 0 else 2}
    found = measures(content)["entropy relative to smoe"]
    assert found[0] == {1: pytest.approx(dict.fromkeys(SNAPSHOTS, 1.25 / 1.2), rel=1e-4)}


def drawn(content: dict[str, Any]) -> dict[str, Plot]:
    return {plot.name: plot for plot in over_training(parse(content)) if plot.data}


def test_training_is_drawn_as_differences_to_the_baseline_of_the_same_seed() -> None:
    content = stored()
    for cell in content["cells"]:
        cell["curve"]["losses"] = [5.0 / step + cell["seed"] for step in range(1, 13)]
        if cell["router"] == "smooth":
            cell["curve"]["losses"] = [loss - 0.1 * (cell["seed"] + 1) for loss in cell["curve"]["losses"]]
    band, line, *_ = drawn(content)["training"].data
    steps = list(range(1, 13))
    assert line["meta"] == {"router": 1} and line["x"] == steps
    assert line["y"] == pytest.approx([-0.2] * 12)
    assert band["fill"] == "toself" and band["x"] == steps + steps[::-1]
    assert band["y"] == pytest.approx([-0.1] * 12 + [-0.3] * 12)
    *seeds, mean = drawn(content)["training-level"].data
    assert {trace["meta"]["router"] for trace in (*seeds, mean)} == {0} and len(seeds) == 3
    assert mean["y"] == pytest.approx([5.0 / step + 1 for step in steps], rel=1e-4)


def test_each_router_has_a_panel_of_differences_unless_they_are_many() -> None:
    plot = drawn(stored())["training"]
    assert {trace["meta"]["router"]: trace["yaxis"] for trace in plot.data} == {1: "y", 2: "y2"}
    domains = [plot.layout[name]["domain"] for name in ("yaxis", "yaxis2")]
    assert 1 == domains[0][1] > domains[0][0] > domains[1][1] > domains[1][0] > 0
    assert plot.layout["yaxis2"]["matches"] == "y" and plot.layout["xaxis"]["anchor"] == "y2"
    assert [shape["yref"] for shape in plot.layout["shapes"]] == ["y", "y2"]
    assert [note["text"] for note in plot.layout["annotations"]] == ["smooth", "ac"]
    for routers in (["smoe", "smooth"], ["smoe", *(f"router-{number}" for number in range(9))]):
        plot = drawn(stored(routers))["training"]
        assert "yaxis2" not in plot.layout and not any("yaxis" in trace for trace in plot.data)


def test_a_router_is_compared_at_the_steps_and_seeds_that_the_baseline_has() -> None:
    content = stored(["smoe", "smooth"])
    own = [cell for cell in content["cells"] if cell["router"] == "smooth"]
    own[0]["validation"]["losses"][1] = None
    content["cells"].remove(own[2])
    _, line = drawn(content)["validation"].data
    assert line["x"] == [SNAPSHOTS[0], SNAPSHOTS[2]] and line["y"] == pytest.approx([0.05, 0.05])
    alone = drawn(stored(["smoe"]))
    assert "training" not in alone and "training-level" in alone


def test_the_error_on_held_out_data_is_drawn_if_it_is_stored() -> None:
    content = stored()
    assert "validation" in drawn(content) and "validation-figure" not in drawn(content)
    for cell in content["cells"]:
        cell["validation"]["figures"] = [30.0, 20.0, 10.0 + cell["seed"]]
    assert drawn(content)["validation-figure-level"].data[-1]["y"] == [30.0, 20.0, 11.0]
    for cell in content["cells"]:
        cell["validation"] = {"steps": [], "losses": [], "figures": []}
    assert set(drawn(content)) == {"training", "training-level"}
    log: list[dict[str, Any]] = [{"step": 1, "loss": 3.0}, {"step": 1, "eval_loss": None, "eval_figure": 2.0}]
    assert ValidationCurve.of(log) == ValidationCurve([1], [None], [2.0])
