"""`compare`: train several routers under equal conditions, attack each of them, and write a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import require_extra

if TYPE_CHECKING:
    from holdfast.train import Cell, Comparison, Recipe, RouterChoice
    from holdfast.train.papers import PaperRun
    from holdfast.train.results import Results, Row
    from holdfast.train.sweep import Setting

RECIPE = "tiny"
ROUTERS = "smoe,symphony,similarity,ac,smooth"
PAGE = "report.html"


def compare(
    routers: str | Sequence[str] = ROUTERS,
    *,
    recipe: str = RECIPE,
    paper: str | None = None,
    rehearse: bool = False,
    start: str | os.PathLike[str] | None = None,
    seeds: int | None = None,
    out: str | os.PathLike[str] = "comparison",
    data: str | os.PathLike[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    match_compute: bool = True,
    jobs: int = 1,
    progress: Callable[[Cell, int], None] | None = None,
) -> Results:
    """Train several routers under equal conditions, attack each, write results.json and report.html, return the results.

    routers        names with options in brackets and layers after @, as one string with commas or as a list; the first is
                   the baseline, unless the folder already has one. All of them are built before the first is trained
    recipe         a shipped recipe, or the path of a .yaml file
    paper          the experiment of a paper, "acmoe:table1-switch", which has its own recipe and routers; results and page
                   show its published figures beside ours. `rehearse` runs its routers with a small recipe instead
    start          the folder of a comparison: each router and seed starts from its trained cell of the same router and seed
    seeds          number of times each router is trained, each time with other weights and another order of the data; by
                   default 3, or as in the paper
    out            the folder for all output; an interrupted comparison in it is resumed
    data           the folder to search for named sources, instead of fetching them
    changes        changes of the recipe, {"training.steps": 50}
    sweep          values of keys of the recipe, {"sparse.k": [1, 2, 4]}: every combination is trained with every router and
                   seed, and routers are compared with the baseline of the same setting
    match_compute  if a router uses more experts per token than the baseline, add the baseline with as many experts
    jobs           number of models that are trained at the same time
    progress       called with a cell (a router and a seed) and the number of its finished steps

    Example:
        results = holdfast.compare("smoe,smooth[budget=0.5]", seeds=1, out="runs/smooth", changes={"training.steps": 50})
        print([(row.router, row.clean, row.attacked) for row in results.rows])
    """
    require_extra("holdfast.compare", "accelerate", "jinja2", "plotly", "scipy", "yaml")
    from holdfast.train.recipe import parse_router, parse_routers

    chosen = parse_routers(routers) if isinstance(routers, str) else [parse_router(name) for name in routers]
    wanted = {**(changes or {}), **start_from(start)}
    plan = choose(recipe, chosen, seeds, wanted, paper=paper, rehearse=rehearse)
    return run_comparison(
        plan.recipe,
        plan.routers,
        plan.seeds,
        Path(out),
        settings=sweep_settings(plan.recipe, wanted, sweep or {}),
        paper=plan.paper,
        data=None if data is None else Path(data),
        match_compute=match_compute,
        run=lambda comparison: comparison.run(progress, jobs=jobs),
    )


def start_from(folder: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the change of a recipe that lets each router and seed start from its cell in `folder`; none for None."""
    if folder is None:
        return {}
    if not (Path(folder) / "cells").is_dir():
        raise ValueError(f"{folder} is not the folder of a comparison: it has no cells to start from.")
    return {"model.checkpoint": str(folder)}


class Chosen(NamedTuple):
    """What a comparison trains."""

    recipe: Recipe
    routers: Sequence[RouterChoice]
    seeds: int
    paper: PaperRun | None


def choose(
    recipe: str,
    routers: Sequence[RouterChoice],
    seeds: int | None,
    changes: Mapping[str, Any],
    *,
    paper: str | None,
    rehearse: bool,
) -> Chosen:
    """Return what to train: the experiment of a paper, if one is named, otherwise the recipe and the routers."""
    from holdfast.train import load_recipe
    from holdfast.train.papers import find_preset, resolve

    if paper is None:
        if rehearse:
            raise ValueError("only the experiment of a paper has a rehearsal; name one, or take a small recipe.")
        return Chosen(load_recipe(recipe, changes), routers, 3 if seeds is None else seeds, None)
    if recipe != RECIPE or [choice.name for choice in routers] != ROUTERS.split(","):
        raise ValueError(f"{paper} has its own recipe and routers; name no others, and change its recipe with --set.")
    own, names, record = resolve(paper, changes, rehearse=rehearse, seeds=seeds)
    usual = 1 if rehearse else find_preset(paper).seeds
    return Chosen(own, names, usual if seeds is None else seeds, record)


def sweep_settings(recipe: Recipe, changes: Mapping[str, Any], sweep: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Return the settings of the sweep; none without one. Raise ValueError for a wrong sweep."""
    from holdfast.train.sweep import settings_of

    if both := [key for key in sweep if key in changes]:
        raise ValueError(f"{both[0]} is set and swept; remove one of the two.")
    return settings_of(recipe, sweep) if sweep else []


def run_comparison(
    recipe: Recipe,
    routers: Sequence[RouterChoice],
    seeds: int,
    folder: Path,
    *,
    data: Path | None,
    match_compute: bool,
    settings: Sequence[Setting] = (),
    paper: PaperRun | None = None,
    run: Callable[[Comparison], list[dict[str, Any]]],
) -> Results:
    """Train the cells with `run`, write results and report, and return the results.

    The experiment of a paper gets no baseline with more experts, because it has the paper's rows, and neither does a
    comparison that starts from cells, because there is no cell to start it from.
    """
    from holdfast.report import write_report
    from holdfast.train import Comparison
    from holdfast.train.building import expert_count

    def finish(comparison: Comparison) -> Results:
        return comparison.finish(run(comparison), lambda results: write_report(results, folder / PAGE, force=True))

    comparison = Comparison(recipe, routers, seeds, folder, data=data, settings=settings, paper=paper)
    results = finish(comparison)
    equal_compute: list[Comparison] = []
    matched_too = match_compute and paper is None and not comparison.starts_from_cells
    for setting in comparison.settings if matched_too else []:
        rows = [row for row in results.rows if row.settings == setting.values]
        if not results.is_baseline(rows[0]):  # the baseline of the folder has not been trained in this setting
            continue
        if matched := matched_baseline(rows, routers, expert_count(comparison.task_of(setting))):
            chosen = [setting] if setting.values else []
            how: dict[str, Any] = {"data": data, "settings": chosen, "report_size": False}  # reported above
            equal_compute.append(Comparison(recipe, matched, seeds, folder, **how))
    for matching in equal_compute[:-1]:
        run(matching)
    return finish(equal_compute[-1]) if equal_compute else results


def matched_baseline(rows: Sequence[Row], known: Sequence[RouterChoice], experts: int) -> list[RouterChoice]:
    """Return the baseline with as many experts per token as the largest router, if that uses more than the baseline."""
    from holdfast.train.recipe import parse_router
    from holdfast.train.results import COMPUTE_TOLERANCE, matched_name

    name, usual = rows[0].router, rows[0].experts_per_token
    larger = [math.ceil(row.experts_per_token - COMPUTE_TOLERANCE) for row in rows if row.uses_more_compute]
    k = min(experts, max(larger, default=0))
    matched = matched_name(name, k)
    enough = [row for row in rows if row.is_baseline_with_other_k(name) and row.experts_per_token > k - COMPUTE_TOLERANCE]
    if k <= usual or any(row.router == matched for row in rows) or enough:
        return []
    baseline = next((choice for choice in known if choice.name == name), None) or parse_router(name)
    return [baseline.with_k(k, matched)]
