"""The ledger of cells: what `compare` enters, what is kept, and that merged cells give the rows of one comparison."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from wording import assert_refused

import holdfast
from holdfast.train.ledger import LARGEST_CELL, LedgerCell, read_ledger
from holdfast.train.results import Results

SMALL = {"training.steps": 4, "training.batch": 2, "data.length": 32, "data.test_bytes": 20_000, "data.train_tokens": 20_000}


def run(folder: Path, ledger: Path, routers: str = "smoe,symphony", **changes: Any) -> Results:
    return holdfast.compare(routers, seeds=2, out=folder, ledger=ledger, changes={**SMALL, **changes})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Return a ledger with the cells of one comparison, and its results."""
    root = tmp_path_factory.mktemp("ledger")
    return root / "ledger", run(root / "runs", root / "ledger")


def test_every_cell_is_one_small_file_with_its_origin(compared: tuple[Path, Results]) -> None:
    ledger, _ = compared
    files = sorted(ledger.glob("*/*.json"))
    assert [file.stem for file in files] == ["smoe-seed0", "smoe-seed1", "symphony-seed0", "symphony-seed1"]
    for file in files:
        assert file.stat().st_size <= LARGEST_CELL
        cell = LedgerCell.load(file)
        assert cell.origin["versions"]["torch"] and cell.origin["device"]
        assert len(cell.curve.steps) == 4 and cell.folder == file.parent.name


def test_the_rows_of_a_ledger_are_those_of_the_comparison(compared: tuple[Path, Results]) -> None:
    ledger, results = compared
    (experiment,) = read_ledger(ledger)
    assert [row.router for row in experiment.rows] == ["smoe", "symphony"]
    for row, expected in zip(experiment.rows, results.rows, strict=True):
        assert row.seeds == expected.seeds
        for name in ("clean", "attacked", "experts_per_token", "clean_bits_per_byte"):
            assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    mine, theirs = experiment.rows[1].clean_difference, results.rows[1].clean_difference
    assert mine is not None and theirs is not None and mine.mean == pytest.approx(theirs.mean, rel=1e-4)
    assert mine.low is not None and theirs.low is not None
    # The losses of adjacent blocks are added up, so intervals differ, but not by much.
    assert mine.mean - mine.low == pytest.approx(theirs.mean - theirs.low, rel=0.05)


def test_ledgers_of_two_machines_are_merged_by_copying(compared: tuple[Path, Results], tmp_path: Path) -> None:
    ledger, _ = compared
    both = tmp_path / "both"
    for name in ("smoe", "symphony"):
        shutil.copytree(
            ledger,
            both,
            ignore=lambda folder, names, name=name: [  # type: ignore[misc]
                each for each in names if each.endswith(".json") and not each.startswith(name)
            ],
            dirs_exist_ok=True,
        )
    assert [row.clean for row in read_ledger(both)[0].rows] == [row.clean for row in read_ledger(ledger)[0].rows]


def test_a_cell_that_is_there_is_kept(
    compared: tuple[Path, Results], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = tmp_path / "ledger"
    shutil.copytree(compared[0], ledger)
    (file,) = ledger.glob("*/smoe-seed0.json")
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run(compared[0].parent / "runs", ledger)
    assert not caplog.records
    stored = json.loads(file.read_text())
    stored["result"]["clean"]["figure"] = 1.5
    file.write_text(json.dumps(stored))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run(compared[0].parent / "runs", ledger)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [f"{file} has another result"]
    assert json.loads(file.read_text())["result"]["clean"]["figure"] == 1.5


def test_another_experiment_has_another_folder_and_a_misplaced_cell_is_refused(
    compared: tuple[Path, Results], tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    shutil.copytree(compared[0], ledger)
    run(tmp_path / "longer", ledger, "smoe", **{"training.steps": 5})
    first, second = sorted(ledger.iterdir())
    assert len(read_ledger(ledger)) == 2
    shutil.move(next(first.glob("smoe-seed0.json")), second / "moved.json")
    assert_refused(f"moved.json belongs to the experiment {first.name}", read_ledger, ledger)


def test_the_place_of_the_data_does_not_matter(tmp_path: Path) -> None:
    for place in ("here", "there"):
        texts = tmp_path / place / "texts"
        texts.mkdir(parents=True)
        for part in ("a", "b", "c"):
            (texts / f"{part}.txt").write_text(f"part {part} of a river is not the sea\n" * 500)
        run(tmp_path / place / "run", tmp_path / place / "ledger", "smoe", **{"data.source": str(texts)})
    (here,), (there,) = (read_ledger(tmp_path / place / "ledger") for place in ("here", "there"))
    assert here.name == there.name


@pytest.mark.slow
def test_the_place_and_the_version_of_the_cells_that_it_starts_from_do_not_matter(tmp_path: Path) -> None:
    run(tmp_path / "here", tmp_path / "unused", "smoe")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    began = json.loads((tmp_path / "there" / "run.json").read_text())
    (tmp_path / "there" / "run.json").write_text(json.dumps({**began, "holdfast": "0.0.1"}))
    changes: dict[str, Any] = {"training.steps": 2, "training.warmup": 0}
    changes |= dict.fromkeys(("sparse.experts", "sparse.hidden", "data.tokens", "data.vocabulary"))
    for place in ("here", "there"):
        how: dict[str, Any] = {"recipe": "labels-tiny", "seeds": 1, "changes": changes, "ledger": tmp_path / "ledger"}
        holdfast.compare("smoe", start=tmp_path / place, out=tmp_path / f"{place}-tuned", **how)
    assert [len(experiment.cells) for experiment in read_ledger(tmp_path / "ledger")] == [1]


def test_a_large_cell_keeps_no_results_of_single_examples_and_a_larger_one_is_left_out(
    compared: tuple[Path, Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    smallest = min(file.stat().st_size for file in compared[0].glob("*/*.json"))
    monkeypatch.setattr("holdfast.train.ledger.LARGEST_CELL", smallest - 10)
    run(compared[0].parent / "runs", tmp_path / "large")
    cells = read_ledger(tmp_path / "large")[0].cells
    assert len(cells) == 4 and all("per_example" not in cell.result["clean"] for cell in cells)
    assert all("per_example" in cell.result["clean"] for cell in read_ledger(compared[0])[0].cells)
    monkeypatch.setattr("holdfast.train.ledger.LARGEST_CELL", 10)
    run(compared[0].parent / "runs", tmp_path / "larger")
    assert not list(tmp_path.glob("larger/*/*.json")) and "smoe-seed0 is not in the ledger" in caplog.text
