"""The ledger: the results of single cells, one small JSON file each, which may come from several machines.

    LEDGER/enwik8-3f2a91c0/smoe-seed0.json      the data and the hash of the experiment; the cell

Cells with the same hash were trained and tested in the same way, so they can be compared: the hash is that of the recipe,
the data, the attack and the start. It does not depend on where these are on a machine, nor on an option that a later version
of Holdfast adds to recipes, with a default that changes nothing. To merge two ledgers, copy the files of one into the other.

A cell keeps everything that the rows of a comparison need. Losses of single blocks of text are added up over adjacent
blocks, so intervals over examples differ a little from those of the comparison.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checked import from_mapping
from holdfast.files import read_json, require_no_links
from holdfast.routing.grammar import written_pairs
from holdfast.stored import StoredRecord, without_nan
from holdfast.train.cells import Cell, safe_file_name
from holdfast.train.comparison import Comparison
from holdfast.train.recipe import changed_keys
from holdfast.train.results import CellResult, Results, Row, Run, TrainingCurve, ValidationCurve
from holdfast.train.run_folder import RUN_FILE
from holdfast.train.summary import summarise
from holdfast.train.task import Measure

LARGEST_CELL = 60_000  # bytes of a file
POINTS = 60  # of the training curve
GROUPS = 200  # of adjacent blocks of text at most, whose losses are kept
DIGITS = 9  # significant ones, of stored numbers
PLACES = (("data", "source"), ("data", "shifts"), ("model", "checkpoint"))  # of a recipe: an experiment has checksums
LEFT_OUT = ("log", "view", "graphs", "states", "counts", "histogram")  # by name, wherever they are in a result

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class LedgerCell(StoredRecord):
    """The result of a router with one seed."""

    file_name = "cell.json"
    kind = "a cell of a ledger"
    remedy = "remove the file, or enter its cell again with `holdfast compare --ledger`"

    experiment: dict[str, Any]  # what all its cells share: the recipe, the data, the attack
    measure: Measure
    cell: dict[str, Any]  # the router with its options, and the settings of a sweep
    seed: int
    curve: TrainingCurve
    result: dict[str, Any]  # its result.json, without what only a page draws
    # with `training.validate_every`
    validation: ValidationCurve = field(default_factory=lambda: ValidationCurve([], [], []))
    origin: dict[str, Any] = field(default_factory=dict)  # the versions, the device and the commit that trained it

    @property
    def hash(self) -> str:
        data = {key: value for key, value in self.experiment["data"].items() if key != "about"}
        return hashlib.sha256(json.dumps({**self.experiment, "data": data}, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        return f"{safe_file_name(str(self.experiment['data'].get('name', 'data')))}-{self.hash}"

    @property
    def router(self) -> str:
        return str(self.result["router"])


@dataclass(frozen=True)
class Experiment:
    """The cells of a ledger that can be compared; the baseline's come first."""

    name: str  # of its folder
    cells: list[LedgerCell]

    @cached_property
    def rows(self) -> list[Row]:
        return summarise([with_origin(cell) for cell in self.cells], self.cells[0].router)

    @property
    def results(self) -> Results:
        """The experiment as a comparison; without what only the page of one draws: graphs, curves of routing, views."""
        first = self.cells[0]
        versions = {str(name): str(version) for name, version in first.origin.get("versions", {}).items()}
        known = {key: first.experiment[key] for key in ("recipe", "data", "attack")}
        run = Run(holdfast=versions.get("holdfast", "unknown"), measure=first.measure, **known)
        return Results(run=run, versions=versions, rows=self.rows, cells=list(map(cell_result, self.cells)))

    def cells_of(self, row: Row) -> list[LedgerCell]:
        wanted = row.router, row.settings
        return [cell for cell in self.cells if (cell.router, cell.result.get("settings", {})) == wanted]


def enter_cells(ledger: Path, comparison: Comparison, results: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write results of cells of a comparison into the ledger, and return their files.

    A cell that the ledger has already is kept, with a warning if its result is another one. One that is too large even
    without the results of single examples (tens of layers in many tests) is left out with a warning.
    """
    experiment = _comparable(comparison.identity())
    if comparison.starts_from_cells:
        experiment["start"] = _comparable(read_json(Path(str(comparison.recipe.model.checkpoint)) / RUN_FILE))
        experiment["start"]["data"].pop("about", None)
    experiment = without_nan(experiment)
    files = []
    cells = {(cell.choice.name, cell.seed, written_pairs(dict(cell.settings))): cell for cell in comparison.cells}
    for result in results:
        cell = cells[result["router"], result["seed"], written_pairs(result.get("settings", {}))]
        entry = _entry(experiment, comparison.task.measure, cell, result)
        if (size := len(entry.to_json())) > LARGEST_CELL:
            logger.warning("%s is not in the ledger: it has %d bytes, and at most %d fit.", cell.name, size, LARGEST_CELL)
            continue
        files.append(ledger / entry.folder / f"{cell.folder}.json")
        require_no_links(files[-1], ledger)
        if not files[-1].exists():
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            entry.save(files[-1])
        elif (known := LedgerCell.load(files[-1])).result != entry.as_stored().result:
            logger.warning(
                "%s has another result (%s); it is kept.", files[-1], known.origin.get("device", "unknown device")
            )
    return files


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run without the version of Holdfast, and its recipe as a ledger compares it."""
    kept = {key: value for key, value in identity.items() if key != "holdfast"}
    return {**kept, "recipe": comparable_recipe(identity["recipe"])}


def comparable_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, as `Recipe.describe` returns them, without defaults and places on a machine."""
    recipe = changed_keys(recipe)
    recipe.pop("about", None)
    for section, key in PLACES:
        recipe.get(section, {}).pop(key, None)
    return recipe


def _entry(experiment: Mapping[str, Any], measure: Measure, cell: Cell, result: Mapping[str, Any]) -> LedgerCell:
    """Return the entry of a cell; without the results of single examples if it would be too large."""

    def entry(*left_out: str) -> LedgerCell:
        kept = {key: value for key, value in result.items() if key != "origin"}
        return LedgerCell(
            experiment=dict(experiment),
            measure=measure,
            cell=without_nan(cell.describe()),
            seed=cell.seed,
            curve=TrainingCurve.of(result["log"], POINTS),
            result=compact(without_nan(kept), {*LEFT_OUT, *left_out}),
            validation=ValidationCurve.of(result["log"]),
            origin=without_nan(result.get("origin", {})),
        )

    whole = entry()
    return whole if len(whole.to_json()) <= LARGEST_CELL else entry("per_example")


def compact(value: Any, left_out: Set[str] = frozenset()) -> Any:
    """Return a part of a result with shorter numbers, losses of fewer blocks, and without the keys in `left_out`."""
    if isinstance(value, dict):
        if "losses" in value and "words" in value:
            groups = min(GROUPS, len(value["losses"]))
            for key in ("losses", "words"):
                value = {**value, key: [float(part.sum()) for part in np.array_split(np.array(value[key]), groups)]}
        return {key: compact(part, left_out) for key, part in value.items() if key not in left_out}
    if isinstance(value, list):
        return [compact(part, left_out) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def with_origin(cell: LedgerCell) -> dict[str, Any]:
    """Return the result of a cell with its origin, as its `result.json` had it."""
    return {**cell.result, "origin": cell.origin}


def cell_result(cell: LedgerCell) -> CellResult:
    """Return what a page shows of a cell; raise ValueError if its result is not one."""
    left_out = {
        "snapshots": {"steps": [], "graph": "co-selection", "layers": []},
        "view": {"examples": [], "routes": {"layers": []}},
    }
    found = {**with_origin(cell), "curve": cell.curve, "validation": cell.validation, **left_out}
    return from_mapping(CellResult, found, "result", skip_unknown=True)


def read_ledger(*ledgers: Path, baseline: str = "smoe") -> list[Experiment]:
    """Return the experiments of a ledger, or of several together, sorted by name; raise ValueError if a file is unusable.

    baseline    the router that the others are compared with, in experiments that have it; in others, the first by name
    """
    found: dict[str, dict[tuple[str, str], tuple[Path, LedgerCell]]] = {}
    for path, cell in (entry for ledger in ledgers for entry in _entries(ledger)):
        cells = found.setdefault(path.parent.name, {})
        same, known = cells.get((path.stem, cell.folder)), next(iter(cells.values()), None)
        if same is not None and same[1].result != cell.result:
            raise ValueError(f"{path} and {same[0]} have different results of the same cell; remove one of them.")
        if known is not None and known[1].measure != cell.measure:
            raise ValueError(f"{path} has another measure than {known[0]}, of the same experiment; remove one of them.")
        cells[path.stem, cell.folder] = path, cell

    def order(cell: LedgerCell) -> tuple[bool, str, int]:
        return cell.router != baseline, cell.router, cell.seed

    return [
        Experiment(name, sorted((cell for _, cell in cells.values()), key=order)) for name, cells in sorted(found.items())
    ]


def _entries(ledger: Path) -> Iterator[tuple[Path, LedgerCell]]:
    """Yield the files of a ledger with their cells, each checked on its own, so that an error can name the file."""
    if not ledger.is_dir():
        raise ValueError(f"{ledger} is not a folder; name a ledger that `holdfast compare --ledger` wrote.")
    for folder in sorted(path for path in ledger.iterdir() if path.is_dir()):
        for path in sorted(folder.glob("*.json")):
            cell = LedgerCell.load(path)
            try:
                belongs = cell.folder
                if cell.result["seed"] != cell.seed:
                    raise ValueError(f"result.seed is {cell.result['seed']!r}, and seed is {cell.seed}")
                cell_result(cell)
                summarise([with_origin(cell)], cell.router)
            except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as problem:
                missing = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem).rstrip(".")
                raise ValueError(f"{path} is not a result that can be used: {missing}; {LedgerCell.remedy}.") from None
            if belongs != folder.name:
                raise ValueError(f"{path} belongs to the experiment {belongs}; move it into that folder.")
            yield path, cell
