"""The tables of the page. A table is a row for each router, by column; the page puts the routers in front.

The report: results rendered into one HTML file that needs nothing else, and may fetch nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from holdfast.report.expert_views import evolutions, look, views
from holdfast.report.page_shell import SCRIPTS as SCRIPTS
from holdfast.report.page_shell import THEMES as THEMES
from holdfast.report.page_shell import filled, flat, write_page
from holdfast.report.plot_data import by_layer, every_attack_table, mean_of
from holdfast.report.plots import plots
from holdfast.report.stored_comparison import NAME, Cell, Results, Row
from holdfast.report.verdict import figure, verdict

COST = "cost of the attack on untouched words"
NONE = "\u2013"


def main_table(results: Results) -> Iterator[dict[str, str]]:
    """How well each router's models predict."""
    name = results.run.measure.name
    kept: dict[str, Callable[[Cell], float | None]] = {
        "clean, untouched words": lambda cell: cell.clean.figure_of_kept,
        "attacked, untouched words": lambda cell: cell.attacked.figure_of_kept,
    }
    kept = {column: read for column, read in kept.items() if mean_of(results.cells, read) is not None}
    costs, matched = any(row.cost for row in results.rows), any(row.equal_compute for row in results.rows)
    for place, row in enumerate(results.rows):
        cells = results.cells_of(row.router)
        clean, attacked = (
            "baseline" if place == 0 else found.words if found else "no seed in common"
            for found in (row.clean_difference, row.attacked_difference)
        )
        yield {
            "seeds": str(len(row.seeds)),
            "parameters": f"{row.parameters:,}",
            "experts a token": figure(row.experts_per_token),
            f"clean {name}": figure(row.clean),
            "difference, clean": clean,
            f"attacked {name}": figure(row.attacked),
            "difference, attacked": attacked,
            **{column: figure(mean_of(cells, read)) for column, read in kept.items()},
            **({COST: row.cost.words if row.cost else NONE} if costs else {}),
            **({"difference to equal compute": _matched(row)} if matched else {}),
        }


def _matched(row: Row) -> str:
    """A router's clean figure against the baseline that uses as many experts a token, or more."""
    return NONE if row.equal_compute is None else f"to {row.equal_compute.router}: {row.equal_compute.words}"


def routing_table(results: Results) -> Iterator[dict[str, str]]:
    """What each router did on clean data; means over layers and seeds."""
    widths = sorted(
        {strip.width for cell in results.cells for layer in cell.clean.routing.layers for strip in layer.near_ties.strips}
    )
    for row in results.rows:
        cells = results.cells_of(row.router)
        states = [layer for cell in cells for layer in cell.clean.routing.layers]
        columns = {
            "entropy, nats": figure(mean_of(states, lambda layer: layer.entropy), 3),
            "unevenness of load (CV)": figure(mean_of(states, lambda layer: layer.load.cv), 3),
            "dead experts a run": figure(mean_of(cells, _dead), 1),
            "pairs of tokens parted or joined by the next layer": _percent(mean_of(states, lambda layer: layer.instability)),
        }
        for width in widths:  # of any router, so that all rows have the same columns
            shares = [strip.share for layer in states for strip in layer.near_ties.strips if strip.width == width]
            columns[f"tokens within {width:g} of a tie"] = _percent(mean_of(shares, lambda share: share))
        yield columns


def main_caption(results: Results) -> str:
    measure = results.run.measure
    caption = (
        f"{measure.sentence} Means over seeds; differences to {results.rows[0].router}, paired by seed. "
        f"The attack: {measure.attack}."
    )
    if results.targets_are_attacked:
        caption += (
            " It changes what is to be predicted too, so compare routers within a column, not columns; only those of "
            "untouched words are about the same targets."
        )
    if any(row.cost for row in results.rows):
        caption += (
            " The cost is the rise of the perplexity of untouched words, paired word by word, with the wider of two 95% "
            "intervals: over blocks of the text, and over seeds."
        )
    return caption


def _dead(cell: Cell) -> float:
    return float(sum(len(layer.load.dead) for layer in cell.clean.routing.layers))


def _percent(share: float | None) -> str:
    return figure(share) if share is None else f"{100 * share:.2f}%"


MARKS = "●◆■▲▼✚✖★"  # as traces.SYMBOLS


def write_report(results: Results, path: Path, *, force: bool = False) -> Path:
    """Whole or not at all, and over nothing that is there already unless forced."""
    return write_page(path, lambda: render(results), force=force)


def render(results: Results) -> str:
    """The page of a comparison."""
    drawn, graphs, seen = plots(results), evolutions(results), views(results)
    return filled(
        "report.html",
        {
            "plots": {plot.name: asdict(plot) for plot in drawn},
            "graphs": [asdict(evolution) for evolution in graphs],
            "views": seen.shown,
            "pixels": seen.pixels,
        },
        title=results.title,
        verdict=verdict(results),
        routers=[{"name": row.router, "mark": mark(place)} for place, row in enumerate(results.rows)],
        measure=results.run.measure,
        table=list(main_table(results)),
        table_caption=main_caption(results),
        trials=list(every_attack_table(results)),
        targets_are_attacked=results.targets_are_attacked,
        routing=list(routing_table(results)),
        plots=drawn,
        graphs=graphs,
        views=seen,
        layers=layers(results),
        look=look,
        how=how(results),
        colours=len(THEMES["light"]["routers"]),
    )


def mark(place: int) -> str:
    return MARKS[place % len(MARKS)]


def layers(results: Results) -> list[str]:
    """What the layer-by-layer plots can show."""
    return list(dict.fromkeys(name for row in results.rows for name, _ in by_layer(results.cells_of(row.router))))


def how(results: Results) -> dict[str, dict[str, str]]:
    """How it was run, in groups."""
    run = results.run
    seeds = sorted({cell.seed for cell in results.cells})
    batches = {
        f"seed {seed}": "; ".join(sorted({_batches(cell) for cell in results.cells if cell.seed == seed})) for seed in seeds
    }
    groups = {
        "Versions": results.versions or {"holdfast": run.holdfast},
        "Recipe": dict(flat(run.recipe)),
        "Data": dict(flat(run.data)),
        "Attack": dict(flat(run.attack)),
        "Batches, first and last of each seed": batches,
        "Checksum": {f"{NAME}, SHA-256": results.checksum} if results.checksum else {},
    }
    return {title: group for title, group in groups.items() if group}


def _batches(cell: Cell) -> str:
    return f"{cell.first_batch} … {cell.last_batch}"
