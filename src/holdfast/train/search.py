"""`search`: routers, numbers of experts and other settings that are best for their FLOPs, by successive halving.

Candidates are all routers in all settings of a sweep. They are trained in rungs: the first trains all of them for a few
steps, each further one the best of the rung before for `keep` times as many, the last for all steps of the recipe. Every
rung trains from the start, because a schedule of the learning rate belongs to a number of steps. A rung is a comparison in a
folder of its own, rung-1, rung-2, ..., and is resumed like one.

A candidate has two numbers: its loss on validation data, the mean over seeds, and the FLOPs of a forward, counted. One
*dominates* another if neither number is higher and one is lower; those that none dominates are the *front*. A rung hands on
its front, then the front of the others, and so on, each by ascending loss. Test data select nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, final

from holdfast.locking import locked
from holdfast.progress import bar
from holdfast.routing.grammar import written_pairs
from holdfast.stored import StoredRecord
from holdfast.train.building import build_model, preflight
from holdfast.train.cells import Cell, Result, Setting, require_few_cells, settings_of, with_choices
from holdfast.train.comparison import Comparison, Progress
from holdfast.train.papers import shortened
from holdfast.train.recipe import Recipe, RouterChoice, change_recipe, load_recipe, parse_router, parse_routers
from holdfast.train.results import ValidationCurve
from holdfast.train.run_folder import claim, require_own
from holdfast.train.saved_model import make_task
from holdfast.train.task import Measure, Task
from holdfast.train.training import flops_of_forward
from holdfast.version import versions

RECIPE = "tiny"
RUNGS = KEEP = 3
FEWEST = 10  # FLOPs of a forward; a smaller limit is a multiple without its x
ROUNDING = 1e-6  # of a limit, which a user writes with a few digits


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A router in a setting, and what the search found."""

    router: str
    settings: dict[str, Any]
    flops: float  # of a forward, per token of a text or per image; once it is trained, those of the trained model
    rung: int = 0  # the last one that trained it, from 1; 0: it was over the limit before
    loss: float | None = None  # on the validation data, after that rung; None: not trained, or not finite
    figure: float | None = None  # the measure on the test data, after the last rung
    on_front: bool = False

    @property
    def label(self) -> str:
        return self.router if not self.settings else f"{self.router}, {written_pairs(self.settings)}"

    @property
    def numbers(self) -> tuple[float, float]:
        return self.flops, math.inf if self.loss is None else self.loss

    def dominates(self, other: Candidate) -> bool:
        return self.numbers != other.numbers and all(a <= b for a, b in zip(self.numbers, other.numbers, strict=True))


@dataclass(frozen=True, kw_only=True)
class Search(StoredRecord):
    """A finished search. Candidates are sorted: the front by FLOPs, then the others by rung, the last one first."""

    file_name = "search.json"
    kind = "a search"
    remedy = "run the same `holdfast search` again"

    recipe: dict[str, Any]
    seeds: int
    steps: list[int]  # of each rung
    baseline: str  # the router that the limit refers to, in the recipe as it is
    baseline_flops: float
    limit: float | None  # FLOPs; None: there is none
    measure: Measure
    candidates: list[Candidate] = field(default_factory=list)
    versions: dict[str, str]
    command: str | None = None

    @property
    def front(self) -> list[Candidate]:
        return [one for one in self.candidates if one.on_front]

    def is_over(self, candidate: Candidate) -> bool:
        """Return whether a candidate needs more FLOPs than the limit."""
        return not _within([candidate], self.limit)


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other dominates, by ascending loss."""
    free = [one for one in candidates if not any(other.dominates(one) for other in candidates)]
    return sorted(free, key=lambda one: one.numbers[::-1])


def best(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return this many candidates: the front, then the front of the others, and so on."""
    chosen: list[Candidate] = []
    rest = list(candidates)
    while len(chosen) < count and rest:
        chosen += front(rest)
        rest = [one for one in rest if one not in chosen]
    return chosen[:count]


def read_limit(written: str | float | None, baseline: float) -> float | None:
    """Return FLOPs: "1.1x" is 1.1 times those of the baseline."""
    if written is None:
        return None
    text = str(written).strip()
    try:
        number = float(text.removesuffix("x"))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"flops is {written!r}; write 1.1x for 1.1 times those of the baseline, or a number of FLOPs.")
    if number < FEWEST and not text.endswith("x"):
        raise ValueError(f"flops is {text}, fewer than any model needs; write {text}x for a multiple of the baseline's.")
    return number * baseline if text.endswith("x") else number


def search(
    routers: str | Sequence[str],
    *,
    recipe: str = RECIPE,
    flops: str | float | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    rungs: int = RUNGS,
    keep: int = KEEP,
    seeds: int = 1,
    out: str | os.PathLike[str] = "search",
    data: str | os.PathLike[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    jobs: int = 1,
    command: str | None = None,
) -> Search:
    """Search the routers and settings with the lowest loss for their FLOPs, write search.json and return it.

    routers   names with options, as for `compare`; the FLOPs of the first, in the recipe as it is, are the baseline
    flops     the most FLOPs of a forward: "1.1x" for 1.1 times the baseline's, or a number, per token or per image
    sweep     values of keys of the recipe, {"sparse.k": [1, 2], "sparse.experts": [8, 16]}
    rungs     number of rungs
    keep      with 3, one in three candidates goes on to the next rung, and is trained for three times as many steps
    seeds     number of times each candidate is trained in each rung

    The other arguments are those of `compare`; an interrupted search in the folder `out` is resumed.
    """
    named = parse_routers(routers) if isinstance(routers, str) else [parse_router(name) for name in routers]
    if rungs < 1 or keep < 2:
        raise ValueError(f"rungs is {rungs} and keep is {keep}; give at least 1 rung, and keep one in 2 or more.")
    if timed := [key for key in sweep or () if key in ("training.steps", "training.epochs")]:
        raise ValueError(f"{timed[0]} cannot be swept: the rungs of a search set it; sweep other keys.")
    read_limit(flops, 1.0)  # raises before anything is read
    folder, place = Path(out), None if data is None else Path(data)
    loaded = load_recipe(recipe, changes or {})
    settings = settings_of(loaded, sweep) if sweep else [Setting(loaded)]
    require_few_cells(len(settings), len(named), seeds)
    task = make_task(loaded, place)
    steps = [task.steps // keep ** (rungs - 1 - number) for number in range(rungs)]
    if steps[0] < 1:
        raise ValueError(f"{task.steps} steps are too few for {rungs} rungs; give more steps or fewer rungs.")

    def comparison(rung: int, group: Sequence[Setting], choices: Sequence[RouterChoice]) -> Comparison:
        changed = _of_rung(loaded, task.steps, steps[rung - 1])
        of_group = [Setting(change_recipe(changed, one.values), one.values) for one in group]
        how: dict[str, Any] = {"data": place, "settings": of_group, "report_size": False}
        return Comparison(changed, choices, seeds, folder / f"rung-{rung}", **how)

    first = comparison(1, settings, named)
    # Routers, seeds and the limit may change: what was trained before stays right. The steps of the rungs may not.
    identity = {**first.identity(), "recipe": loaded.describe(), "command": "search", "rungs": steps}
    require_own(folder, identity)
    baseline = _flops(task.with_recipe(with_choices([Setting(loaded)], task.open_choices())[0].recipe), named[0])
    limit = read_limit(flops, baseline)
    found = {one.label: one for one in _counted(first, settings)}
    alive = _within(found.values(), limit)
    if not alive:
        least = min(found.values(), key=lambda one: one.flops)
        raise ValueError(
            f"no candidate needs so few FLOPs: the cheapest, {least.label}, has {least.flops / baseline:.3g} times those of "
            f"{named[0].name}."
        )
    with locked(folder, wait=True):
        claim(folder, identity)  # not earlier: a wrong search must not create a folder
    with _progress(steps, seeds, len(alive), keep) as note:
        for rung, count in enumerate(steps, start=1):
            trained: list[Candidate] = []
            for group, choices in _groups(alive, settings, named):
                results = comparison(rung, group, choices).run(note(rung, count), jobs=jobs)
                pairs = [(setting, choice) for setting in group for choice in choices]
                trained += [_measured(*pair, results, rung, is_last=rung == rungs) for pair in pairs]
            found |= {one.label: one for one in trained}
            fitting = _within(trained, limit)
            alive = best(fitting, math.ceil(len(fitting) / keep)) if rung < rungs else fitting
            if not alive:
                raise ValueError(f"no candidate is left after rung {rung}: once trained, all need more FLOPs than {flops}.")
    finalists = {one.label for one in front(alive)}
    candidates = [replace(one, on_front=one.label in finalists) for one in found.values()]
    finished = Search(
        recipe=loaded.describe(),
        seeds=seeds,
        steps=steps,
        baseline=named[0].name,
        baseline_flops=baseline,
        limit=limit,
        measure=task.measure,
        candidates=sorted(candidates, key=lambda one: (not one.on_front, -one.rung, one.flops)),
        versions=versions(),
        command=command,
    ).as_stored()
    finished.save(folder / Search.file_name)
    return finished


def _within(candidates: Iterable[Candidate], limit: float | None) -> list[Candidate]:
    return [one for one in candidates if limit is None or one.flops <= limit * (1 + ROUNDING)]


def _flops(task: Task, choice: RouterChoice) -> float:
    """Return the FLOPs of the untrained model. A router that comes to use more experts in training is counted again."""
    model = build_model(task, choice.router, choice.options, seed=0, k=choice.k)
    found = flops_of_forward(model, task.probe())
    if found is None:
        raise ValueError(f"the FLOPs of {choice.name} cannot be counted, so it cannot be part of a search.")
    return found


def _counted(comparison: Comparison, settings: Sequence[Setting]) -> Iterator[Candidate]:
    """Yield every router in every setting, with the FLOPs of the untrained model."""
    for setting in settings:
        # The settings of the comparison may have further values, such as the domain that is held out.
        its = next(one for one in comparison.settings if setting.values.items() <= one.values.items())
        task = comparison.task_of(its)
        preflight(task, comparison.choices, report_size=False)
        for choice in comparison.choices:
            yield Candidate(router=choice.name, settings=setting.values, flops=_flops(task, choice))


def _of_rung(recipe: Recipe, planned: int, steps: int) -> Recipe:
    """Return the recipe with so many steps, and one validation at the end."""
    whole = change_recipe(recipe, {"training.steps": planned, "training.epochs": None})
    shorter = {**shortened(whole.training, steps), "training.steps": steps, "training.validate_every": steps}
    return change_recipe(whole, shorter)


def _groups(
    alive: Sequence[Candidate], settings: Sequence[Setting], choices: Sequence[RouterChoice]
) -> list[tuple[list[Setting], list[RouterChoice]]]:
    """Return settings in which the same routers are left, and these routers: each pair is one comparison."""
    left, groups = [(one.router, one.settings) for one in alive], dict[tuple[str, ...], list[Setting]]()
    for setting in settings:
        names = tuple(choice.name for choice in choices if (choice.name, setting.values) in left)
        if names:
            groups.setdefault(names, []).append(setting)
    return [(group, [choice for choice in choices if choice.name in names]) for names, group in groups.items()]


def _measured(setting: Setting, choice: RouterChoice, results: Sequence[Result], rung: int, *, is_last: bool) -> Candidate:
    """Return a trained candidate, with means over its cells: seeds and, if several domains are held out, domains."""
    wanted = setting.values.items()
    own = [one for one in results if one["router"] == choice.name and wanted <= one.get("settings", {}).items()]
    losses = [ValidationCurve.of(one["log"]).losses[-1] for one in own]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return Candidate(
        router=choice.name,
        settings=setting.values,
        flops=fmean(one["origin"]["flops"] for one in own),
        rung=rung,
        loss=fmean(known) if len(known) == len(losses) else None,
        figure=fmean(one["clean"]["figure"] for one in own) if is_last else None,
    )


@contextmanager
def _progress(steps: Sequence[int], seeds: int, candidates: int, keep: int) -> Iterator[Callable[[int, int], Progress]]:
    """Show one bar for all rungs. Yield a function that returns the progress of a rung (its number and its steps)."""
    sizes = [math.ceil(candidates / keep**number) for number in range(len(steps))]
    work = [size * count * seeds for size, count in zip(sizes, steps, strict=True)]
    with bar(sum(work)) as tell:

        def of_rung(number: int, count: int) -> Progress:
            done: dict[str, int] = {}

            def note(cell: Cell, finished: int) -> None:
                done[cell.name] = finished
                amount = sum(work[: number - 1]) + sum(done.values())
                what = f"rung {number} of {len(steps)}, {cell.label}, seed {cell.seed}"
                tell(amount, what, f"step {finished} of {count}")

            return note

        yield of_rung
        tell(sum(work), "finished")
