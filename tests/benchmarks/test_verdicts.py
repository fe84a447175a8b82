"""The list of cells in benchmarks/verdicts.yaml, and the script that trains them."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import verdicts
from transformers import CONFIG_MAPPING
from verdict_cells import Entry, Experiment, Places, Stored, read_list, start_of
from verdicts import Clock, Run, Worker, lines

from holdfast.files import write_atomically
from holdfast.train import load_recipe, make_task, parse_routers
from holdfast.train.building import preflight, with_training
from holdfast.train.ledger import LedgerCell, comparable_recipe
from holdfast.train.task import require_trainable

ENTRIES = read_list()
EMBEDDED: dict[str, dict[str, object]] = {  # data that need no files, in place of those of a recipe
    "enwik8": {"data.source": "python-docs"},
    "switch-small": {"data.source": "python-docs"},
    "cifar10": {"data.source": "digits", "data.size": 8, "training.warmup": 3},
    "llava-tiny": {"data.pictures": 200},
}
EXPERIMENTS = {one.name: one for entry in ENTRIES for one in entry.experiments}
ROOT = Path(__file__).parents[2]


def entry(name: str, routers: Sequence[str] | None = None, *, rehearse: bool = False) -> Entry:
    found = next(one for one in (read_list(rehearse=True) if rehearse else ENTRIES) if one.name == name)
    return found if routers is None else replace(found, routers=routers)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
@pytest.mark.every_combination
def test_every_key_of_an_experiment_is_one_of_its_recipe(experiment: Experiment) -> None:
    """`load_recipe` refuses unknown keys, but not those of a model's config."""
    recipe = load_recipe(experiment.recipe, {**experiment.changes, "about": "so that the recipe is read again"})
    assert comparable_recipe(recipe.describe())
    known = CONFIG_MAPPING[recipe.model.family]().to_dict() if recipe.model.family else {}
    assert all(key.split(".")[2] in known for key in experiment.changes if key.startswith("model.config."))
    assert experiment.start is None or experiment.changes["sparse.experts"] is None


@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.start is None])
def test_every_router_of_an_experiment_can_be_put_into_its_model_and_trained(name: str) -> None:
    experiment = EXPERIMENTS[name]
    recipe = load_recipe(experiment.recipe, {**experiment.changes, **EMBEDDED.get(experiment.recipe, {})})
    routers = dict.fromkeys(router for one in ENTRIES if experiment in one.experiments for router in one.routers)
    choices = [choice for router in routers for choice in parse_routers(router)]
    task = make_task(recipe)
    preflight(task, choices, report_size=False)
    for choice in choices:
        require_trainable(with_training(task, choice), seed=0)


def test_routers_start_from_cells_that_the_list_asks_for_too() -> None:
    cells = {(wanted.experiment.name, wanted.router, wanted.seed) for one in ENTRIES for wanted in one.cells}
    starts = [start for one in ENTRIES for wanted in one.cells if (start := start_of(wanted)) is not None]
    assert starts and all((start.experiment.name, start.router, start.seed) in cells for start in starts)


def test_a_table_is_filled_seed_by_seed() -> None:
    cells = [(wanted.seed, wanted.router) for wanted in entry("table").cells]
    assert cells[:10] == [(0, router) for router in entry("table").routers] and cells[10][0] == 1
    tasks = [(wanted.router, wanted.experiment.name) for wanted in entry("fine-tuning").cells]
    assert [task for router, task in tasks[:6]] == ["sst2", "sst5", "banking77", "cola", "mrpc", "rte"]
    assert len({router for router, _ in tasks[:6]}) == 1


def test_no_cell_is_asked_for_twice() -> None:
    names = [wanted.name for one in ENTRIES for wanted in one.cells]
    assert len(set(names)) == len(names)


def test_a_stored_cell_is_known_by_its_recipe_its_data_and_its_router(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "results" / "ledger")
    wanted = next(entry("table").cells)
    stored = LedgerCell.load(next((ROOT / "results" / "ledger").glob("enwik8-*/smoe-seed0.json")))
    recipe = comparable_recipe(places.recipe(wanted.experiment).describe())

    def known(**changes: object) -> list[str]:
        other = replace(stored, experiment={**stored.experiment, "recipe": recipe, **changes})
        folder = places.ledger / other.folder
        folder.mkdir(parents=True, exist_ok=True)
        other.save(folder / "smoe-seed0.json")
        return Stored(places).missing(wanted)

    assert Stored(places).missing(wanted) == ["cell"]
    assert known(recipe={**recipe, "training": {**recipe["training"], "schedule": "constant"}}) == ["cell"]
    assert known(data={**stored.experiment["data"], "name": "enwik9"}) == ["cell"]
    assert known(start={"recipe": recipe}) == ["cell"]
    assert known() == ["audits"]
    assert Stored(places).missing(replace(wanted, router="smoe[k=3]")) == ["cell"]
    folder = Stored(places).folder_of(wanted)
    assert folder is not None
    (audit,) = places.measured(wanted.entry, folder, wanted.cell)
    audit.parent.mkdir(parents=True)
    write_atomically(audit, "{}")
    assert Stored(places).missing(wanted) == []
    assert "1 of 30 cells" in next(lines([entry("table")], places))


def test_no_cell_is_started_that_would_not_end_in_time() -> None:
    one, other = list(entry("table").cells)[:2]

    def running(seconds: float, share: float = 0.0) -> Worker:
        return Worker(None, None, one, spent=seconds, share=share)  # type: ignore[arg-type]

    def fits(seconds: float, *workers: Worker, seen: float | None = None) -> bool:
        clock = Clock(minutes=seconds / 60)
        if seen is not None:
            clock.note(other, seen)
        return clock.fits(other, workers)

    assert fits(100) and not fits(90), "63 seconds of a cell that runs alone are longer"
    assert fits(130 / 0.94, running(0)) and not fits(120 / 0.96, running(0))
    assert fits(100, running(50)) and not fits(100, running(20))
    assert not fits(150, running(50, share=0.25)), "by its own steps it takes 200 seconds"
    assert not fits(100, seen=80) and fits(130, seen=80)
    assert Clock(None).fits(other, [running(0)] * 9)


@pytest.mark.slow
def test_two_experiments_are_rehearsed_to_the_end(tmp_path: Path) -> None:
    """Of which the second starts from cells of the first."""
    write_text_data(tmp_path / "data")
    entries = [entry("table", ["symphony+smooth"], rehearse=True), entry("fine-tuning", ["smoe"], rehearse=True)]
    entries[1] = replace(entries[1], experiments=entries[1].experiments[:1])
    places = Places(tmp_path / "out", tmp_path / "results" / "ledger", tmp_path / "data")
    run = Run(entries, places, Clock(None), 1, tmp_path / "new.tar.gz")
    run.run()
    assert not run.failed and not run.left
    assert Run(entries, places, Clock(None), 1, None).left == []
    (audit,) = places.results.glob("audits/enwik8-*/symphony+smooth-seed0.json")
    found = json.loads(audit.read_text())
    assert audit.stat().st_size < 20_000 and not found["skipped"]
    assert len(found["layers"]) == 2 and set(found["perturbations"]) >= {"noise.0.05", "model.bf16", "batch.alone", "attack"}
    assert 0 <= found["overall"]["flips.noise.0.01"] <= found["overall"]["flips.noise.0.05"] <= 1
    shares = list(found["certified"].values())
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] <= 1
    with tarfile.open(tmp_path / "new.tar.gz") as archive:
        names = sorted(archive.getnames())
    stored = sorted(path.relative_to(places.results).as_posix() for path in places.results.glob("*/*/*.json"))
    assert names == stored and [name.split("/")[0] for name in stored] == ["audits", "ledger", "ledger", "ledger"]


@pytest.mark.slow
def test_a_killed_rehearsal_goes_on_with_what_is_left(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "verdicts.py"), "--rehearse", "--only", "vision-language"]
    command = [*script, "--out", str(tmp_path), "--tar", str(tmp_path / "new.tar")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (tmp_path / "new.tar").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("ledger/*/*.json")}
    assert before and "smoe-seed0.json" in {path.name for path in before}
    assert verdicts.main(command[2:]) == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("ledger/*/*.json")}
    assert len(after) == 5 and {path: after[path] for path in before} == before


def write_text_data(folder: Path) -> None:
    """Write stand-ins for enwik8, which must have 100 million bytes, and for SST-2."""
    for name in ("enwik8", "sst"):
        (folder / name).mkdir(parents=True)
    sentence = b"The quick brown fox jumps over the lazy dog, and a [[cat]] of 12 years looks at both.\n"
    (folder / "enwik8" / "enwik8").write_bytes((sentence * (100_000_000 // len(sentence) + 1))[:100_000_000])
    for split in ("train", "dev", "test"):
        rows = [f"{number % 2} {'a good' if number % 2 else 'no good'} film of {number} minutes" for number in range(24)]
        (folder / "sst" / f"stsa.binary.{split}").write_text("\n".join(rows) + "\n")
