"""The report: results rendered into one HTML file that needs nothing else, and may fetch nothing."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.report.plots import by_layer, mean_of, plots
from holdfast.report.results import NAME, Cell, Results
from holdfast.report.verdict import figure, verdict
from holdfast.writing import write_whole

PAGE = Path(__file__).parent / "page"  # template, style and script
MARKS = "●◆■▲▼✚✖★"  # as plots.SYMBOLS

# Okabe and Ito's colours for the colour-blind, darkened or lightened until they can be read on their ground.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff",
        "raised": "#f4f5f7",
        "ink": "#1b1f24",
        "muted": "#59636e",
        "line": "#d5dae0",
        "routers": ["#0072b2", "#c44e00", "#00815e", "#b0558a", "#9a6a00", "#2f8fc4", "#5d5d5d", "#7a6f00"],
    },
    "dark": {
        "ground": "#14171b",
        "raised": "#1f242a",
        "ink": "#e8eaed",
        "muted": "#a3acb7",
        "line": "#3a424c",
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
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "sort_keys": True}
    drawn = plots(results)
    scripts = [get_plotlyjs(), (PAGE / "report.js").read_text(encoding="utf-8")]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    return templates.get_template("report.html").render(
        title=str(results.run.recipe.get("about") or "A comparison of routers"),
        verdict=verdict(results.rows),
        routers=[{"name": row.router, "mark": mark(place)} for place, row in enumerate(results.rows)],
        table=list(table(results)),
        routing=list(routing_table(results)),
        plots=drawn,
        layers=layers(results),
        data={"plots": {plot.name: asdict(plot) for plot in drawn}, "themes": THEMES},
        themes=THEMES,
        how=how(results),
        colours=len(THEMES["light"]["routers"]),
        style=Markup((PAGE / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        hashes=[f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts],
    )


def mark(place: int) -> str:
    return MARKS[place % len(MARKS)]


def table(results: Results) -> Iterator[dict[str, str]]:
    """How well each router's models predict, by column."""
    for place, row in enumerate(results.rows):
        cells = results.cells_of(row.router)
        clean, attacked = (
            "baseline" if place == 0 else found.words if found else "no seed in common"
            for found in (row.clean_difference, row.attacked_difference)
        )
        yield {
            "router": row.router,
            "seeds": str(len(row.seeds)),
            "parameters": f"{row.parameters:,}",
            "experts a token": figure(row.experts_per_token),
            "clean perplexity": figure(row.clean),
            "difference, clean": clean,
            "attacked perplexity": figure(row.attacked),
            "difference, attacked": attacked,
            "attacked, untouched words": figure(mean_of(cells, lambda cell: cell.attacked.perplexity_of_clean_targets)),
        }


def routing_table(results: Results) -> Iterator[dict[str, str]]:
    """What each router did on the clean text, by column; means over layers and seeds."""
    for row in results.rows:
        cells = results.cells_of(row.router)
        states = [layer for cell in cells for layer in cell.clean.routing.layers]
        columns = {
            "router": row.router,
            "entropy, nats": figure(mean_of(states, lambda layer: layer.entropy), 3),
            "unevenness of load (CV)": figure(mean_of(states, lambda layer: layer.load.cv), 3),
            "dead experts a run": figure(mean_of(cells, _dead), 1),
            "pairs of tokens parted or joined by the next layer": _percent(mean_of(states, lambda layer: layer.instability)),
        }
        for width in sorted({strip.width for layer in states for strip in layer.near_ties.strips}):
            shares = [strip.share for layer in states for strip in layer.near_ties.strips if strip.width == width]
            columns[f"tokens within {width:g} of a tie"] = _percent(mean_of(shares, lambda share: share))
        yield columns


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
        "Text": dict(_flat(run.text)),
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


def _dead(cell: Cell) -> float:
    return float(sum(len(layer.load.dead) for layer in cell.clean.routing.layers))


def _percent(share: float | None) -> str:
    return figure(share) if share is None else f"{100 * share:.2f}%"
