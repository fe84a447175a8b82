"""`holdfast compare`: train and attack several routers under equal conditions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from holdfast.cli.common import PluginFiles, bar, changes, require_folder, require_place, show, show_messages, slim_table
from holdfast.comparing import PAGE, ROUTERS, load_with_sweep, run_comparison
from holdfast.locking import take_over

if TYPE_CHECKING:
    from holdfast.report.stored_comparison import Results
    from holdfast.train import Cell, Comparison


@dataclass(frozen=True)
class Compare:
    """Train several routers under equal conditions, attack each trained model, and print a comparison.

    Every router gets the same batches in the same order and starts from the same weights wherever shapes agree. Run the
    same command again to resume an interrupted comparison; finished cells are not run again. Routers that you name later
    are added to those in the folder. A router that cannot be built is reported before any training.

    Examples: `holdfast compare`, `holdfast compare --routers smoe,smooth --seeds 5 --out runs/smooth`,
    `holdfast compare --routers smoe,smooth --sweep sparse.k=1,2,4 training.learning_rate=1e-3,1e-4 --out runs/k`,
    `holdfast compare --recipe switch-small --data ~/data --set data.source=wikitext-2 training.steps=5000`,
    `holdfast compare --recipe vmoe --set data.source=imagenet/ "data.shifts=[imagenet-a, imagenet-c, corruptions]"`
    """

    recipe: str = "tiny"
    """The name of a shipped recipe, or the path of a .yaml file."""
    routers: str = ROUTERS
    """Router names, joined by commas; the first is the baseline, unless the folder already has one. A plus sign joins
    names, brackets contain options, layers follow @: smoe,symphony+smooth,similarity[causal=false],ac@1,3."""
    seeds: int = 3
    """How many times to train each router, each time with other initial weights and another order of the data."""
    out: Path = Path("comparison")
    """The folder for all results."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, for example training.steps=50."""
    sweep: tuple[str, ...] = ()
    """Values of keys of the recipe, for example sparse.k=1,2,4 training.learning_rate=1e-3,1e-4: every combination is
    trained with every router and seed, and compared with the baseline of the same setting."""
    match_compute: bool = True
    """If a router uses more experts per token than the baseline, add the baseline with that number, rounded up."""
    jobs: int = 1
    """How many models to train at the same time; several use one GPU better."""
    take_over: bool = False
    """Write into the folder although a process of another host has left its note there; make sure that it has ended."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.report import read_results
        from holdfast.report.comparison_page import verdict
        from holdfast.train.recipe import parse_routers
        from holdfast.train.sweep import parse_sweep
        from holdfast.train.training import quiet

        self.plugins.load()
        recipe, settings = load_with_sweep(self.recipe, changes(self.set), parse_sweep(self.sweep))
        require_folder(self.out)
        for name in ("results.json", PAGE):
            require_place(self.out / name)
        if self.take_over:
            take_over(self.out)
        routers = parse_routers(self.routers)
        quiet()
        show_messages()

        def run(comparison: Comparison) -> list[dict[str, Any]]:
            return _with_progress(comparison, self.jobs)

        how: dict[str, Any] = {"data": self.data, "match_compute": self.match_compute, "settings": settings}
        comparison, rows = run_comparison(recipe, routers, self.seeds, self.out, run=run, **how)
        results = read_results(self.out)
        print_table(rows, comparison, results.title)
        print_accuracies(rows, comparison)
        print_metrics(rows, comparison)
        print_shifts(rows)
        print_domains(results)
        print("\n" + "\n".join(verdict(results)))
        print(f"\nAll numbers: {self.out / 'results.json'}\nReport: {self.out / PAGE}")


def _with_progress(comparison: Comparison, jobs: int) -> list[dict[str, Any]]:
    steps = {cell.name: comparison.steps_of(cell) for cell in comparison.cells}
    done = dict.fromkeys(steps, 0)
    trained: set[str] = set()  # cells that this command trains
    with bar(sum(steps.values())) as tell:

        def note(cell: Cell, finished: int) -> None:
            done[cell.name], total = finished, steps[cell.name]
            if finished < total:
                trained.add(cell.name)
            phase = "train" if finished < total else "evaluate and attack" if cell.name in trained else "finished before"
            tell(sum(done.values()), f"{cell.label}, seed {cell.seed}: {phase}", f"step {finished} of {total}")

        results = comparison.run(note, jobs=jobs)
        tell(sum(done.values()), f"{comparison.folder}: write results and report")
        return results


def print_table(rows: list[dict[str, Any]], comparison: Comparison, title: str) -> None:
    """Print the comparison as a table with a row for each router."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from holdfast.routing.grammar import short_keys, written_value

    measure = comparison.task.measure
    costs = any("cost" in row for row in rows)
    caption = (
        f"Clean: {measure.long}; attacked: the same under {measure.attack}. {measure.better.capitalize()} is better. "
        f"Differences are to {escape(rows[0]['router'])}, paired by seed and by test example, with 95% intervals; experts: "
        "used per token."
    )
    some = "attacked, clean" in rows[0] and len({*rows[0]["examples"].values()}) > 1
    if some:
        counts = rows[0]["examples"]
        caption += f" {counts['attacked']} of {counts['clean']} test examples were attacked."
    if any("settings" in row for row in rows):
        caption += " Differences are within equal settings."
    if costs:
        caption += " Cost: how much the attack raises the perplexity of the untouched words, with a 95% interval."
    table = Table(
        box=box.SIMPLE_HEAD,  # without lines between columns: intervals and all, it fits a terminal of 80
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{escape(title)}; {_seeds(rows)}",
        caption=caption,
    )
    swept = list(dict.fromkeys(key for row in rows for key in row.get("settings", {})))
    columns = (
        "router",
        *short_keys(swept),
        "weights",
        "experts",
        "clean",
        "difference",
        *([f"clean of {rows[0]['examples']['attacked']}"] if some else []),
        "attacked",
        "cost" if costs else "difference",
    )
    for column in columns:
        table.add_column(column, no_wrap=column == "router", min_width=14 if column in ("difference", "cost") else None)
    for row in rows:
        clean, attacked = (
            _beside(row, rows[0], row.get(f"{text}, difference"), measure.digits) for text in ("clean", "attacked")
        )
        shown = {text: _number(row.get(text), measure.digits) for text in ("clean", "attacked, clean", "attacked")}
        figures = [shown["clean"], clean, *([shown["attacked, clean"]] if some else [])]
        figures += [shown["attacked"], _cost(row.get("cost")) if costs else attacked]
        if "apart" in row and row is not rows[0]:
            table.add_section()
        setting = (written_value(row.get("settings", {}).get(key)) for key in swept)
        table.add_row(
            escape(row["router"]),
            *map(escape, setting),
            _in_thousands(row["parameters"]),
            f"{row['experts_per_token']:.2f}",
            *figures,
        )
    show(table)


def print_accuracies(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    """Print the accuracy on clean data and under every attack, for images."""
    from rich.markup import escape

    from holdfast.routing.grammar import written_pairs

    if comparison.recipe.task != "images":
        return
    caption = "Classified correctly, in percent, with 95% intervals; differences are paired by seed and by image. "
    caption += "Clean: the same images without the attack."
    columns = ("images", "router", "clean", "accuracy", "interval", "difference")
    table = slim_table("Accuracy", *columns, caption=caption)
    for name in dict.fromkeys(name for row in rows for name in row["scores"]):
        for row in rows:
            found = row["scores"].get(name, {"mean": None})
            if found["mean"] is None:
                continue
            difference = found.get("difference")
            if difference is not None:
                ends = {"low": difference["high"], "high": difference["low"], "mean": difference["mean"]}
                negated = {key: None if value is None else 0.0 - value for key, value in ends.items()}  # 0, not -0
                difference = {**difference, **negated}
            interval = "" if found["low"] is None else f"{100 - found['high']:.2f} to {100 - found['low']:.2f}"
            label = ", ".join(filter(None, [row["router"], written_pairs(row.get("settings", {}))]))
            briefly = _beside(row, rows[0], difference)
            clean = "" if found.get("clean") is None else f"{100 - found['clean']:.2f}"
            table.add_row(name, escape(label), clean, f"{100 - found['mean']:.2f}", interval, briefly)
    show(table)


def print_metrics(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    """Print the recipe's further metrics as a table with a row for each router; nothing if it has none."""
    from rich.markup import escape

    from holdfast.routing.grammar import written_pairs

    metrics = comparison.task.other_metrics
    if not metrics:
        return
    caption = " ".join(f"{metric['name']}: {metric['about']}; {metric['better']} is better." for metric in metrics)
    some = any("attacked, clean" in one for row in rows for one in row.get("metrics", {}).values())
    same = [f"clean of {rows[0]['examples']['attacked']}"] if some else []
    columns = ("metric", "router", "clean", "difference", *same, "attacked", "difference")
    table = slim_table("Other metrics", *columns, caption=caption)
    for metric in metrics:
        for row in rows:
            found, cells = row.get("metrics", {}).get(metric["name"], {}), []
            for text in ("clean", "attacked"):
                both = [found.get("attacked, clean")] if same and text == "attacked" else []
                cells += ["none" if value is None else f"{value:.4g}" for value in (*both, found.get(text))]
                cells += [_beside(row, rows[0], found.get(f"{text}, difference"), 4)]
            label = ", ".join(filter(None, [row["router"], written_pairs(row.get("settings", {}))]))
            table.add_row(metric["name"], escape(label), *cells)
    show(table)


def print_domains(results: Results) -> None:
    """Print the accuracies on held-out domains as a table with a row for each router; nothing for other tasks."""
    from rich.markup import escape

    from holdfast.report.domain_tables import domain_table

    routers, _ = domain_table(results)
    if not routers:
        return
    domains = list(dict.fromkeys(domain for row in results.domains for domain in row.accuracy))
    columns = ("router", *map(escape, domains), "mean", "difference", "worst", "difference")
    caption = (
        "Accuracy on the held-out domain, in percent; higher is better. Differences are to "
        f"{escape(results.rows[0].router)}, paired by seed and by image, with 95% intervals."
    )
    table = slim_table("Held-out domains", *columns, caption=caption)
    for router, row in zip(routers, results.domains, strict=True):
        cells = [_number(row.accuracy[domain].mean if domain in row.accuracy else None) for domain in domains]
        for level, difference in ((row.mean, row.mean_difference), (row.worst, row.worst_difference)):
            told = "baseline" if row.router == results.rows[0].router else None
            cells += [_number(level.mean), told or _briefly(difference.model_dump() if difference else None)]
        table.add_row(escape(router), *cells)
    show(table)


def print_shifts(rows: list[dict[str, Any]]) -> None:
    """Print the results on shifted test sets as a table with a row for each router; nothing if there are none."""
    from rich.markup import escape

    from holdfast.routing.grammar import written_pairs

    tests = {name: (one["measure"], one["better"]) for row in rows for name, one in row.get("shifts", {}).items()}
    if not tests:
        return
    table = slim_table("Shifted test sets", "test images", "measure", "better", "router", "figure", "difference")
    for name, (measure, better) in tests.items():
        for row in rows:
            found = row.get("shifts", {}).get(name, {})
            difference = _beside(row, rows[0], found.get("difference"))
            label = ", ".join(filter(None, [row["router"], written_pairs(row.get("settings", {}))]))
            table.add_row(escape(name), measure, better, escape(label), _number(found.get("figure")), difference)
    show(table)


def _seeds(rows: list[dict[str, Any]]) -> str:
    """Return the number of seeds as text; routers that were added later may have fewer."""
    counts = sorted({len(row["seeds"]) for row in rows})
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' if counts[0] > 1 else ''}"


def _in_thousands(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 10_000_000 else f"{count / 1e3:.1f} k"


def _number(value: float | None, digits: int = 2) -> str:
    return "NaN" if value is None else f"{value:.{digits}f}"


def _beside(row: dict[str, Any], baseline: dict[str, Any], difference: dict[str, Any] | None, digits: int = 2) -> str:
    """Return what stands in the column of differences."""
    if row["router"] == baseline["router"]:
        return "baseline"
    return row.get("apart") or baseline.get("apart") or _briefly(difference, digits)


def _briefly(difference: dict[str, Any] | None, digits: int = 2) -> str:
    if difference is None:
        return "none known"
    mean = f"{difference['mean']:+.{digits}f}"
    if difference["low"] is None:
        return f"{mean}, no interval"
    interval = f"({difference['low']:+.{digits - 1}f} to {difference['high']:+.{digits - 1}f})"
    if difference["over"] != "seeds and examples":
        return f"{mean}\n{interval},\n{difference['over']}"
    return f"{'no difference' if difference['low'] <= 0 <= difference['high'] else mean}\n{interval}"


def _cost(cost: dict[str, Any] | None) -> str:
    """Return the cost in percent of the perplexity, with its interval."""
    if cost is None:
        return "none known"
    mean, low, high = (None if cost[key] is None else 100 * math.expm1(cost[key]) for key in ("mean", "low", "high"))
    if low is None:
        return f"{mean:+.2f}%"
    only = "" if cost["over"] == "seeds and examples" else f",\n{cost['over']}"
    return f"{mean:+.2f}%\n({low:+.2f} to {high:+.2f}){only}"
