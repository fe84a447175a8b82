"""`compare`: routers trained side by side, attacked, measured, and a report of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import require_extra

if TYPE_CHECKING:
    from holdfast.report.stored_comparison import Results
    from holdfast.train import Cell, Comparison, Contender, Recipe

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
    match_compute: bool = True,
    jobs: int = 1,
    progress: Callable[[Cell, int], None] | None = None,
) -> Results:
    """Train several routers under equal conditions, attack each, write results.json and report.html, return the results.

    routers        names with options in brackets, in one string joined by commas or one by one; the first is the baseline,
                   unless the folder has one already
    recipe         a shipped recipe, or the path of a .yaml file
    seeds          how many times each router is trained, each time with other weights and another order of the data
    out            the folder for everything that is written; a comparison in it that was interrupted continues
    data           where named sources are looked for, if they are not to be fetched
    changes        to the recipe, {"training.steps": 50}
    match_compute  where a router uses more experts a token than the baseline, add the baseline with as many experts
    jobs           how many models are trained at a time
    progress       called with a cell (a router and a seed) and how many of its steps are done

    Example:
        results = holdfast.compare("smoe,smooth[budget=0.5]", seeds=1, out="runs/smooth", changes={"training.steps": 50})
        print([(row.router, row.clean, row.attacked) for row in results.rows])
    """
    require_extra("holdfast.compare", "accelerate", "jinja2", "plotly", "pydantic", "yaml")
    from holdfast.report import read_results
    from holdfast.train import load_recipe
    from holdfast.train.recipe import contender, contenders

    chosen = contenders(routers) if isinstance(routers, str) else [contender(name) for name in routers]
    run_comparison(
        load_recipe(recipe, changes),
        chosen,
        seeds,
        Path(out),
        data=None if data is None else Path(data),
        match_compute=match_compute,
        run=lambda comparison: comparison.run(progress, jobs=jobs),
    )
    return read_results(Path(out))


def run_comparison(
    recipe: Recipe,
    routers: Sequence[Contender],
    seeds: int,
    folder: Path,
    *,
    data: Path | None,
    match_compute: bool,
    run: Callable[[Comparison], list[dict[str, Any]]],
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Let `run` train the cells, publish results and report; return the last comparison and the rows of its table."""
    from holdfast.report import read_results, write_report
    from holdfast.train import Comparison

    def finished(comparison: Comparison) -> list[dict[str, Any]]:
        results = run(comparison)
        return comparison.publish(results, lambda: write_report(read_results(folder), folder / PAGE, force=True))

    comparison = Comparison(recipe, routers, seeds, folder, data=data)
    rows = finished(comparison)
    if match_compute and (matched := equal_compute(rows, routers, recipe.sparse.experts)):
        comparison = Comparison(recipe, matched, seeds, folder, data=data)
        rows = finished(comparison)
    return comparison, rows


def equal_compute(rows: Sequence[dict[str, Any]], known: Sequence[Contender], experts: int) -> list[Contender]:
    """Return the baseline with as many experts a token as the router that uses most, if one uses more than the baseline."""
    from holdfast.train.recipe import contender
    from holdfast.train.summary import MORE, matched_name, uses_more

    name = rows[0]["router"]
    k = min(experts, max((math.ceil(row["experts_per_token"] - MORE) for row in rows if uses_more(row)), default=0))
    matched = matched_name(name, k)
    if k <= rows[0]["experts_per_token"] or any(row["router"] == matched for row in rows):
        return []
    baseline = next((one for one in known if one.name == name), None) or contender(name)
    return [replace(baseline, name=matched, k=k)]
