"""What all pages share: colour themes, rendering of templates with their scripts, writing of files, number formats."""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.auditing.reports import Pair, flattened
from holdfast.errors import MissingExtra, require_extra
from holdfast.files import write_atomically
from holdfast.report.plot_data import MARKS, Plot
from holdfast.report.tables import Cell
from holdfast.stored import ShownRecord, StoredRecord, late

if TYPE_CHECKING:
    from holdfast.auditing.reports import AuditReport, GeometryReport
    from holdfast.mismatch.report import MismatchReport

PAGE = Path(__file__).parent / "page"  # templates, style and scripts
STYLES = ("report.css", "strip.css", "explorer.css")
SCRIPTS = (  # each uses some of those before it
    "state.js", "tabs.js", "tables.js", "copy.js", "graphs.js", "curves.js", "plot_texts.js", "explorer.js", "export.js",
    "report.js",
)  # fmt: skip
STORED = ("results.json", "audit.json", "geometry.json", "mismatch.json", "predictions.json")

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
RISKS = {1e-5: "#7f0000", 1e-4: "#c8321e", 1e-3: "#f07f4f", 1e-2: "#fdbb84"}  # of tokens with relative radii below these
SAFE = "#fee8c8"


def write_page(path: Path, page: Callable[[], str], *, force: bool = False) -> Path:
    """Write a page atomically. Raise ValueError if the file exists and `force` is False, or has the name of a result."""
    if path.is_dir() or path.name in STORED:
        what = "a folder" if path.is_dir() else "the name of a stored report"
        raise ValueError(f"{path} is {what}; name an .html file to write to.")
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; remove it, or name another file.")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another file with --out, or overwrite it with --force.")
    write_atomically(path, page())
    return path


def render(report: ShownRecord) -> str:
    """Return the page of a report as HTML."""
    return str(late(report.page)(report).html())


def write_report_page(kind: type[ShownRecord], report: ShownRecord | str | Path, path: str | Path, *, force: bool) -> Path:
    """Write the page of a report, given as a record, as its file or as its folder. Overwrite a file only with `force`.

    A stored report whose parts do not fit together (it was edited) cannot be drawn: raise ValueError.
    """
    target = Path(path)
    if isinstance(report, ShownRecord):
        return write_page(target, partial(render, report), force=force)
    source = Path(report) / kind.file_name if Path(report).is_dir() else Path(report)
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the stored report itself; name an .html file to write to.")

    def page() -> str:
        record = kind.load(source)
        with drawing(source, kind):
            return render(record)

    return write_page(target, page, force=force)


@contextmanager
def drawing(source: Path, kind: type[StoredRecord]) -> Iterator[None]:
    """Turn errors about a report whose parts do not fit together into one sentence that names its file."""
    try:
        yield
    except MissingExtra:
        raise
    except (LookupError, TypeError, ValueError) as problem:
        raise ValueError(f"{source} is damaged: it cannot be drawn ({problem}); {kind.remedy}.") from problem


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
    templates.globals |= {"marks": MARKS, "colours": len(THEMES["light"]["routers"])}
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "sort_keys": True, "separators": (",", ":")}
    given = {"plots": {plot.name: asdict(plot) for plot in drawn}, "graphs": [], "curves": [], **(data or {})}
    library = [get_plotlyjs()] if any(given[kind] for kind in ("plots", "graphs", "curves")) else []
    scripts = [*library, *((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    names = [risk["name"] for risk in risks()]
    looks = {"colours": len(COLOURS), "borders": len(BORDERS), "risks": list(RISKS), "names": names}
    return templates.get_template(template).render(
        data={**given, "themes": THEMES, "looks": looks},
        themes=THEMES,
        experts=[with_text_colour(colour) for colour in COLOURS],
        borders=BORDERS,
        risks=risks(),
        style=Markup("".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES)),
        scripts=[Markup(script) for script in scripts],
        hashes=[f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts],
        **values,
    )


def with_text_colour(colour: str) -> dict[str, str]:
    """Return a background colour with black or white for text on it: one of them always has a contrast above 4.5."""
    return {"colour": colour, "ink": "#000000" if luminance(colour) > 0.179 else "#ffffff"}


def risks() -> list[dict[str, str]]:
    """Return the legend of risks, the smallest radii first. A token's level is an index into it."""
    named = [{"name": f"below {bound:g}", **with_text_colour(colour)} for bound, colour in RISKS.items()]
    return [*named, {"name": f"{max(RISKS):g} and more", **with_text_colour(SAFE)}]


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2.1 defines it, from 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def as_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a nested mapping by dotted name, as text."""
    entries = ((name, value if isinstance(value, list) else [value]) for name, value in flattened(tree))
    return {name: ", ".join(map(str, values)) or "none" for name, values in entries}


def listed(names: Sequence[str]) -> str:
    """Return names as text: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def decimal(value: float | None, digits: int = 2) -> Cell:
    """Return a number with a fixed number of decimals, and a dash for None."""
    return Cell("\u2013" if value is None else f"{value:,.{digits}f}", value)


def percent(share: float | None) -> Cell:
    """Return a share in percent, and a dash for None."""
    return decimal(share) if share is None else Cell(f"{100 * share:.2f}%", 100 * share)


def short_share(value: float | None) -> Cell:
    """Return a share in percent with two significant digits: with a fixed number of decimals, small shares would be 0."""
    if value is None or not math.isfinite(value):
        return decimal(None)
    if value == 0 or value >= 0.0995:
        return Cell(f"{value:.0%}", 100 * value)
    return Cell("<0.001%" if value < 1e-5 else f"{100 * value:#.2g}%", 100 * value)


def before_and_after(pair: Pair, written: Callable[[float | None], Cell]) -> Cell:
    """Return two numbers with an arrow between them."""
    before, after = written(pair.before), written(pair.after)
    return Cell(f"{before} → {after}", pair=(before.value, after.value))


def rise(nats: float) -> float:
    """Return the rise of a perplexity in percent, from the rise of the loss in nats."""
    return 100 * math.expm1(nats)


def number(value: float | None, digits: int = 3) -> Cell:
    """Return a number with this many significant digits, and a dash for None."""
    return decimal(value) if value is None else Cell(f"{value:.{digits}g}", value)


def signed(value: float | None, form: str = ".3g") -> Cell:
    """Return a number with its sign, which one that rounds to 0 does not have, and a dash for None."""
    if value is None:
        return decimal(value)
    text = f"{value:+{form}}"
    if not re.search("[1-9]|inf|nan", text):
        text = text[1:]
    return Cell(text, 100 * value if form.endswith("%") else value)


def seconds_text(seconds: float | None) -> str:
    """Return a time in the unit that suits it: `310 ms`, `2.4 s`, `12 min`, `3.5 h`."""
    if seconds is None:
        return decimal(None)
    units = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    unit = max((name for name in units if seconds >= 0.9995 * units[name]), key=lambda name: units[name], default="ms")
    return f"{_short(seconds / units[unit])} {unit}"


def flops_text(flops: float | None) -> str:
    """Return a number of FLOPs: `1.3 M`."""
    return _with_prefix(flops, 1000.0)


def bytes_text(count: float | None) -> str:
    """Return a number of bytes: `2.1 GiB`."""
    return f"{_with_prefix(count, 1024.0)}iB".replace("\u2013iB", "\u2013")


def _with_prefix(value: float | None, step: float) -> str:
    """Return a number with the prefix of its size, from K on."""
    if value is None:
        return decimal(None)
    power = next((power for power in range(1, 5) if value / step**power < 999.5), 5)
    return f"{_short(value / step**power)} {'KMGTP'[power - 1]}"


def _short(value: float) -> str:
    """Return a number with two digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def visible_lines(text: str) -> str:
    """Return a text on one line with its line ends marked: a token may consist of nothing else."""
    return "↵".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def how_it_was_run(report: "AuditReport | GeometryReport | MismatchReport") -> dict[str, dict[str, str]]:
    """Return how a report was made: model, data, settings, versions."""
    data = {name: value for name, value in asdict(report.data).items() if value is not None}
    groups: dict[str, dict[str, Any]] = {"Model": asdict(report.model), "Data": data}
    groups |= {"Settings": asdict(report.settings), "Versions": report.versions}
    groups["Run"] = {"status": report.status, "seconds": decimal(report.seconds, 1)}
    return {title: as_texts(group) for title, group in groups.items() if group}
