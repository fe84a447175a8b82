"""`holdfast compare`: routers trained side by side, attacked, measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.terminal import bar, show

if TYPE_CHECKING:
    from holdfast.train import Cell, Comparison, Contender


@dataclass(frozen=True)
class Compare:
    """Train several routers under equal conditions, attack each, and print how they did.

    Every router sees the same batches in the same order and starts from the same weights wherever shapes agree. Interrupted,
    the same command continues where it was; a finished cell is not run again. Routers named later join those in the folder.

    Examples: `holdfast compare`, `holdfast compare --routers smoe,smooth --seeds 5 --out runs/smooth`,
    `holdfast compare --recipe switch-small --data ~/data --set data.source=wikitext-2 training.steps=5000`
    """

    recipe: str = "tiny"
    """A shipped recipe, or the path of a .yaml file."""
    routers: str = "smoe,symphony,similarity,ac,smooth"
    """Names joined by commas; the first is the baseline, unless the folder has one already. A plus sign joins parts,
    brackets hold options: smoe,symphony+smooth,similarity[causal=false]."""
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
    jobs: int = 1
    """How many models are trained at a time; several keep one GPU busy."""

    def run(self) -> None:
        from holdfast.report import read_results, write_report
        from holdfast.train import Comparison, load_recipe
        from holdfast.train.quiet import quiet

        recipe = load_recipe(self.recipe, changes(self.set))
        routers = self._contenders(recipe.sparse.k)
        comparison = Comparison(recipe, routers, self.seeds, self.out, data=self.data)
        quiet()
        page = self.out / "report.html"
        results = _with_progress(comparison, self.jobs)
        rows = comparison.publish(results, lambda: write_report(read_results(self.out), page, force=True))
        print_table(rows, comparison)
        print(f"\nAll figures: {self.out / 'results.json'}\nReport: {page}")

    def _contenders(self, k: int) -> list[Contender]:
        from holdfast.train.contenders import contenders

        found = contenders(self.routers)
        if self.match_compute and found:
            more = f"{found[0].name}, top {k + 1}"
            found.append(replace(found[0], name=more, k=k + 1))
        return found


def changes(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`training.steps=50` as a key and a value, read as YAML reads values."""
    import yaml

    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ValueError(f"{pair!r} is no change of a recipe; write section.key=value.")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{value!r}, the value of {key}, is no YAML; put a text with brackets into quotes.") from None
    return found


def _with_progress(comparison: Comparison, jobs: int) -> list[dict[str, Any]]:
    steps, cells = comparison.recipe.training.steps, comparison.cells
    done = dict.fromkeys((cell.name for cell in cells), 0)
    with bar(steps * len(cells)) as tell:

        def note(cell: Cell, finished: int) -> None:
            done[cell.name] = finished
            tell(sum(done.values()), f"{cell.contender.name}, seed {cell.seed}: step {finished} of {steps}")

        return comparison.run(note, jobs=jobs)


def print_table(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    from rich import box
    from rich.table import Table

    measure, data = comparison.task.measure, comparison.task.describe()["data"]
    table = Table(
        box=box.SIMPLE_HEAD,  # without lines between columns: intervals and all, it fits a terminal of 80
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{comparison.recipe.about}; {data['name']}, {_seeds(rows)}",
        caption=f"Clean: {measure.long}; attacked: the same under {measure.attack}. Lower is better. Differences are to "
        f"{rows[0]['router']}, paired by seed, with 95% intervals; experts are those used a token.",
    )
    for column in ("router", "weights", "experts", "clean", "difference", "attacked", "difference"):
        table.add_column(column, no_wrap=column == "router", min_width=14 if column == "difference" else None)
    for row in rows:
        baseline = row is rows[0]
        differences = [
            "baseline" if baseline else _briefly(row.get(f"{text}, difference")) for text in ("clean", "attacked")
        ]
        figures = (_figure(row["clean"]), differences[0], _figure(row["attacked"]), differences[1])
        table.add_row(row["router"], _in_thousands(row["parameters"]), f"{row['experts_per_token']:.2f}", *figures)
    show(table)


def _seeds(rows: list[dict[str, Any]]) -> str:
    """Those that joined later may have fewer."""
    counts = sorted({len(row["seeds"]) for row in rows})
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' if counts[0] > 1 else ''}"


def _in_thousands(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 10_000_000 else f"{count / 1e3:.1f} k"


def _figure(value: float | None) -> str:
    return "broke" if value is None else f"{value:.2f}"


def _briefly(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "none known"
    if difference["low"] is None:
        return f"{difference['mean']:+.2f}, one seed"
    differs = not difference["low"] <= 0 <= difference["high"]
    found = f"{difference['mean']:+.2f}" if differs else "no difference"
    return f"{found}\n({difference['low']:+.1f} to {difference['high']:+.1f})"
