"""The report: results rendered into one HTML file that needs nothing else, and may fetch nothing."""

from dataclasses import asdict
from pathlib import Path

from holdfast.report.graphs import evolutions
from holdfast.report.plots import plots
from holdfast.report.results import NAME, Cell, Results
from holdfast.report.shell import SCRIPTS as SCRIPTS
from holdfast.report.shell import THEMES as THEMES
from holdfast.report.shell import filled, flat, write_page
from holdfast.report.tables import main_caption, main_table, routing_table
from holdfast.report.traces import by_layer
from holdfast.report.trials import every_attack_table
from holdfast.report.verdict import verdict
from holdfast.report.views import look, views

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
