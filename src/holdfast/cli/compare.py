"""`holdfast compare`: routers trained side by side, attacked, measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.train import Comparison, Contender


@dataclass(frozen=True)
class Compare:
    """Train several routers under equal conditions, attack each, and print how they did.

    Every router sees the same batches in the same order and starts from the same weights wherever shapes agree. Interrupted,
    the same command continues where it was; a finished cell is not run again.

    Examples: `holdfast compare`, `holdfast compare --routers smoe,smooth --seeds 5 --out runs/smooth`,
    `holdfast compare --recipe switch-small --data ~/data --set data.source=wikitext-2 training.steps=5000`
    """

    recipe: str = "tiny"
    """A shipped recipe, or the path of a .yaml file."""
    routers: str = "smoe,symphony,similarity,ac,smooth"
    """Names joined by commas; the first is the baseline. A plus sign inside a name joins parts."""
    seeds: int = 3
    """How many times each router is trained, each time with other weights and another order of the data."""
    out: Path = Path("comparison")
    """The folder for everything that is written."""
    data: Path | None = None
    """Where named text sources lie, if they are not to be fetched."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, as training.steps=50."""
    match_compute: bool = False
    """Add the baseline with one expert more a token, for routers that use more than k."""

    def run(self) -> None:
        import transformers

        from holdfast.report import read_results, write_report
        from holdfast.train import Comparison, load_recipe
        from holdfast.train.cells import write_json
        from holdfast.train.summary import summarise
        from holdfast.version import versions

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        recipe = load_recipe(self.recipe, changes(self.set))
        contenders = self._contenders(recipe.sparse.k)
        comparison = Comparison(recipe, contenders, self.seeds, self.out, data=self.data)
        results = _with_progress(comparison)
        rows = summarise(results, contenders[0].name)
        # Versions are not part of a run's identity: an update must not keep a run from continuing.
        stored = {"run": comparison.identity(), "versions": versions(), "rows": rows, "cells": results}
        write_json(self.out / "results.json", stored)
        _print(rows, comparison)
        print(f"\nAll figures: {self.out / 'results.json'}")
        print(f"Report: {write_report(read_results(self.out), self.out / 'report.html', force=True)}")

    def _contenders(self, k: int) -> list[Contender]:
        from holdfast.routing.presets import REGISTRY
        from holdfast.train import Contender

        names = [name.strip() for name in self.routers.split(",") if name.strip()]
        for name in names:
            REGISTRY.parse(name)
        contenders = [Contender(name, name) for name in names]
        if self.match_compute and names:
            contenders.append(Contender(f"{names[0]}, top {k + 1}", names[0], k=k + 1))
        return contenders


def changes(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`training.steps=50` as a key and a value, read as YAML reads values."""
    import yaml

    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ValueError(f"{pair!r} is no change of a recipe; write section.key=value.")
        found[key] = yaml.safe_load(value)
    return found


def _with_progress(comparison: Comparison) -> list[dict[str, Any]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    steps = comparison.recipe.training.steps
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        bar = bars.add_task("", total=steps * len(comparison.cells))
        done = {cell.name: index for index, cell in enumerate(comparison.cells)}
        return comparison.run(
            lambda cell, finished: bars.update(
                bar,
                completed=done[cell.name] * steps + finished,
                description=f"{cell.contender.name}, seed {cell.seed}: step {finished} of {steps}",
            )
        )


def _print(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    attack = comparison.task.attack
    table = Table(
        box=box.SIMPLE_HEAD,  # without lines between columns: intervals and all, it fits a terminal of 80
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{comparison.recipe.about}; {comparison.task.corpus.name}, {comparison.seeds} seeds",
        caption=f"Perplexity a token on the test text, and under a swap of {attack.realised:.1%} of its words; differences "
        f"to {rows[0]['router']}, paired by seed, with 95% intervals. Both texts are scored whole, swapped words included; "
        "experts are those used a token.",
    )
    for column in ("router", "weights", "experts", "clean", "difference", "attacked", "difference"):
        table.add_column(column, no_wrap=column == "router", min_width=14 if column == "difference" else None)
    for row in rows:
        differences = [_briefly(row.get(f"{text}, difference")) for text in ("clean", "attacked")]
        figures = (f"{row['clean']:.2f}", differences[0], f"{row['attacked']:.2f}", differences[1])
        table.add_row(row["router"], _in_thousands(row["parameters"]), f"{row['experts_per_token']:.2f}", *figures)
    Console().print(table)


def _in_thousands(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 10_000_000 else f"{count / 1e3:.1f} k"


def _briefly(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "baseline"
    if difference["low"] is None:
        return f"{difference['mean']:+.2f}, one seed"
    differs = not difference["low"] <= 0 <= difference["high"]
    found = f"{difference['mean']:+.2f}" if differs else "no difference"
    return f"{found}\n({difference['low']:+.1f} to {difference['high']:+.1f})"
