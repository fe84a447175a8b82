"""What all pages share: colour themes, rendering of templates with their scripts, writing of files, number formats."""

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import require_extra
from holdfast.files import write_atomically
from holdfast.report.plot_data import Plot
from holdfast.stored import StoredRecord

if TYPE_CHECKING:
    from holdfast.auditing.reports import Report

PAGE = Path(__file__).parent / "page"  # templates, style and scripts
SCRIPTS = ("graphs.js", "views.js", "report.js")  # the last one uses the others
AUDIT, GEOMETRY, MISMATCH = "audit.json", "geometry.json", "mismatch.json"
STORED = {
    "results.json": "stored results",
    AUDIT: "a stored audit",
    GEOMETRY: "a stored geometry report",
    MISMATCH: "a stored mismatch report",
}

# Okabe and Ito's colours for the colour-blind, darkened or lightened for contrast with the background.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff",
        "raised": "#f4f5f7",
        "ink": "#1b1f24",
        "muted": "#59636e",
        "line": "#d5dae0",
        "heat": ["#f4f5f7", "#5aaee8", "#08306b"],
        "cells": ["#a9d4f0", "#f9cf9c", "#a5dfc8", "#f0c1dc", "#f6ea9a", "#d3d7dc", "#c9c0f0", "#f5b3a2"],
        "strip": "#1b1f24",
        "routers": ["#0072b2", "#c44e00", "#00815e", "#b0558a", "#9a6a00", "#2f8fc4", "#5d5d5d", "#7a6f00"],
    },
    "dark": {
        "ground": "#14171b",
        "raised": "#1f242a",
        "ink": "#e8eaed",
        "muted": "#a3acb7",
        "line": "#3a424c",
        "heat": ["#1f242a", "#2a78b5", "#d8efff"],
        "cells": ["#1d4b6b", "#6b4218", "#14503f", "#5f3350", "#57511a", "#3f464e", "#413a70", "#6e3226"],
        "strip": "#e8eaed",
        "routers": ["#5aaee8", "#ff8f4a", "#2fc79a", "#e59bc8", "#f0b73c", "#9fdcff", "#b5b5b5", "#e6dc62"],
    },
}


# Of experts: far from each other, and from grey, the colour of the images below them.
COLOURS = (
    "#e6194b", "#3cb44b", "#ffd500", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6",
    "#bfef45", "#f5a3bd", "#2f8f86", "#c9a6f7", "#9a6324", "#8c1c1c", "#8ff0b0", "#808000",
)  # fmt: skip
BORDERS = ("none", "dashed", "dotted", "double")  # these distinguish experts of the same colour


def write_page(path: Path, page: Callable[[], str], *, force: bool = False) -> Path:
    """Write a page atomically. Raise ValueError if the file exists and `force` is False, or has the name of a result."""
    if path.is_dir() or path.name in STORED:
        what = "a folder" if path.is_dir() else f"the name of {STORED[path.name]}"
        raise ValueError(f"{path} is {what}; name an .html file to write to.")
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; remove it, or name another file.")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another file with --out, or overwrite it with --force.")
    write_atomically(path, page())
    return path


Record = TypeVar("Record", bound=StoredRecord)


def write_report_page(
    kind: type[Record],
    report: Record | str | Path,
    path: str | Path,
    render: Callable[[Record], str],
    *,
    force: bool = False,
) -> Path:
    """Write the page of a report, given as a record, as its file or as its folder. Overwrite a file only with `force`."""
    target = Path(path)
    if not isinstance(report, str | Path):
        found = report
        return write_page(target, lambda: render(found), force=force)
    source = Path(report)
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the stored report itself; name an .html file to write to.")
    return write_page(target, lambda: render(kind.load(source)), force=force)


def render_template(template: str, drawn: Iterable[Plot], data: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Return a page. All values are escaped; only the scripts with our checksums may run. They draw plots and `data`."""
    require_extra("writing a page", "jinja2", "plotly")
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
    scripts = [get_plotlyjs(), *((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    given = {"plots": {plot.name: asdict(plot) for plot in drawn}, "graphs": [], "views": [], "pixels": [], **(data or {})}
    looks = {"colours": len(COLOURS), "borders": len(BORDERS)}
    return templates.get_template(template).render(
        data={**given, "themes": THEMES, "looks": looks},
        themes=THEMES,
        experts=[with_text_colour(colour) for colour in COLOURS],
        borders=BORDERS,
        style=Markup((PAGE / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        hashes=[f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts],
        **values,
    )


def with_text_colour(colour: str) -> dict[str, str]:
    """Return a background colour with a text colour that is readable on it."""
    return {"colour": colour, "ink": text_colour_on(colour)}


def text_colour_on(colour: str) -> str:
    """Return black or white, whichever has more contrast: one of them always has a contrast above 4.5."""
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2.1 defines it, from 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of a nested mapping as dotted names and text."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def listed(names: Sequence[str]) -> str:
    """Return names as text: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def decimal(value: float | None, digits: int = 2) -> str:
    """Return a number with a fixed number of decimals, and a dash for None."""
    return "\u2013" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share in percent, and a dash for None."""
    return decimal(share) if share is None else f"{100 * share:.2f}%"


def short_share(value: float | None) -> str:
    """Return a share in percent with two significant digits: with a fixed number of decimals, small shares would be 0."""
    if value is None or not math.isfinite(value):
        return decimal(None)
    if value == 0 or value >= 0.0995:
        return f"{value:.0%}"
    return "<0.001%" if value < 1e-5 else f"{100 * value:#.2g}%"


def rise(nats: float) -> float:
    """Return the rise of a perplexity in percent, from the rise of the loss in nats."""
    return 100 * math.expm1(nats)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with this many significant digits, and a dash for None."""
    return decimal(value) if value is None else f"{value:.{digits}g}"


def signed(value: float | None, form: str = ".3g") -> str:
    """Return a number with its sign, and a dash for None."""
    return decimal(value) if value is None else f"{value:+{form}}"


def visible_lines(text: str) -> str:
    """Return a text on one line with its line ends marked: a token may consist of nothing else."""
    return "↵".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def how_it_was_run(report: "Report") -> dict[str, dict[str, str]]:
    """Return how a report was made: model, data, settings, versions."""
    stored = asdict(report)
    stored["data"] = {name: value for name, value in stored["data"].items() if value is not None}
    groups = {name.capitalize(): stored[name] for name in ("model", "data", "settings", "versions")}
    groups["Run"] = {"status": report.status, "seconds": decimal(report.seconds, 1)}
    return {title: dict(flattened(group)) for title, group in groups.items() if group}
