"""`Page`: what a page shows, as data. It is rendered as HTML, or exported as CSV, JSON, LaTeX or a pandas frame.

All exports have the records of `report.tables.Record`: one line for each cell of a table, point of a plot, sentence and
setting. The template of a page gets the same tables and plots, so a table that is added to a page is in its exports too.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from holdfast.report.page_shell import render_template
from holdfast.report.plot_data import ALL_LAYERS, Plot, Trace, axis, escaped, trace
from holdfast.report.strip import Strip
from holdfast.report.tables import BOOKTABS, Cell, Record, Table, frame_of, records_to_csv, to_latex
from holdfast.stored import SCHEMA

MOST_COLUMNS = 8  # of a table in LaTeX or text; one with more columns than this, and than rows, is turned
FIELD = re.compile(r"%\{(\w+)(?::([^}]*))?\}")  # of a template of plotly's labels


class Page:
    """A page: its template, its plots, further data for its scripts, and the values that its template shows.

    brief       the table that `print` shows
    sentences   what the page says, the most important first; `print` shows that one
    values      what the template shows, beside `sentences` and, unless it has other `plots`, the plots
    exported    what the template shows in another form than tables and plots: tables of it, strips, dataclasses of texts
    """

    def __init__(
        self,
        template: str,
        plots: Iterable[Plot],
        data: Mapping[str, Any] | None = None,
        /,
        *,
        brief: Table,
        sentences: Sequence[str],
        exported: Any = (),
        **values: Any,
    ) -> None:
        self.template, self.plots, self.data, self.values = template, list(plots), dict(data or {}), values
        self.brief, self.sentences, self.exported = brief, sentences, exported

    def __str__(self) -> str:
        return "\n".join([str(narrow(replace(self.brief, title=self.values["title"]))), *self.sentences[:1]])

    def brief_html(self) -> str:
        """Return the title, the verdict and the main table for a notebook; everything is escaped."""
        said = html.escape(" ".join(self.sentences[:1]))
        return f"<p><strong>{html.escape(self.values['title'])}</strong><br>{said}</p>{self.brief._repr_html_()}"

    def html(self) -> str:
        """Return the page as HTML; its buttons save the exports."""
        texts = {"csv": self.csv(), "tex": self.latex()}  # the script makes the JSON of the CSV
        packed = gzip.compress(json.dumps(texts).encode(), mtime=0)
        name = re.sub(r"[^\w.-]+", "-", f"{self.template.removesuffix('.html')}-{self.values['title']}")[:60].strip("-")
        saved = {"schema": SCHEMA, "name": name, "packed": base64.b64encode(packed).decode()}
        values = {"plots": self.plots, "sentences": self.sentences, **self.values}
        return render_template(self.template, self.plots, {**self.data, "export": saved}, **values)

    @property
    def tables(self) -> list[Table]:
        """The tables that have rows, in the order of the page's values. One without a title has that of the one before."""
        found: list[Table] = []
        for table in _tables_in([self.values, self.exported]):
            title = table.title or (found[-1].title if found else "")
            found += [replace(table, title=title)] if table.rows else []
        return found

    def records(self) -> list[Record]:
        """Return every number of the page, and its sentences."""
        told = [Record("Page", None, "", "title", None, None, None, self.values["title"])]
        told += [
            Record("Verdict", line, "", "sentence", None, None, None, text) for line, text in enumerate(self.sentences, 1)
        ]
        names = [str(name) for name in self.values.get("routers", self.values.get("attacks", ()))]
        how = (Table(title, ["", "value"], list(group.items())) for title, group in self.values.get("how", {}).items())
        parts: list[Iterable[Record]] = [told, _texts_in(self.exported, "Page"), *(table.records() for table in self.tables)]
        parts += [plot_records(plot, names) for plot in [*self.plots, *_panels(self.data.get("curves", ()), names)]]
        return [record for part in [*parts, *(table.records() for table in how)] for record in part]

    def csv(self) -> str:
        return records_to_csv(self.records())

    def json(self) -> str:
        stored = {"schema": SCHEMA, "records": [record._asdict() for record in self.records()]}
        return json.dumps(stored, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"

    def latex(self) -> str:
        """Return the tables, each as a `table` with its title and its note."""
        return BOOKTABS + "".join(map(_float, self.tables))

    def frame(self) -> Any:
        """Return the records as a pandas frame."""
        return frame_of(self.records())


def _tables_in(value: Any) -> Iterator[Table]:
    if isinstance(value, Table):
        yield value
    elif isinstance(value, Strip):
        yield strip_table("Verdict strip", value)
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tables_in(entry)


def _texts_in(value: Any, part: str, row: str = "") -> Iterator[Record]:
    """Yield the texts of dataclasses, at any depth. The first text of one is the row, its title the part of those inside."""
    if isinstance(value, Table | Strip):
        return
    if isinstance(value, str):
        yield Record(part, None, row, "", Cell.of(value).value, None, None, str(value))
    elif isinstance(value, Mapping | list | tuple):
        for name, entry in value.items() if isinstance(value, Mapping) else (("", entry) for entry in value):
            yield from _texts_in(entry, part, str(name) or row)
    elif is_dataclass(value):
        texts = {name: text for name, text in vars(value).items() if isinstance(text, str) and text}
        label = next(iter(texts.values()), "")
        for name, text in texts.items():
            yield Record(part, None, label, name, Cell.of(text).value, None, None, str(text))
        for name, inside in vars(value).items():
            if not isinstance(inside, str):
                yield from _texts_in(inside, texts.get("title", part), name)


def strip_table(title: str, shown: Strip, note: str = "") -> Table:
    """Return a verdict strip as a table."""

    def cells(at: int) -> Iterator[tuple[str, str]]:
        row = shown.rows[at]
        yield "router", row.label
        for aspect in shown.columns:
            bar = aspect.bars[at]
            yield aspect.title, bar.level
            numbers = (bar.text.value, bar.text.low, bar.text.high) if isinstance(bar.text, Cell) else ()
            yield f"{aspect.title}, difference", Cell(f"{bar.word} {bar.text}".strip(), *numbers)
        for chip in row.chips:
            yield chip.about, Cell(f"{chip.text} {chip.ratio}".strip(), chip.value)

    about = " ".join(f"{aspect.title}: {aspect.about}." for aspect in shown.columns)
    return Table.of(title, (dict(cells(at)) for at in range(len(shown.rows))), f"{note} {about}".strip())


def narrow(table: Table) -> Table:
    """Return the table, turned if it has many columns."""
    return table.turned() if len(table.columns) > max(MOST_COLUMNS, len(table.rows)) else table


def _float(table: Table) -> str:
    note = f"\\par\\smallskip\\footnotesize {to_latex(table.note)}\n" if table.note else ""
    caption = f"\\caption{{{to_latex(table.title)}}}\n"
    return f"\n\\begin{{table}}\n\\centering\n{caption}{narrow(table).to_latex()}{note}\\end{{table}}\n"


def _panels(curves: Iterable[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Plot]:
    """Yield the panels of the curves over training as plots."""
    for measure in curves:
        for panel in measure["panels"]:
            title, data = f"Over training: {measure['name']}, {panel['title']}", []
            for curve in panel["data"]:
                hover = f"{escaped(names[curve['router']])}, step %{{x}}: %{{y:{measure['form']}}}"
                data.append(trace(curve["router"], curve["x"], curve["y"], hovertemplate=hover))
            yield Plot("", title, measure["caption"], data, {"xaxis": axis("step")})


def plot_records(plot: Plot, names: Sequence[str] = ()) -> Iterator[Record]:
    """Yield a record for each point that has a label, with that label as its text; then one for the caption.

    names   of routers, for curves that have no name of their own
    """
    across = _plain(plot.layout.get("xaxis", {}).get("title", {}).get("text", ""))
    by_name = plot.layout.get("yaxis", {}).get("type") == "category"
    found = False
    for line, curve in enumerate(plot.data, 1):
        for row, column, value, low, high, text in _points(curve, across, by_name):
            found = True
            series = row or _series(curve, names)
            yield Record(plot.title, line, series, column, value, low, high, text)
    if found and plot.caption:
        yield Record(plot.title, None, "", "note", None, None, None, plot.caption)


Point = tuple[str, str, float, float | None, float | None, str]


def _points(curve: Trace, across: str, by_name: bool) -> Iterator[Point]:
    """Yield row, column, value, low, high and label of each point; the row is empty if the curve's name is meant."""
    if "%{" not in curve.get("hovertemplate", "") or curve["meta"].keys() & {"fill", "ink"}:  # a picture without numbers
        return
    label = curve["hovertemplate"]
    if curve["type"] == "heatmap":
        values = curve["customdata"] if "customdata" in curve else curve["z"]
        for name, drawn, texts in zip(curve["y"], values, curve["text"], strict=True):
            for x, value, text in zip(curve["x"], drawn, texts, strict=True):
                if value is not None:
                    yield _plain(str(name)), f"{across} {x}".strip(), value, None, None, _plain(text)
        return
    texts = curve.get("text") or [""] * len(curve["x"])
    for at, (x, y, text) in enumerate(zip(curve["x"], curve["y"], texts, strict=True)):
        value = x if by_name else y
        if value is None or isinstance(value, str) or (not by_name and x is None):
            continue
        low, high = _ends(curve.get("error_x" if by_name else "error_y", {}), at, value)
        fields = {"x": x, "y": y, "text": text}
        said = _plain(FIELD.sub(lambda found: format(fields[found[1]], found[2] or ""), label))  # noqa: B023
        place = across if by_name else f"{across} {x if isinstance(x, str) else f'{x:.6g}'}"
        yield _plain(str(y)) if by_name else "", place.strip(), value, low, high, said


def _ends(bars: Mapping[str, Any], at: int, value: float) -> tuple[float | None, float | None]:
    if "array" not in bars:
        return None, None
    above, below = bars["array"], bars.get("arrayminus", bars["array"])
    return value - below[at], value + above[at]


def _series(curve: Trace, names: Sequence[str]) -> str:
    """Return what a curve is called: its name or its router's, and its layer."""
    meta = curve["meta"]
    router = meta.get("router", len(names))
    name = _plain(curve["name"]) if "name" in curve else names[router] if router < len(names) else ""
    layer = meta.get("layer")
    where = "" if layer is None else "all layers" if layer == ALL_LAYERS else f"layer {layer}"
    return ", ".join(filter(None, [name, where]))


def _plain(text: str) -> str:
    """Return a label of plotly as plain text."""
    text = re.sub(r"<extra>.*?</extra>", "", text)
    return html.unescape(re.sub(r"<br>", " ", text)).strip().replace("  ", " ")
