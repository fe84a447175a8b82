"""`compare`: train several routers under equal conditions, attack each of them, and write a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import require_extra
from holdfast.progress import bar

if TYPE_CHECKING:
    from holdfast.train import Cell, Comparison, Recipe, RouterChoice
    from holdfast.train.cells import Setting
    from holdfast.train.papers import PaperRun
    from holdfast.train.results import Results, Row

RECIPE = "tiny"
ROUTERS = "smoe,symphony,similarity,ac,smooth"
PAGE = "report.html"
EVALUATION = 0.1  # work of evaluating and attacking a trained model, as a share of its training, for the time that is left


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
    ledger: str | os.PathLike[str] | None = None,
    progress: Callable[[Cell, int], None] | None = None,
) -> Results:
    """Train several routers under equal conditions, attack each, write results.json and report.html, return the results.

    routers        names with options in brackets, layers after @ and training settings in braces, as one string with commas
                   or as a list; the first is the baseline, unless the folder already has one. All of them are built before
                   the first is trained
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
    ledger         a folder that gets a small file with the result of each cell, to be kept and merged with others
    progress       called with a cell (a router and a seed) and the number of its finished steps; by default a bar shows
                   them, or lines on stderr where there is no terminal

    Example:
        results = holdfast.compare("smoe,smooth[budget=0.5]", seeds=1, out="runs/smooth", changes={"training.steps": 50})
        print([(row.router, row.clean, row.attacked) for row in results.rows])
    """
    require_extra("holdfast.compare", "accelerate", "jinja2", "plotly", "scipy", "yaml")
    from holdfast.train.recipe import parse_router, parse_routers

    named = parse_routers(routers) if isinstance(routers, str) else [parse_router(name) for name in routers]
    how: dict[str, Any] = {"paper": paper, "rehearse": rehearse, "start": start, "sweep": sweep}
    chosen = choose(recipe, named, seeds, changes or {}, **how)
    sources, entries = (None if folder is None else Path(folder) for folder in (data, ledger))
    how = {"match_compute": match_compute, "jobs": jobs, "progress": progress}
    return run_comparison(chosen, Path(out), data=sources, ledger=entries, **how)


def with_progress(comparison: Comparison, jobs: int) -> list[dict[str, Any]]:
    """Train the cells of a comparison, show the progress, and return their results."""
    steps = {cell.name: comparison.steps_of(cell) for cell in comparison.cells}
    done = dict.fromkeys(steps, 0)
    trained: set[str] = set()  # cells that this process trains
    work = (1 + EVALUATION) * sum(steps.values())
    with bar(work) as tell:

        def note(cell: Cell, finished: int) -> None:
            done[cell.name], total = finished, steps[cell.name]
            if finished < total:
                trained.add(cell.name)
            phase = "train" if finished < total else "evaluate and attack" if cell.name in trained else "finished before"
            evaluated = sum(steps[name] for name in steps if name != cell.name and done[name] == steps[name])
            amount = sum(done.values()) + EVALUATION * evaluated
            tell(amount, f"{cell.label}, seed {cell.seed}: {phase}", f"step {finished} of {total}")

        results = comparison.run(note, jobs=jobs)
        tell(work, f"{comparison.folder}: write results and report")
        return results


class Chosen(NamedTuple):
    """What a comparison trains."""

    recipe: Recipe
    routers: Sequence[RouterChoice]
    seeds: int
    paper: PaperRun | None = None
    settings: Sequence[Setting] = ()  # of a sweep


def choose(
    recipe: str,
    routers: Sequence[RouterChoice],
    seeds: int | None,
    changes: Mapping[str, Any],
    *,
    paper: str | None,
    rehearse: bool,
    start: str | os.PathLike[str] | None,
    sweep: Mapping[str, Sequence[Any]] | None,
) -> Chosen:
    """Return what to train: the experiment of a paper, if one is named, otherwise the recipe and the routers.

    The arguments are those of `compare`.
    """
    from holdfast.train import load_recipe
    from holdfast.train.cells import settings_of
    from holdfast.train.papers import find_preset, resolve

    if start is not None:
        if not (Path(start) / "cells").is_dir():
            raise ValueError(f"{start} is not the folder of a comparison: it has no cells to start from.")
        changes = {**changes, "model.checkpoint": str(start)}
    if both := [key for key in sweep or () if key in changes]:
        raise ValueError(f"{both[0]} is set and swept; remove one of the two.")
    record: PaperRun | None = None
    if paper is not None:
        if recipe != RECIPE or [choice.name for choice in routers] != ROUTERS.split(","):
            raise ValueError(f"{paper} has its own recipe and routers; name no others, and change its recipe with --set.")
        loaded, routers, record = resolve(paper, changes, rehearse=rehearse, seeds=seeds)
        preset = find_preset(paper)
        usual = 1 if rehearse else preset.seeds
        if not sweep and not rehearse:
            sweep = {key: values for key, values in preset.sweep.items() if key not in changes}
    elif rehearse:
        raise ValueError("only the experiment of a paper has a rehearsal; name one, or take a small recipe.")
    else:
        loaded, usual = load_recipe(recipe, changes), 3
    return Chosen(loaded, routers, usual if seeds is None else seeds, record, settings_of(loaded, sweep) if sweep else ())


def run_comparison(
    chosen: Chosen,
    folder: Path,
    *,
    data: Path | None,
    match_compute: bool,
    ledger: Path | None = None,
    command: str | None = None,
    jobs: int = 1,
    progress: Callable[[Cell, int], None] | None = None,
) -> Results:
    """Train the cells, write results, report and the ledger's files, and return the results.

    The experiment of a paper gets no baseline with more experts, because it has the paper's rows, and neither does a
    comparison that starts from cells, because there is no cell to start it from.
    """
    from holdfast.report import write_report
    from holdfast.train import Comparison
    from holdfast.train.building import expert_count
    from holdfast.train.ledger import enter_cells

    if ledger is not None and ledger.exists() and not ledger.is_dir():
        raise ValueError(f"the ledger {ledger} is not a folder.")

    def finish(comparison: Comparison) -> Results:
        cells = with_progress(comparison, jobs) if progress is None else comparison.run(progress, jobs=jobs)
        finished = comparison.finish(cells, partial(write_report, path=folder / PAGE, force=True), command=command)
        if ledger is not None:
            enter_cells(ledger, comparison, cells)
        return finished

    recipe, routers, seeds, paper, settings = chosen
    comparison = Comparison(recipe, routers, seeds, folder, data=data, settings=settings, paper=paper)
    results = finish(comparison)
    matched_too = match_compute and paper is None and not comparison.starts_from_cells
    for setting in comparison.settings if matched_too else []:
        rows = [row for row in results.rows if row.settings == setting.values]
        if not results.is_baseline(rows[0]):  # the baseline of the folder has not been trained in this setting
            continue
        if matched := matched_baseline(rows, routers, expert_count(comparison.task_of(setting))):
            how: dict[str, Any] = {"settings": [setting] if setting.values else [], "report_size": False}  # reported above
            results = finish(Comparison(recipe, matched, seeds, folder, data=data, **how))
    return results


def matched_baseline(rows: Sequence[Row], known: Sequence[RouterChoice], experts: int) -> list[RouterChoice]:
    """Return the baseline with as many experts per token as the largest router, if that uses more than the baseline.

    Routers with a training of their own do not count: the baseline would be trained plainly.
    """
    from holdfast.train.recipe import parse_router
    from holdfast.train.results import COMPUTE_TOLERANCE, matched_name

    name, usual = rows[0].router, rows[0].experts_per_token
    plain = [row for row in rows if row.uses_more_compute and not row.training]
    larger = [math.ceil(row.experts_per_token - COMPUTE_TOLERANCE) for row in plain]
    k = min(experts, max(larger, default=0))
    matched = matched_name(name, k)
    enough = [row for row in rows if row.is_baseline_with_other_k(name) and row.experts_per_token > k - COMPUTE_TOLERANCE]
    if k <= usual or any(row.router == matched for row in rows) or enough:
        return []
    baseline = next((choice for choice in known if choice.name == name), None) or parse_router(name)
    return [baseline.with_k(k, matched)]
