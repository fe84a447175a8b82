"""The papers' own experiments: for each table, what is trained, the published figures, and what is done differently here.

One YAML file for each paper lies beside this module, with a preset for each table or figure that compares routers:

    recipe, set, routers, seeds    the paper's experiment, as `holdfast compare` takes it; or `command`, for tables of cost;
                                   or neither, if `needs` says why it cannot be run here
    domains                        how many domains its data have, if each is held out in turn
    hours                          GPU hours of all cells, as `benchmarks/paper_hours.py` counts them
    start                          the preset of the same paper whose trained cells each router starts from
    rehearsal                      a small recipe that trains the same routers in minutes
    published                      the figures as printed; a column says which of our numbers belongs to it
    deviations                     one sentence for each thing that a run here does otherwise, or reads into the paper
    needs                          one sentence for each thing that an exact run needs and that is not built here

`holdfast papers` lists and prints them, `holdfast compare --paper NAME` runs one, and docs/papers.md is made from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from holdfast.checked import from_mapping
from holdfast.errors import unknown_name
from holdfast.files import LARGEST, read_json
from holdfast.train.recipe import Recipe, RouterChoice, TrainingPart, from_yaml, load_recipe, parse_router, value_at

ALTERNATIVES = {"training.epochs": "training.steps", "training.steps": "training.epochs"}  # a recipe has one of them
PAPERS = ("symphony", "mutual", "acmoe", "smoothing")
RATE = 8e13  # FLOPs a second: an H200 that trained six models of 32 million parameters on enwik8 at a time had this rate
OF_CELLS: dict[str, Callable[[list[float]], float]] = {"cell": fmean, "lowest": min, "highest": max}
# A number of our results.
OURS = re.compile(r"(100 [-*] )?(parameters|clean|attacked|bits|(shift|attack|cell|lowest|highest):[\w. -]+)")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of published figures."""

    heading: str  # as printed
    # The number of our results that it is: `clean`, `100 - attacked`, `shift:NAME`, or with `cell:` the path of a number in
    # the result.json of each cell, `cell:clean.top5`: its mean over seeds, or with `lowest:` or `highest:` that one of all
    # seeds and settings of a sweep. None: we have none.
    ours: str | None = None

    def __post_init__(self) -> None:
        if self.ours is not None and OURS.fullmatch(self.ours) is None:
            raise ValueError(
                f"ours is {self.ours!r}; write clean, attacked, bits, parameters, shift:NAME, attack:NAME, cell:PATH, "
                "lowest:PATH or highest:PATH."
            )

    @property
    def number(self) -> str:
        """`ours` without its arithmetic; empty if we have none."""
        return (self.ours or "").removeprefix("100 - ").removeprefix("100 * ")


@dataclass(frozen=True, kw_only=True)
class Published:
    """The figures that a paper prints."""

    columns: dict[str, Column] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)  # "name", "router" if it is one of the preset's, and figures

    def __post_init__(self) -> None:
        for row in self.rows:
            if "name" not in row or set(row) - {"name", "router"} - set(self.columns):
                raise ValueError(f"the row {row} has no name, or a figure that belongs to no column.")


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A small experiment with the same routers."""

    recipe: str
    set: dict[str, Any] = field(default_factory=dict)
    routers: list[str] | None = None  # None: those of the preset


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The experiment of a table or figure. `recipe` and `routers`, or `command`, are given if it can be run here."""

    title: str
    covers: list[str]  # the tables and figures whose numbers come from this comparison
    recipe: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    seeds: int = 1
    sweep: dict[str, list[Any]] = field(default_factory=dict)  # of which the paper reports the best for each router
    domains: int = 1  # of which each is held out in turn
    hours: float | None = None  # of a GPU that computes with `RATE`, for all cells
    start: str | None = None
    rehearsal: Rehearsal | None = None
    command: str | None = None
    published: Published = Published()
    deviations: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    @property
    def cells(self) -> int:
        """How many models are trained."""
        return len(self.routers) * self.seeds * self.domains * math.prod(map(len, self.sweep.values()))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper and its experiments."""

    paper: str
    title: str
    authors: str
    reading: list[str] = field(default_factory=list)  # what holds for many presets
    sentences: dict[str, str] = field(default_factory=dict)  # that several presets have among their deviations or needs
    presets: dict[str, Preset]
    left_out: list[str] = field(default_factory=list)  # tables and figures without a preset, and why


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A preset as it was run: stored with the results of a comparison."""

    name: str
    title: str
    covers: list[str]
    published: Published
    deviations: list[str]
    needs: list[str]
    sweep: list[str] = field(default_factory=list)  # keys: of these, the table has the best setting of each router
    of_cells: dict[str, dict[str, float | None]] = field(default_factory=dict)  # by router and `Column.number`

    def with_cells(self, results: Sequence[Mapping[str, Any]]) -> PaperRun:
        """Return the record with the numbers that columns read from the `results` of cells."""
        found: dict[str, dict[str, float | None]] = {}
        by_router: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            by_router.setdefault(result["router"], []).append(result)
        for column in self.published.columns.values():
            kind, _, path = column.number.partition(":")
            if kind in OF_CELLS:
                for router, own in by_router.items():
                    values = [value_at(result, path) for result in own]
                    found.setdefault(router, {})[column.number] = None if None in values else OF_CELLS[kind](values)
        return replace(self, of_cells=found)


@cache
def load_papers() -> dict[str, Paper]:
    """Return the papers by name."""
    return {name: _load(name) for name in PAPERS}


def _load(name: str) -> Paper:
    text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
    paper: Paper = from_mapping(Paper, from_yaml(text, name))
    presets = {}
    for key, preset in paper.presets.items():  # with sentences in the place of their names
        named = (preset.deviations, preset.needs)
        deviations, needs = ([paper.sentences.get(one, one) for one in sentences] for sentences in named)
        presets[key] = replace(preset, deviations=deviations, needs=needs)
    return replace(paper, presets=presets)


def find_presets(name: str) -> dict[str, Preset]:
    """Return the presets that `acmoe`, `acmoe:table1` or `acmoe:table1-switch` names, by their full names."""
    paper, _, table = name.partition(":")
    papers = load_papers()
    if paper not in papers:
        raise ValueError(unknown_name("paper", paper, papers))
    presets = papers[paper].presets
    if table in presets:
        return {name: presets[table]}
    covers = {key: [name.lower().replace(" ", "") for name in one.covers] for key, one in presets.items()}
    chosen = {key: one for key, one in presets.items() if not table or key.startswith(f"{table}-") or table in covers[key]}
    if not chosen:
        raise ValueError(unknown_name(f"table of {paper}", table, sorted({*presets, *chain(*covers.values())})))
    return {f"{paper}:{key}": one for key, one in chosen.items()}


def find_preset(name: str) -> Preset:
    """Return the one preset of this name that can be trained; raise ValueError if there are several or none."""
    found = find_presets(name)
    if len(found) > 1:
        raise ValueError(f"{name} has {len(found)} comparisons; choose one: {', '.join(found)}.")
    (preset,) = found.values()
    if preset.command is not None:
        raise ValueError(f"{name} has a command of its own; run: {preset.command}")
    if preset.recipe is None:
        raise ValueError(f"{name} cannot be run here, it has only the published figures. Missing: {' '.join(preset.needs)}")
    return preset


def resolve(
    name: str, changes: Mapping[str, Any], *, rehearse: bool = False, seeds: int | None = None
) -> tuple[Recipe, list[RouterChoice], PaperRun]:
    """Return the recipe and the routers of a preset, and its record with what this run does otherwise.

    changes     changes of its recipe, {"training.steps": 3000}
    rehearse    take the small recipe of its rehearsal
    seeds       how many seeds are trained, if not as many as in the paper
    """
    preset = find_preset(name)
    if preset.start is not None and "model.checkpoint" not in changes:
        first = f"{name.partition(':')[0]}:{preset.start}"
        raise ValueError(f"{name} starts from the cells of {first}: run that first, and give its folder with --from.")
    assert preset.recipe is not None and preset.rehearsal is not None
    exact, small, changes = load_recipe(preset.recipe, preset.set), preset.rehearsal, dict(changes)
    others = {key: value for key, value in changes.items() if key != "training.steps"}
    usual = (load_recipe(small.recipe, {**small.set, **others}) if rehearse else exact).training
    if (steps := changes.get("training.steps")) is not None:
        for key, value in shortened(usual, steps).items():
            changes.setdefault(key, value)
    if rehearse:
        recipe = load_recipe(small.recipe, {**small.set, **changes})
        routers = preset.routers if small.routers is None else small.routers
        own = [f"This is a rehearsal with the recipe {small.recipe}: its figures are not the paper's."]
    else:
        kept = {key: value for key, value in preset.set.items() if ALTERNATIVES.get(key) not in changes}
        recipe, routers = load_recipe(preset.recipe, {**kept, **changes}), preset.routers
        own = [
            f"{key} is {value} instead of {_value(exact, key)}."
            for key, value in changes.items()
            if not (key == "model.checkpoint" and preset.start) and not str(_value(exact, key)).endswith("/")
        ]
    if not rehearse and seeds is not None and seeds != preset.seeds:
        own.append(f"{seeds} seed{'s were' if seeds > 1 else ' was'} trained instead of {preset.seeds}.")
    if preset.start is not None:
        own += _of_start(str(changes["model.checkpoint"]), f"{name.partition(':')[0]}:{preset.start}")
    described = PaperRun(
        name=name,
        title=preset.title,
        covers=preset.covers,
        published=preset.published,
        deviations=[*own, *preset.deviations],
        needs=preset.needs,
        sweep=list(preset.sweep),
    )
    return recipe, [parse_router(router) for router in routers], described


def _of_start(folder: str, expected: str) -> list[str]:
    """Return what the cells in a folder do otherwise than those of the preset `expected`, which an exact run starts from."""
    try:  # not with `Results`, which contain a `PaperRun`
        record = from_mapping(PaperRun, read_json(Path(folder) / "results.json", limit=LARGEST)["paper"])
    except (OSError, ValueError, KeyError, TypeError):  # it has no results yet, or they are of no paper
        return [f"The cells that it starts from are not known to be those of {expected}."]
    other = f"The cells that it starts from are those of {record.name}, not of {expected}."
    paper, _, table = record.name.partition(":")
    papers = load_papers()
    presets = papers[paper].presets if paper in papers else {}
    usual = presets[table].deviations if table in presets else []
    own = [] if record.name == expected else [other]
    return own + [f"In the run that it starts from: {one}" for one in record.deviations if one not in usual]


def shortened(training: TrainingPart, steps: int) -> dict[str, Any]:
    """Return what else a run of fewer steps changes: its warm-up is shorter, validation and snapshots come earlier."""
    planned, found = training.steps, dict[str, Any]()
    if planned is not None and steps >= planned:
        return found
    if training.warmup > steps // 10:
        found["training.warmup"] = steps // 10 if planned is None else training.warmup * steps // planned
    share = 1.0 if planned is None else steps / planned
    if training.validate_every is not None:
        found["training.validate_every"] = max(1, min(round(training.validate_every * share), steps // 10))
    if isinstance(training.snapshots, list):
        found["training.snapshots"] = [round(step * share) for step in training.snapshots]
    return found


def _value(recipe: Recipe, key: str) -> Any:
    """Return the value of a key of a recipe; if it counts epochs, these are its steps."""
    if key == "training.steps" and recipe.training.steps is None:
        return f"{recipe.training.epochs:g} epochs"
    return value_at(recipe.describe(), key)
