"""`holdfast compare` as a user runs it, with its mistakes."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import SMALL
from commands import Command
from report.stored import difference, parse, stored
from tiers import quick_or_slow
from wording import mentions

import holdfast
from holdfast.cli.compare import print_tables
from holdfast.comparing import matched_baseline
from holdfast.errors import MissingExtra
from holdfast.train.recipe import parse_pairs, parse_routers
from holdfast.train.results import Results, Row


def test_figures_up_to_1_are_shown_with_four_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    content = stored(["smoe", "ac"])
    content["run"]["measure"] = {"name": "Pearson", "long": "Pearson correlation", "attack": "none", "better": "higher"}
    for row, figure in zip(content["rows"], (0.8612, 0.8735), strict=True):
        row["clean"] = figure
    content["rows"][1]["clean_difference"] = difference(0.0123, 0.0082)
    print_tables(parse(content))
    assert mentions(capsys.readouterr().out, "0.8612", "0.8735", "+0.0123", "(+0.004 to", "+0.021)")


@pytest.mark.parametrize("in_a_process", quick_or_slow([False, True], [False]))
def test_a_comparison_ends_with_a_table_and_the_path_of_its_figures(
    in_a_process: bool, text: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    given = ["--routers", "smoe,smooth", "--seeds", "2", "--out", str(out)]
    given += ["--set", f"data.source={text}", "training.steps=6", *SMALL]
    if in_a_process:
        line = [sys.executable, "-m", "holdfast", "compare", *given]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    else:
        done = command("compare", *given)
    assert done.returncode == 0, done.stderr
    for cell in ("smoe, seed 0", "smoe, seed 1", "smooth, seed 0", "smooth, seed 1", "smoe, top 3, seed 1"):
        assert f" {cell}: train" in done.stderr and f" {cell}: evaluate and attack" in done.stderr
    assert "% done, about " in done.stderr
    if in_a_process:  # no library says anything
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines()), done.stderr
    lines = done.stdout.splitlines()
    for name in ("smoe ", "smooth ", "smoe, top 3 "):
        (row,) = [line for line in lines if line.startswith(name)]
        assert re.search(r" [\d,]+ +\d\.\d\d +\d+\.\d\d ", row)  # parameters, experts a token, clean perplexity
    table = lines[: lines.index("")]
    assert len(table) > 8 and max(map(len, table)) <= 80 and "…" not in done.stdout
    assert "results.json" in done.stdout.replace("\n", "")
    assert str(out / "report.html") in done.stdout
    assert "smoe, top 3" in (out / "report.html").read_text(encoding="utf-8")
    found = json.loads((out / "results.json").read_text())
    assert [row["router"] for row in found["rows"]] == ["smoe", "smooth", "smoe, top 3"]
    assert found["rows"][2]["more_compute"] == pytest.approx(0.5)
    assert found["rows"][1]["clean_difference"]["over"] == "these models only"
    assert found["rows"][1]["equal_compute"]["router"] == "smoe, top 3" and found["rows"][0]["equal_compute"] is None
    for row in found["rows"]:
        assert row["cost"]["low"] < row["cost"]["mean"] < row["cost"]["high"]
        assert f"{100 * math.expm1(row['cost']['mean']):+.2f}%" in done.stdout
    assert mentions(" ".join(done.stdout.split()), "llama", "2 layers", "some.txt", "2 seeds")
    assert len(found["cells"]) == 6
    assert hashlib.sha256((out / "results.json").read_bytes()).hexdigest() in (out / "report.html").read_text()
    assert found["run"]["data"]["checksum"]
    assert set(found["versions"]) == {"holdfast", "torch", "transformers", "Python"}


def row(router: str, experts: float) -> Row:
    given: dict[str, Any] = {"seeds": [0], "parameters": 1, "clean": 1.0, "attacked": 1.0}
    return Row(router=router, experts_per_token=experts, more_compute=experts / 2 - 1, **given)


def test_compare_is_a_function_that_returns_what_the_command_stores(text: Path, tmp_path: Path) -> None:
    changes = {"data.source": str(text), **parse_pairs(SMALL, ""), "training.steps": 2}
    steps: list[int] = []
    results = holdfast.compare(
        ["smoe", "smooth[budget=0.5]"],
        seeds=1,
        out=tmp_path / "out",
        changes=changes,
        match_compute=False,
        progress=lambda cell, done: steps.append(done),
    )
    assert [row.router for row in results.rows] == ["smoe", "smooth[budget=0.5]"]
    assert results == Results.load(tmp_path / "out") and (tmp_path / "out" / "report.html").is_file()
    assert steps.count(2) == 2


def test_compare_without_its_extra_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtra, match="needs plotly"):
        holdfast.compare("smoe")


def test_the_baseline_of_equal_compute_has_as_many_experts_as_the_router_that_uses_most() -> None:
    baseline = row("smoe[noise=gumbel]", 2.0)
    (known,) = parse_routers("smoe[noise=gumbel]")
    for given in ([], [known]):  # the baseline may be from an earlier command
        (found,) = matched_baseline([baseline, row("smooth", 2.4), row("top-p", 3.6), row("ac", 2.0)], given, 8)
        assert (found.name, found.k, found.router) == ("smoe[noise=gumbel], top 4", 4, "smoe")
        assert found.options == known.options
    matched = row("smoe[noise=gumbel], top 3", 3.0)
    assert matched_baseline([baseline, row("smooth", 2.4), matched], [known], 8) == []
    assert matched_baseline([baseline, row("ac", 2.0), row("remoe", 1.2), row("smooth", 2.001)], [known], 8) == []
    assert matched_baseline([baseline], [known], 8) == []
    assert matched_baseline([row("smoe", 2.0), row("top-p", 2.0001)], [], 2) == []
