"""Several runs on one page, and the leaderboard of ledgers: `holdfast report A B` and `holdfast board`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from report import audited, geometries, mismatches
from report.browsing import EVIL
from report.stored import stored_costs, stored_images
from report.tags import Tags
from wording import assert_refused, mentions

from holdfast.report.stored_pages import board_page
from holdfast.train.ledger import LedgerCell, read_ledger

LEDGER = Path(__file__).parent.parent.parent / "results" / "ledger"
EXPERIMENT = "enwik8-d186d535"


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    contents = {
        "text/results.json": stored_costs(),
        "images/results.json": stored_images(),
        "audit/audit.json": audited.stored_audit(),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))
    return [str(tmp_path / Path(name).parent) for name in contents]


def ledger_of(folder: Path, *names: str) -> Path:
    """Return a ledger with some of our own cells."""
    (folder / EXPERIMENT).mkdir(parents=True)
    for name in names:
        shutil.copy(LEDGER / EXPERIMENT / f"{name}.json", folder / EXPERIMENT)
    return folder


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_several_runs_have_a_section_with_a_strip_each_and_audits_a_table(
    folders: list[str], tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "together.html"
    command.printed("report", *folders, "--out", out)
    page = Tags(out.read_text(encoding="utf-8"))
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "table" and "id" in attributes]
    assert ids == ["strip-1", "strip-2"]
    for text in (
        "2 comparisons and 1 audit",
        "a swap of 1.5% of its words",
        "PGD, l_inf 8/255",
        "Audits side by side",
        "tiny-mixtral",
    ):
        assert text in page.text
    assert str(tmp_path) not in page.text  # the name of a folder is enough
    assert out.stat().st_size < 200_000  # no plots, so no plotly


def test_the_numbers_of_several_runs_are_exported(folders: list[str], tmp_path: Path, command: Command) -> None:
    command.printed("report", *folders, "--csv", "--latex", "--out", tmp_path / "all.html")
    text = (tmp_path / "all.csv").read_text(encoding="utf-8")
    assert '"text: a small model, on python-docs",2,smooth,"Clean perplexity, difference",-3.125,-4.625,-1.625,' in text
    assert 'Audits side by side,1,audit,"predictions that change, at most",3.1,,,3.10% (noise.0.01)' in text
    assert "tabular" in (tmp_path / "all.tex").read_text() and not (tmp_path / "all.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the folder"),
        (["text", "images"], "--out"),
        (["text", "text", "--out", "c.html"], "twice"),
        (["text", "rollout", "--out", "c.html"], "rollout is a mismatch report"),
        (["text", "nowhere", "--out", "c.html"], "there is no folder or file nowhere"),
        (["text", "broken", "--out", "c.html"], "broken/audit.json is damaged"),
        (["broken/audit.json"], "broken/audit.json is damaged"),
        (["."], "results.json"),
        (["planes", "--svg"], "no picture"),
    ],
)
def test_a_mistake_gets_one_sentence(
    arguments: list[str], says: str, folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name, content in {
        "rollout/mismatch.json": mismatches.stored_mismatch(),
        "broken/audit.json": audited.stored_audit() | {"layers": [{}]},
        "planes/geometry.json": geometries.stored_geometry(),
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    assert says in command.refused("report", *arguments)
    assert not list(tmp_path.rglob("*.html"))


def test_a_page_and_exports_are_written_beside_the_results_and_not_overwritten_unless_forced(
    folders: list[str], command: Command
) -> None:
    folder = Path(folders[0])
    for mine, exports in (("report.html", []), ("report.tex", ["--csv", "--latex", "--svg"])):
        (folder / mine).write_text("mine")
        before = sorted(path.name for path in folder.iterdir())
        assert mentions(command.refused("report", folder, *exports), f"{mine} exists", "--force")
        assert sorted(path.name for path in folder.iterdir()) == before and (folder / mine).read_text() == "mine"
        assert str(folder) in command.printed("report", folder, *exports, "--force").replace("\n", "")
    assert "made no difference" in (folder / "report.html").read_text(encoding="utf-8")
    assert {"report.csv", "report-differences.svg"} < {path.name for path in folder.iterdir()}


def test_the_board_has_threat_model_cost_seeds_and_model_cards(tmp_path: Path, command: Command) -> None:
    out, routers = tmp_path / "board.html", ("smoe", "ac", "symphony+smooth")
    ledger = ledger_of(tmp_path / "ledger", *(f"{router}-seed{seed}" for router in routers for seed in (0, 1, 2)))
    command.printed("board", ledger, "--out", out)
    page = Tags(out.read_text(encoding="utf-8"))
    for text in ("a swap of 1.7% of its words for AAA", "NVIDIA H200", "SymphonySMoE", "32.4 M", "symphony+smooth"):
        assert text in page.text, text
    rows = [attributes for tag, attributes in page.tags if tag == "tr" and "data-router" in attributes]
    (experiment,) = read_ledger(ledger)
    best = min(range(3), key=lambda at: experiment.rows[at].attacked or 0)
    assert len(rows) == 3 and rows[0]["data-router"] == str(best)
    (shown,) = board_page([experiment]).values["sections"]
    for at, row in enumerate(shown.strip.rows):
        own = experiment.rows[row.place]
        levels = [column.bars[at].level for column in shown.strip.columns[:2]]
        assert (row.label, levels) == (own.router, [f"{own.clean:.2f}", f"{own.attacked:.2f}"])
        assert shown.strip.columns[0].bars[at].kind == "baseline" if own.router == "smoe" else own.clean_difference
    assert shown.strip.rows[shown.strip.columns[1].best].label == experiment.rows[best].router
    assert len([tag for tag, _ in page.tags if tag == "details"]) == 4


def test_two_ledgers_are_one_board(tmp_path: Path) -> None:
    """A cell that both have counts once."""
    one = ledger_of(tmp_path / "one", "smoe-seed0", "smoe-seed1", "ac-seed0")
    two = ledger_of(tmp_path / "two", "smoe-seed0", "smoe-seed2", "ac-seed1")
    (experiment,) = read_ledger(one, two)
    assert [(row.router, row.seeds) for row in experiment.rows] == [("smoe", [0, 1, 2]), ("ac", [0, 1])]
    (turned,) = read_ledger(two, one, baseline="ac")
    assert [row.router for row in turned.rows] == ["ac", "smoe"]


def test_the_rows_of_an_experiment_are_those_of_a_comparison(tmp_path: Path) -> None:
    (experiment,) = read_ledger(ledger_of(tmp_path / "ledger", "smoe-seed0", "smoe-seed1", "ac-seed0", "ac-seed1"))
    results = experiment.results
    assert results.rows == experiment.rows and len(results.cells) == 4
    assert [cell.clean.figure for cell in results.cells_of(results.baseline)] == [
        cell.result["clean"]["figure"] for cell in experiment.cells_of(experiment.rows[0])
    ]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no figure": (lambda content: content["result"]["clean"].pop("figure"), "result.clean.figure is missing"),
    "a text for a number": (lambda content: content["result"]["clean"].update(figure="low"), "result.clean.figure is 'low'"),
    "no weights": (lambda content: content["result"].pop("parameters"), "'parameters' is missing"),
    "no routing": (lambda content: content["result"]["clean"]["routing"].pop("overall"), "'overall' is missing"),
    "another seed": (lambda content: content.update(seed=1), "result.seed is 0, and seed is 1"),
    "another experiment": (lambda content: content["experiment"]["attack"].update(rate=0.5), "belongs to the experiment"),
    "no data": (lambda content: content["experiment"].pop("data"), "'data' is missing"),
    "no recipe": (lambda content: content["experiment"].pop("recipe"), "belongs to the experiment"),
    "an unknown key": (lambda content: content.update(rank=1), "rank"),
    "another schema": (lambda content: content.update(schema=7), "schema"),
    "too few words": (lambda content: content["result"]["clean"]["per_example"]["words"].pop(), "smoe-seed0.json"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_bad_entry_is_refused_with_one_sentence_that_names_its_file(edit: str, tmp_path: Path, command: Command) -> None:
    ledger = ledger_of(tmp_path / "ledger", "smoe-seed0", "ac-seed0")
    change(ledger / EXPERIMENT / "smoe-seed0.json", EDITS[edit][0])
    error = command.refused("board", ledger, "--out", tmp_path / "board.html")
    assert "smoe-seed0.json" in error and EDITS[edit][1] in error
    assert not (tmp_path / "board.html").exists()


def test_contradictions_between_ledgers_are_refused(tmp_path: Path) -> None:
    one, two = (ledger_of(tmp_path / name, "smoe-seed0") for name in ("one", "two"))
    change(two / EXPERIMENT / "smoe-seed0.json", lambda content: content["result"]["clean"].update(figure=1.0))
    assert "one" in assert_refused("two/.*different results of the same cell", read_ledger, one, two)
    three = ledger_of(tmp_path / "three", "ac-seed0")
    change(three / EXPERIMENT / "ac-seed0.json", lambda content: content["measure"].update(better="higher"))
    assert_refused("ac-seed0.json has another measure", read_ledger, one, three)


def test_a_board_needs_results_and_a_free_file(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "board.html").write_text("mine")
    for arguments, says in (
        ([], "at least one ledger"),
        ([tmp_path / "empty", "--out", tmp_path / "new.html"], "has no results"),
        ([tmp_path / "nowhere", "--out", tmp_path / "new.html"], "is not a folder"),
        ([LEDGER, "--out", tmp_path / "board.html"], "--force"),
    ):
        assert says in command.refused("board", *arguments)
    (page,) = tmp_path.glob("*.html")
    assert page.name == "board.html" and page.read_text() == "mine"


def test_texts_of_entries_are_text(tmp_path: Path) -> None:
    """A name that contains markup, as an entry of somebody else might."""
    ledger = ledger_of(tmp_path / "ledger", "smoe-seed0", "ac-seed0")
    file = ledger / EXPERIMENT / "ac-seed0.json"

    def poison(content: dict[str, Any]) -> None:
        content["result"]["router"] = content["cell"]["router"] = EVIL
        content["origin"]["device"] = EVIL

    change(file, poison)
    assert LedgerCell.load(file).router == EVIL
    page = Tags(board_page(read_ledger(ledger)).html())
    assert page.text.count(EVIL) >= 3 and "img" not in dict(page.tags)
