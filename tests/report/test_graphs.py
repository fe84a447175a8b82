"""The expert graph as it evolved."""

import pytest
from report.stored import SNAPSHOTS, parse, stored

from holdfast.auditing.geometry_run import spread
from holdfast.report.curves import SHOWN, evolutions


def test_there_is_a_rounded_graph_for_each_layer_and_snapshot_of_the_first_seed() -> None:
    content = stored()
    content["cells"].reverse()  # the first seed, not the first that is stored
    found = evolutions(parse(content))
    assert [evolution["router"] for evolution in found] == [0, 1, 2]
    assert found[1]["steps"] == list(SNAPSHOTS)
    assert found[1]["caption"].startswith("Seed 0, ")
    assert [graph[0] for graph in found[1]["layers"]["1"]] == [[corner, 0.25, 0.25, 0.25] for corner in (0.31, 0.41, 0.51)]
    assert [graph[0][0] for graph in found[1]["layers"]["0"]] == [0.01, 0.11, 0.21]


def test_one_scale_is_shared_by_layers_and_snapshots_of_a_router() -> None:
    first, second, _ = evolutions(parse(stored()))
    assert (first["low"], first["high"]) == (0.0, 0.5)
    assert (second["low"], second["high"]) == (0.0, 0.51)
    assert "smoe" in first["caption"] and "smooth" in second["caption"]


def test_a_graph_of_nothing_has_a_scale_too() -> None:
    content = stored(["smoe"], seeds=1)
    for layer in content["cells"][0]["snapshots"]["layers"]:
        layer["graphs"] = [[[0.0, None], [0.0, 0.0]] for _ in SNAPSHOTS]
    (found,) = evolutions(parse(content))
    assert (found["low"], found["high"]) == (0.0, 1.0)
    assert found["layers"]["0"][0] == [[0.0, None], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("count", "places"), [(0, []), (1, [0]), (4, [0, 1, 2, 3]), (5, [0, 1, 3, 4]), (100, [0, 33, 66, 99])]
)
def test_many_snapshots_are_thinned_evenly_and_the_ends_stay(count: int, places: list[int]) -> None:
    assert spread(count, 4) == places


def test_thinning_is_said() -> None:
    content = stored(["smoe"], seeds=1)
    snapshots, many = content["cells"][0]["snapshots"], 3 * SHOWN
    snapshots["steps"] = list(range(1, many + 1))
    for layer in snapshots["layers"]:
        layer.update(fluctuation=[0.5] * (many - 1), graphs=[[[at / many]] for at in range(many)])
        layer["states"] = layer["states"][:1] * many
    (found,) = evolutions(parse(content))
    assert len(found["steps"]) == len(found["layers"]["0"]) == SHOWN
    assert [graph[0][0] for graph in found["layers"]["0"]] == [round((step - 1) / many, 3) for step in found["steps"]]
    assert f"{SHOWN} of {many} snapshots" in found["caption"]
