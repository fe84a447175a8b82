"""`compare`: train several routers under equal conditions, attack each of them, and write a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import require_extra

if TYPE_CHECKING:
    from holdfast.train import Cell, Comparison, Recipe, RouterChoice
    from holdfast.train.results import Results, Row
    from holdfast.train.sweep import Setting

ROUTERS = "smoe,symphony,similarity,ac,smooth"
PAGE = "report.html"


def compare(
    routers: str | Sequence[str] = ROUTERS,
    *,
    recipe: str = "tiny",
    seeds: int = 3,
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
    seeds          number of times each router is trained, each time with other weights and another order of the data
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
    base, settings = load_with_sweep(recipe, changes or {}, sweep or {})
    return run_comparison(
        base,
        chosen,
        seeds,
        Path(out),
        settings=settings,
        data=None if data is None else Path(data),
        match_compute=match_compute,
        run=lambda comparison: comparison.run(progress, jobs=jobs),
    )


def load_with_sweep(
    recipe: str, changes: Mapping[str, Any], sweep: Mapping[str, Sequence[Any]]
) -> tuple[Recipe, list[Setting]]:
    """Return the recipe, and the settings of the sweep; no settings without one. Raise ValueError for a wrong sweep."""
    from holdfast.train import load_recipe
    from holdfast.train.sweep import settings_of

    if both := [key for key in sweep if key in changes]:
        raise ValueError(f"{both[0]} is set and swept; remove one of the two.")
    base = load_recipe(recipe, changes)
    return base, settings_of(base, sweep) if sweep else []


def run_comparison(
    recipe: Recipe,
    routers: Sequence[RouterChoice],
    seeds: int,
    folder: Path,
    *,
    data: Path | None,
    match_compute: bool,
    settings: Sequence[Setting] = (),
    run: Callable[[Comparison], list[dict[str, Any]]],
) -> Results:
    """Train the cells with `run`, write results and report, and return the results."""
    from holdfast.report import write_report
    from holdfast.train import Comparison
    from holdfast.train.building import expert_count

    def finish(comparison: Comparison) -> Results:
        return comparison.finish(run(comparison), lambda results: write_report(results, folder / PAGE, force=True))

    comparison = Comparison(recipe, routers, seeds, folder, data=data, settings=settings)
    results = finish(comparison)
    equal_compute: list[Comparison] = []
    for setting in comparison.settings if match_compute else []:
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
