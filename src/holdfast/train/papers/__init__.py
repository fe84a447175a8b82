"""The papers' own experiments: for each table, what is trained, the published figures, and what is done differently here.

One YAML file for each paper lies beside this module, with a preset for each table or figure that compares routers:

    recipe, set, routers, seeds    the paper's experiment, as `holdfast compare` takes it; or `command`, for tables of cost
    start                          the preset of the same paper whose trained cells each router starts from
    rehearsal                      a small recipe that trains the same routers in minutes
    published                      the figures as printed; a column says which of our numbers belongs to it
    deviations                     one sentence for each thing that a run here does otherwise, or reads into the paper
    needs                          one sentence for each thing that an exact run needs and that is not built here

`holdfast papers` lists and prints them, `holdfast compare --paper NAME` runs one, and docs/papers.md is made from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from holdfast.checked import from_mapping
from holdfast.errors import unknown_name
from holdfast.train.recipe import Recipe, RouterChoice, from_yaml, load_recipe, parse_router

ALTERNATIVES = {"training.epochs": "training.steps", "training.steps": "training.epochs"}  # a recipe has one of them
PAPERS = ("symphony", "mutual", "acmoe", "smoothing")
OURS = re.compile(r"(100 [-*] )?(parameters|clean|attacked|bits|(shift|attack):[\w.-]+)")  # a number of our results


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of published figures."""

    heading: str  # as printed
    ours: str | None = None  # the number of our results that it is: `clean`, `100 - attacked`, `shift:NAME`; None: none

    def __post_init__(self) -> None:
        if self.ours is not None and OURS.fullmatch(self.ours) is None:
            raise ValueError(f"ours is {self.ours!r}; write clean, attacked, bits, parameters, shift:NAME or attack:NAME.")


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
    """The experiment of a table or figure. Either `recipe` and `routers`, or `command`, is given."""

    title: str
    covers: list[str]  # the tables and figures whose numbers come from this comparison
    recipe: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    seeds: int = 1
    start: str | None = None
    rehearsal: Rehearsal | None = None
    command: str | None = None
    published: Published = Published()
    deviations: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.recipe is None) == (self.command is None):
            raise ValueError("give one of recipe and command.")
        if self.recipe is not None and not (self.routers and self.rehearsal):
            raise ValueError("a comparison needs routers and a rehearsal.")
        for row in self.published.rows:
            if self.recipe is not None and row.get("router", self.routers[0]) not in self.routers:
                raise ValueError(f"the published row {row['name']} is of {row['router']}, which is not one of its routers.")


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


@cache
def load_papers() -> dict[str, Paper]:
    """Return the papers by name."""
    return {name: _load(name) for name in PAPERS}


def _load(name: str) -> Paper:
    text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
    paper: Paper = from_mapping(Paper, from_yaml(text, name))
    for key, preset in paper.presets.items():
        if preset.start is not None and preset.start not in paper.presets:
            raise ValueError(f"{name}:{key} starts from {preset.start}, which is no preset of this paper.")
        for sentence in (*preset.deviations, *preset.needs):
            if " " not in sentence and sentence not in paper.sentences:
                raise ValueError(f"{name}:{key} names the sentence {sentence!r}, which is not among the paper's sentences.")
    spelled = {key: _spelled_out(preset, paper.sentences) for key, preset in paper.presets.items()}
    return replace(paper, presets=spelled)


def _spelled_out(preset: Preset, sentences: Mapping[str, str]) -> Preset:
    """Return a preset with sentences in the place of their names."""
    deviations, needs = ([sentences.get(one, one) for one in names] for names in (preset.deviations, preset.needs))
    return replace(preset, deviations=deviations, needs=needs)


def find_presets(name: str) -> dict[str, Preset]:
    """Return the presets that `acmoe`, `acmoe:table1` or `acmoe:table1-switch` names, by their full names."""
    paper, _, table = name.partition(":")
    papers = load_papers()
    if paper not in papers:
        raise ValueError(unknown_name("paper", paper, papers))
    presets = papers[paper].presets
    if table in presets:
        return {name: presets[table]}
    chosen = {
        key: one
        for key, one in presets.items()
        if not table or key.startswith(f"{table}-") or table in (name.lower().replace(" ", "") for name in one.covers)
    }
    if not chosen:
        raise ValueError(unknown_name(f"table of {paper}", table, presets))
    return {f"{paper}:{key}": one for key, one in chosen.items()}


def find_preset(name: str) -> Preset:
    """Return the one preset of this name that can be trained; raise ValueError if there are several or none."""
    found = find_presets(name)
    if len(found) > 1:
        raise ValueError(f"{name} has {len(found)} comparisons; choose one: {', '.join(found)}.")
    (preset,) = found.values()
    if preset.command is not None:
        raise ValueError(f"{name} has a command of its own; run: {preset.command}")
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
    steps, planned, warmup = changes.get("training.steps"), exact.training.steps, exact.training.warmup
    if steps is not None and not rehearse and warmup > steps // 10 and (planned is None or steps < planned):
        shorter = steps // 10 if planned is None else warmup * steps // planned
        changes.setdefault("training.warmup", shorter)  # a shorter run needs a shorter warm-up
    own_set = {
        key: value for key, value in preset.set.items() if key not in ALTERNATIVES or ALTERNATIVES[key] not in changes
    }
    if rehearse:
        recipe = load_recipe(small.recipe, {**small.set, **changes})
        routers = preset.routers if small.routers is None else small.routers
        own = [f"This is a rehearsal with the recipe {small.recipe}: its figures are not the paper's."]
    else:
        recipe, routers = load_recipe(preset.recipe, {**own_set, **changes}), preset.routers
        own = [
            f"{key} is {value} instead of {_value(exact, key)}."
            for key, value in changes.items()
            if not (key == "model.checkpoint" and preset.start) and not str(_value(exact, key)).endswith("/")
        ]
    if not rehearse and seeds is not None and seeds != preset.seeds:
        own.append(f"{seeds} seed{'s were' if seeds > 1 else ' was'} trained instead of {preset.seeds}.")
    described = PaperRun(
        name=name,
        title=preset.title,
        covers=preset.covers,
        published=preset.published,
        deviations=[*own, *preset.deviations],
        needs=preset.needs,
    )
    return recipe, [parse_router(router) for router in routers], described


def _value(recipe: Recipe, key: str) -> Any:
    """Return the value of a key of a recipe; if it counts epochs, these are its steps."""
    if key == "training.steps" and recipe.training.steps is None:
        return f"{recipe.training.epochs:g} epochs"
    value: Any = recipe.describe()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
