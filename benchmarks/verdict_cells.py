"""The cells of `verdicts.yaml`: what they are, which of them are stored, and how one is trained and measured."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from holdfast.checked import from_mapping
from holdfast.files import write_atomically
from holdfast.locking import POLL
from holdfast.stored import without_nan
from holdfast.train import Cell, Comparison, Recipe, load_recipe, parse_routers
from holdfast.train.ledger import LedgerCell, compact, comparable_recipe, enter_cells
from holdfast.train.task_record import is_trained

LIST = Path(__file__).with_suffix("").with_name("verdicts.yaml")
# What issue 40 asks of each model beside its cell: dtypes, batches, noise, a lost expert and a routing attack.
PERTURBED = ("noise", "routing", "model", "batch", "attack", "lost-expert")
RADII = (0.0009, 0.4)  # the certified shares between these relative radii are stored
REHEARSED_AUDIT = {"batch": 2, "length": 32, "tokens": 128, "attack_tokens": 8}
REHEARSED_CERTIFICATE = {"samples": 20, "selection": 5, "examples": 2, "steps": 1, "draws": 2, "votes": 10}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all its cells share; `verdicts.yaml` explains the values."""

    name: str
    about: str
    recipe: str
    changes: Mapping[str, Any]
    start: "Experiment | None" = None
    seconds: float | None = None
    data: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Routers and seeds of experiments, and what is measured of each cell."""

    name: str
    issue: int
    part: str | None = None
    about: str
    experiments: Sequence[Experiment]
    seeds: Sequence[int]
    routers: Sequence[str]
    audit: Mapping[str, Any] | None = None
    certify: Mapping[str, Any] | None = None

    @property
    def cells(self) -> "Iterator[Wanted]":
        """Yield its cells, seed by seed, so that after each seed the table is one."""
        for seed in self.seeds:
            for router in self.routers:
                yield from (Wanted(self, experiment, router, seed) for experiment in self.experiments)


@dataclass(frozen=True)
class Wanted:
    """A cell that is asked for."""

    entry: Entry
    experiment: Experiment
    router: str
    seed: int

    @property
    def cell(self) -> Cell:
        (choice,) = parse_routers(self.router)
        return Cell(choice, self.seed)

    @property
    def name(self) -> str:
        return f"{self.experiment.name}, {self.cell.name}"


def start_of(wanted: Wanted) -> Wanted | None:
    """Return the cell that a cell starts from, if it starts from one; nothing is measured of it beside its ledger's."""
    start, entry = wanted.experiment.start, wanted.entry
    if start is None:
        return None
    return Wanted(replace(entry, experiments=[start], audit=None, certify=None), start, wanted.router, wanted.seed)


def read_list(path: Path = LIST, *, rehearse: bool = False) -> list[Entry]:
    """Return the entries of the list in their order; for a rehearsal with the first seed only, and tiny."""
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    experiments: dict[str, Experiment] = {}
    for name, values in written["experiments"].items():
        given = {key: value for key, value in values.items() if key not in ("set", "from", "rehearsal")}
        changes = values["set"] | (values["rehearsal"] if rehearse else {})
        found: Experiment = from_mapping(Experiment, {**given, "name": name, "changes": changes})
        experiments[name] = replace(found, start=experiments[values["from"]]) if "from" in values else found
    entries = []
    for values in written["cells"]:
        given = {key: value for key, value in values.items() if key != "of"}
        entry: Entry = from_mapping(Entry, {**given, "experiments": []})
        entry = replace(entry, experiments=[experiments[name] for name in values["of"]])
        if rehearse:
            audit = entry.audit and {**entry.audit, **REHEARSED_AUDIT}
            certify = entry.certify and {**entry.certify, **REHEARSED_CERTIFICATE}
            entry = replace(entry, seeds=entry.seeds[:1], audit=audit, certify=certify)
        entries.append(entry)
    return entries


@dataclass(frozen=True)
class Places:
    """Where things are: the data, the folder with a comparison for each experiment, and the stored results."""

    out: Path
    ledger: Path
    data: Path | None = None

    @property
    def results(self) -> Path:
        return self.ledger.parent

    def recipe(self, experiment: Experiment) -> Recipe:
        start = {} if experiment.start is None else {"model.checkpoint": str(self.out / experiment.start.name)}
        return load_recipe(experiment.recipe, {**experiment.changes, **start})

    def folder(self, wanted: Wanted) -> Path:
        """Return the folder of a cell, with its model."""
        return self.out / wanted.experiment.name / "cells" / wanted.cell.folder

    def is_trained(self, wanted: Wanted) -> bool:
        return is_trained(self.folder(wanted))

    def measured(self, entry: Entry, folder: str, cell: Cell) -> list[Path]:
        """Return the files of what is measured of a cell beside it; `folder` is that of its ledger."""
        audits = [] if entry.audit is None else [self.results / "audits" / folder / f"{cell.folder}.json"]
        sigmas = [] if entry.certify is None else entry.certify["sigma"]
        return audits + [self.results / "certified" / folder / f"{cell.folder}-sigma{sigma:g}.json" for sigma in sigmas]


class Stored:
    """The cells of a ledger by what they are of. No data are read: these are compared by their name, not their checksum."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._keys: dict[str, str] = {}  # by experiment
        self._files: dict[Path, tuple[str, str, int]] = {}

    def folder_of(self, wanted: Wanted) -> str | None:
        """Return the name of the folder in the ledger that has this cell; None if none has."""
        key = (self._key(wanted.experiment), _written(wanted.cell.describe()), wanted.seed)
        for path in sorted((self.places.ledger).glob(f"*/{_escaped(wanted.cell.folder)}.json")):
            if path not in self._files:
                stored = LedgerCell.load(path)
                start = stored.experiment.get("start")
                shared = [stored.experiment["recipe"], stored.experiment["data"]["name"], start and start["recipe"]]
                self._files[path] = _written(shared), _written(stored.cell), stored.seed
            if self._files[path] == key:
                return path.parent.name
        return None

    def missing(self, wanted: Wanted) -> list[str]:
        """Return what is not stored of a cell: "cell", or the names of the folders of what is measured of it."""
        if (folder := self.folder_of(wanted)) is None:
            return ["cell"]
        files = self.places.measured(wanted.entry, folder, wanted.cell)
        return [path.parent.parent.name for path in files if not path.exists()]

    def _key(self, experiment: Experiment) -> str:
        if experiment.name not in self._keys:
            recipe = self.places.recipe(experiment)
            start = experiment.start and self._recipe(experiment.start)
            self._keys[experiment.name] = _written([self._recipe(experiment), recipe.data.source, start])
        return self._keys[experiment.name]

    def _recipe(self, experiment: Experiment) -> dict[str, Any]:
        return comparable_recipe(self.places.recipe(experiment).describe())


def _written(value: Any) -> str:
    return json.dumps(without_nan(value), sort_keys=True)


def _escaped(name: str) -> str:
    return name.replace("[", "[[]")


@dataclass
class Runner:
    """Trains cells and stores what is asked of them. The data of an experiment are read once."""

    places: Places
    entries: Sequence[Entry]
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    @cached_property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def run(self, wanted: Wanted, progress: Callable[[float], None], stored: Callable[[Path], None]) -> None:
        """Train a cell, enter it in the ledger, then audit and certify its model; call `stored` with each file.

        What is stored already is kept.
        """
        import torch

        comparison, cell = self._comparison(wanted), wanted.cell
        steps = comparison.steps_of(cell)
        while not isinstance(result := comparison.attempt(cell, lambda _, done: progress(done / steps)), dict):
            time.sleep(POLL)  # a process of a killed run still holds the cell
        files = enter_cells(self.places.ledger, comparison, [result])
        if not files:
            raise ValueError(f"{wanted.name} is too large for the ledger.")
        file = files[0]
        stored(file)
        missing = [path for path in self.places.measured(wanted.entry, file.parent.name, cell) if not path.exists()]
        if missing:
            model = Model(comparison, cell, result, self.places.folder(wanted), self.device)
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.parent.name == "audits":
                assert wanted.entry.audit is not None
                _write(path, model.audited(wanted.entry.audit))
            else:
                assert wanted.entry.certify is not None
                sigma = float(path.stem.rpartition("-sigma")[2])
                _write(path, model.certified({**wanted.entry.certify, "sigma": sigma}))
            stored(path)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # other processes use the same GPU

    def _comparison(self, wanted: Wanted) -> Comparison:
        experiment = wanted.experiment
        recipe, folder = self.places.recipe(experiment), self.places.out / experiment.name
        more: dict[str, Any] = {"data": self.places.data, "report_size": False}
        if experiment.start is not None:  # its task depends on the cell that it starts from
            return Comparison(recipe, parse_routers(wanted.router), [wanted.seed], folder, **more)
        if experiment.name not in self.comparisons:
            asked = [wanted for entry in self.entries for wanted in entry.cells]
            asked += [start for wanted in asked if (start := start_of(wanted)) is not None]
            asked = [wanted for wanted in asked if wanted.experiment == experiment]
            choices = [choice for router in dict.fromkeys(one.router for one in asked) for choice in parse_routers(router)]
            seeds = sorted({one.seed for one in asked})
            self.comparisons[experiment.name] = Comparison(recipe, choices, seeds, folder, **more)
        return self.comparisons[experiment.name]


@dataclass
class Model:
    """The trained model of a cell, and what is stored of it beside the ledger, in the form that verdicts.yaml explains."""

    comparison: Comparison
    cell: Cell
    result: Mapping[str, Any]
    folder: Path
    device: str

    @cached_property
    def model(self) -> Any:
        from holdfast.train.saved_model import load_model

        return load_model(str(self.folder)).to(self.device)

    @cached_property
    def about(self) -> dict[str, Any]:
        clean, origin = self.result["clean"]["figure"], self.result["origin"]
        kept = {name: origin[name] for name in ("versions", "device", "commit") if name in origin}
        return {"router": self.cell.choice.name, "seed": self.cell.seed, "clean": clean, "origin": kept}

    def audited(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers of an audit of a few test texts."""
        from holdfast.auditing import audit
        from holdfast.train.saved_model import AuditData

        task = self.comparison.task_of_cell(self.cell)
        texts = AuditData(task, settings["tokens"])
        report = audit(self.model, texts, tokenizer=texts.tokenizer, perturb=PERTURBED, progress=_silent, **settings)
        layers: list[dict[str, Any]] = [
            {
                "experts_per_token": layer.experts_per_token.mean,
                "entropy": layer.entropy,
                "load_std": layer.load.std,
                "near_ties": {f"{strip.width:g}": strip.share for strip in layer.near_ties.strips},
                "undecided": {name: one.share for name, one in layer.undecided.items()},
                "certified": None if layer.radius is None else _certified(layer.radius),
            }
            for layer in report.layers
        ]
        known = [layer["certified"] for layer in layers if layer["certified"] is not None]
        described = {
            name: {
                "flips": [layer.flips for layer in one.layers],
                "output": [layer.output.total for layer in one.layers],
            }
            for name, one in report.perturbations.items()
        }
        details = {name: one.details for name, one in report.perturbations.items()}
        return compact(
            {
                **self.about,
                "settings": asdict(report.settings),
                "tokens": report.overall.tokens,
                "overall": report.numbers(),
                "certified": {radius: fmean(each[radius] for each in known) for radius in known[0]} if known else {},
                "layers": layers,
                "perturbations": described,
                "attack": details.get("attack", []),
                "lost": details.get("lost-expert", []),
                "skipped": {name: one.reason for name, one in report.skipped.items()},
            }
        )

    def certified(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the certified predictions of some test examples, and the attacks on their votes."""
        from holdfast.train.certified_predictions import certify_models
        from holdfast.train.prediction_report import NamedModel, PredictionSettings

        settings: PredictionSettings = from_mapping(PredictionSettings, dict(written))
        named = NamedModel(str(self.folder), self.cell.choice.name, self.cell.seed)
        task = self.comparison.task_of_cell(self.cell)
        out = self.folder.parent.parent / "certified" / f"{self.cell.folder}-sigma{settings.sigma:g}"
        report = certify_models([named], settings, out, lambda path: (self.model, task), lambda *told: None)
        rows = [asdict(example) for example in report.models[0].examples]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["attacked"] = [[list(attack.values()) for attack in attacks] for attacks in columns["attacked"]]
        about = {**self.about, "settings": asdict(settings), "unit": report.unit, "data": report.data}
        return compact({**about, "examples": columns})


def _certified(radii: Any) -> dict[str, float]:
    """Return the share of tokens with a larger relative radius than each of some edges."""
    tokens = sum(radii.counts)
    shares = ((edge, sum(radii.counts[place + 1 :]) / tokens) for place, edge in enumerate(radii.edges))
    return {f"{edge:.3g}": share for edge, share in shares if RADII[0] < edge < RADII[1]}


def _silent(done: int, what: str) -> None:
    """Show no progress."""


def _write(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(without_nan(content)) + "\n")
