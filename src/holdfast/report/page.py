"""The report: results rendered into one HTML file that needs nothing else, and may fetch nothing."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.report.graphs import evolutions
from holdfast.report.plots import plots
from holdfast.report.results import NAME, Cell, Results
from holdfast.report.tables import main_caption, main_table, routing_table
from holdfast.report.traces import by_layer
from holdfast.report.trials import every_attack_table
from holdfast.report.verdict import verdict
from holdfast.report.views import BORDERS, COLOURS, ink_on, look, views
from holdfast.writing import write_whole

PAGE = Path(__file__).parent / "page"  # template, style and scripts
SCRIPTS = ("graphs.js", "views.js", "report.js")  # the last one calls the others
MARKS = "●◆■▲▼✚✖★"  # as traces.SYMBOLS

# Okabe and Ito's colours for the colour-blind, darkened or lightened until they can be read on their ground.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff",
        "raised": "#f4f5f7",
        "ink": "#1b1f24",
        "muted": "#59636e",
        "line": "#d5dae0",
        "heat": ["#f4f5f7", "#5aaee8", "#08306b"],
        "routers": ["#0072b2", "#c44e00", "#00815e", "#b0558a", "#9a6a00", "#2f8fc4", "#5d5d5d", "#7a6f00"],
    },
    "dark": {
        "ground": "#14171b",
        "raised": "#1f242a",
        "ink": "#e8eaed",
        "muted": "#a3acb7",
        "line": "#3a424c",
        "heat": ["#1f242a", "#2a78b5", "#d8efff"],
        "routers": ["#5aaee8", "#ff8f4a", "#2fc79a", "#e59bc8", "#f0b73c", "#9fdcff", "#b5b5b5", "#e6dc62"],
    },
}


def write_report(results: Results, path: Path, *, force: bool = False) -> Path:
    """Whole or not at all, and over nothing that is there already unless forced."""
    if path.is_dir() or path.name == NAME:
        what = "a folder" if path.is_dir() else "the name of stored results"
        raise ValueError(f"{path} is {what}; name an .html file to write to.")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another file with --out, or overwrite it with --force.")
    write_whole(path, render(results))
    return path


def render(results: Results) -> str:
    """The page. Everything from the results is escaped; scripts run only if they are ours, by their checksums."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "sort_keys": True, "separators": (",", ":")}
    drawn, graphs, seen = plots(results), evolutions(results), views(results)
    scripts = [get_plotlyjs(), *((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    return templates.get_template("report.html").render(
        title=str(results.run.recipe.get("about") or "A comparison of routers"),
        verdict=verdict(results),
        routers=[{"name": row.router, "mark": mark(place)} for place, row in enumerate(results.rows)],
        measure=results.run.measure,
        table=list(main_table(results)),
        table_caption=main_caption(results),
        trials=list(every_attack_table(results)),
        routing=list(routing_table(results)),
        plots=drawn,
        graphs=graphs,
        views=seen,
        layers=layers(results),
        data={
            "plots": {plot.name: asdict(plot) for plot in drawn},
            "themes": THEMES,
            "graphs": [asdict(evolution) for evolution in graphs],
            "views": seen.shown,
            "pixels": seen.pixels,
            "looks": {"colours": len(COLOURS), "borders": len(BORDERS)},
        },
        themes=THEMES,
        experts=[{"colour": colour, "ink": ink_on(colour)} for colour in COLOURS],
        borders=BORDERS,
        look=look,
        how=how(results),
        colours=len(THEMES["light"]["routers"]),
        style=Markup((PAGE / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        hashes=[f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts],
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
        "Recipe": dict(_flat(run.recipe)),
        "Data": dict(_flat(run.data)),
        "Attack": dict(_flat(run.attack)),
        "Batches, first and last of each seed": batches,
        "Checksum": {f"{NAME}, SHA-256": results.checksum} if results.checksum else {},
    }
    return {title: group for title, group in groups.items() if group}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _batches(cell: Cell) -> str:
    return f"{cell.first_batch} … {cell.last_batch}"
