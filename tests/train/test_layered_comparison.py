"""Comparisons whose routers have layers and a k of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
from train.conftest import MakeRecipe

from holdfast.comparing import matched_baseline
from holdfast.hub.install import specs_of
from holdfast.train import Comparison, load_trained, parse_routers
from holdfast.train.cells import Cell, safe_file_name
from holdfast.train.summary import summarise

ROUTERS = "smoe,symphony[k=3]@1|smoe,ac@1,smoe[k=1]"


@pytest.mark.slow
def test_routers_with_layers_are_trained_stored_and_kept(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = Comparison(tiny(), parse_routers(ROUTERS), 1, tmp_path / "run")
    results = comparison.run()
    assert [result["router"] for result in results] == ["smoe", "symphony[k=3]@1|smoe", "ac@1", "smoe[k=1]"]
    counts = [result["clean"]["routing"]["overall"]["experts_per_token"]["mean"] for result in results]
    assert counts == [2.0, 2.5, 2.0, 1.0]
    folders = sorted(path.name for path in (tmp_path / "run" / "cells").iterdir())
    assert [name.partition("-")[0] for name in folders] == ["ac_1", "smoe", "smoe[k=1]", "symphony[k=3]_1_smoe"]
    assert not any(set(name) & set('|@:/\\*?"<>') for name in folders)
    layered = next(path for path in (tmp_path / "run" / "cells").iterdir() if path.name.startswith("symphony"))
    assert json.loads((layered / "router.json").read_text())["router"] == "symphony[k=3]@1|smoe"
    specs = specs_of(load_trained(layered).model)
    assert [(spec.router, spec.k) for spec in specs.values()] == [("smoe", 2), ("symphony", 3)]
    again = Comparison(tiny(), parse_routers(ROUTERS), 1, tmp_path / "run")
    assert all(again.stored(cell) is not None for cell in again.cells)
    assert [row.router for row in comparison.finish(results).rows] == [result["router"] for result in results]


def test_other_layers_do_not_take_over_a_cell(tiny: MakeRecipe, tmp_path: Path) -> None:
    first, second = (Comparison(tiny(), parse_routers(name), 1, tmp_path / "run").cells[0] for name in ("ac@1", "ac@0"))
    assert first.folder != second.folder and first.choice.describe() != second.choice.describe()


@pytest.mark.parametrize(
    "name", ["smoe", "similarity[causal=false,tau=2]", "symphony+smooth[beta=0.5, budget=1e-1 ]", "smoe, top 3"]
)
def test_a_safe_name_is_the_name_of_its_folder(name: str) -> None:
    assert safe_file_name(name) == name


def test_names_that_look_alike_have_folders_of_their_own() -> None:
    names = ["ac@1|smoe", "ac@1@smoe", "own[x='a/b']", "own[x='a|b']", "../x", "x" * 300, "x" * 301]
    folders = [safe_file_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert not any(set(folder) & set("/|@") for folder in folders) and max(map(len, folders)) < 200
    (choice,) = parse_routers("ac@1|smoe")
    assert Cell(choice, 3).folder.endswith("-seed3")


def result(router: str, experts: float, figure: float) -> dict[str, Any]:
    used = {"routing": {"overall": {"experts_per_token": {"mean": experts}}}}
    score = {"figure": figure, **used}
    return {"router": router, "seed": 0, "parameters": 1, "clean": score, "attacked": score}


@pytest.mark.parametrize(
    ("written", "experts", "equal", "added"),
    [
        ("smoe,smooth,smoe[k=3],smoe[k=4]", (2, 2.5, 3, 4), "smoe[k=3]", []),  # the user named it
        ("smoe[k=1],smooth,smoe", (1, 2.5, 2), None, [("smoe[k=1], top 3", "smoe", 3)]),  # 2 are too few
        ("smoe,smooth,xmoe[k=3]", (2, 2.5, 3), None, [("smoe, top 3", "smoe", 3)]),  # another router is no baseline
        ("smoe,smooth{method=fast,budget=0.1},smoe[k=3]", (2, 2.5, 3), None, []),  # one that is trained otherwise is none
        (
            "smoe,smooth{method=fast,budget=0.1},smoe[k=3]{method=fast,budget=0.1}",
            (2, 2.5, 3),
            "smoe[k=3]{method=fast,budget=0.1}",
            [],
        ),
    ],
)
@pytest.mark.every_combination
def test_the_baseline_of_equal_compute_is_the_plain_router_with_enough_experts(
    written: str, experts: tuple[float, ...], equal: str | None, added: list[tuple[str, str, int]]
) -> None:
    choices = parse_routers(written)
    rows = summarise([result(one.name, count, 9) for one, count in zip(choices, experts, strict=True)], choices[0].name)
    assert (rows[1].equal_compute and rows[1].equal_compute.router) == equal
    assert [(one.name, one.router, one.k) for one in matched_baseline(rows, choices, 8)] == added
