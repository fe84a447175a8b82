"""`Table`: every table of a report, made once and shown on the terminal, on pages and in notebooks, or written as a file.

A cell is a text. A `Cell` also has the number that the text shows, with all its digits, and its interval. `Table.records`
returns one record for each cell, in the flat schema that CSV, JSON and pandas frames share (docs/exporting.md).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple, Self

BOOKTABS = "% The tables need \\usepackage{booktabs}.\n"
BEFORE_AND_AFTER = "before \u2192 after"  # the heading of a column of pairs, if they are the only ones
WITH_INTERVAL = re.compile(r"(?<![\w.,+-])[+-]?[\d.,]+%? \([+-]?[\d.,]+%? to [+-]?[\d.,]+%?\)")  # as a cell may have it
EMPTY = "", "\u2013"  # cells without content
PLAIN_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][+-]?\d+)?%?")
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "`": "{`}",  # after ? or ! it would be part of another letter
    "\u2013": r"\textendash{}",
    "\u2014": r"\textemdash{}",
    "\u2018": r"\textquoteleft{}",
    "\u2019": r"\textquoteright{}",
    "\u201c": r"\textquotedblleft{}",
    "\u201d": r"\textquotedblright{}",
    "\u2026": r"\ldots{}",
    "\u2192": r"$\rightarrow$",
    "\u2212": "$-$",
    "\u2264": r"$\leq$",
    "\u2265": r"$\geq$",
    "\u00d7": r"$\times$",
    "\u00b1": r"$\pm$",
    "\u00b7": r"$\cdot$",
    "\u2205": r"$\emptyset$",
}


Known = float | None  # None: there is no such number


class Cell(str):
    """A text with the number that it shows, in the unit of the text, and its interval, or with two: before and after."""

    value: Known
    low: Known
    high: Known
    pair: tuple[Known, Known] | None  # the numbers before and after; then there is no `value`

    def __new__(
        cls, text: str, value: Known = None, low: Known = None, high: Known = None, pair: tuple[Known, Known] | None = None
    ) -> Self:
        cell = super().__new__(cls, text)
        cell.value, cell.low, cell.high, cell.pair = value, low, high, pair
        return cell

    @property
    def brief(self) -> str:
        """The number with its interval, without further words; the text if it has none."""
        if self.value is None or self.low is None or self.high is None:
            return str(self)
        if written := WITH_INTERVAL.search(self):
            return written[0]
        form = "+.4g" if "+" in self else ".4g"
        unit = "%" if re.match(r"[+-]?[\d.,]+%", self) else ""
        return f"{self.value:{form}}{unit} ({self.low:{form}} to {self.high:{form}})"

    @classmethod
    def of(cls, content: object) -> Cell:
        """Return a cell; a plain text that is a number and nothing else has that value."""
        if isinstance(content, Cell):
            return content
        text = str(content)
        value = float(text.rstrip("%").replace(",", "")) if PLAIN_NUMBER.fullmatch(text) else None
        return cls(text, value)


class Record(NamedTuple):
    """A cell of a table, or a point of a plot: a line of the flat schema."""

    part: str  # the title of the table or plot
    line: int | None  # the number of the row in its table, or of the curve in its plot, from 1
    row: str  # the first cell of that row, or the name of that curve
    column: str  # the heading, or the place on the x axis
    value: Known  # the number, with all stored digits, in the unit of `text`
    low: Known  # the ends of its 95% interval
    high: Known
    text: str  # what a reader sees


def records_to_csv(records: Iterable[Record]) -> str:
    """Return the records as CSV, with their names in the first line."""
    lines = ([f"{one:.12g}" if isinstance(one, float) else one for one in record] for record in records)
    return _csv([Record._fields, *lines])


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


@dataclass(frozen=True)
class Table:
    """A table of texts. The first column has the names of its rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # what a reader must know about its numbers

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, object]], note: str = "") -> Table:
        """Return a table of rows by column. It has the columns of all rows; a cell that a row lacks is empty."""
        rows = list(rows)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        return cls(title, columns, [[Cell.of(row.get(column, "")) for column in columns] for row in rows], note)

    def without_empty(self) -> Table:
        """Return the table without the columns, but the first, that have a dash or nothing in every row."""
        empty = [name for place, name in enumerate(self.columns) if place and all(row[place] in EMPTY for row in self.rows)]
        return self.without(*empty) if self.rows else self

    def without(self, *columns: str) -> Table:
        """Return the table without these columns."""
        kept = [place for place, column in enumerate(self.columns) if column not in columns]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)

    def turned(self) -> Table:
        """Return the table with columns as rows, for many columns and few rows."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return replace(self, columns=columns, rows=rows)

    def records(self) -> Iterator[Record]:
        """Yield a record for each cell, row by row, without empty ones; then one for the note."""
        for line, (name, *cells) in enumerate(self.rows, 1):
            for column, cell in zip(self.columns[1:], map(Cell.of, cells), strict=True):
                parts = {column: cell.value}
                if cell.pair is not None:
                    what = f"{column}, " if column != BEFORE_AND_AFTER else ""
                    parts = {f"{what}before": cell.pair[0], f"{what}after": cell.pair[1]}
                for heading, value in parts.items() if cell else ():
                    yield Record(self.title, line, str(name), heading, value, cell.low, cell.high, str(cell))
        if self.note:
            yield Record(self.title, None, "", "note", None, None, None, self.note)

    def to_csv(self) -> str:
        """Return the columns and rows as CSV."""
        return _csv([self.columns, *self.rows])

    def to_latex(self) -> str:
        """Return a `tabular` with the rules of the LaTeX package booktabs; title and note are left to the document."""
        rows = [[Cell.of(cell).brief for cell in row] for row in self.rows]
        lines = [" & ".join(map(to_latex, row)) + r" \\" for row in (self.columns, *rows)]
        aligned = "l" + "".join("r" if self._has_numbers(place) else "l" for place in range(1, len(self.columns)))
        start = f"\\begin{{tabular}}{{{aligned}}}"
        return "\n".join([start, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])

    def _has_numbers(self, place: int) -> bool:
        """Whether the cells of a column are numbers, so that they are aligned on the right."""
        return any(PLAIN_NUMBER.fullmatch(row[place]) for row in self.rows)

    def __str__(self) -> str:
        """The table as aligned text."""
        lines = [[" ".join(Cell.of(cell).brief.split()) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = [place > 0 and self._has_numbers(place) for place in range(len(widths))]
        forms = [f"{{:{'>' if end else '<'}{width}}}" for width, end in zip(widths, right, strict=True)]
        head, *body = ("  ".join(forms).format(*line).rstrip() for line in lines)
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([*filter(None, [self.title]), head, rule, *body])

    def _repr_html_(self) -> str:
        """The table for a notebook; everything in it is escaped."""

        def cells(row: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        note = f"<p><small>{escape(self.note)}</small></p>" if self.note else ""
        body = "".join(cells(row, "td") for row in self.rows)
        return f"<table>{caption}<thead>{cells(self.columns, 'th')}</thead><tbody>{body}</tbody></table>{note}"


def to_latex(text: str) -> str:
    """Return a text as LaTeX shows it literally, on one line. A letter that pdfLaTeX may not have is written as U+4E2D."""
    words = " ".join(text.split())
    start = "{}" if words[:1] in ("[", "*") else ""  # else they could belong to the command that ends the row before
    written = re.sub("-(?=-)", "-{}", "".join(map(_letter, words)))  # two would be a dash
    return start + re.sub(r"(?<![\w.})])-(?=[\d.])", "$-$", written)  # the minus of a number


def _letter(letter: str) -> str:
    if letter in LATEX:
        return LATEX[letter]
    return letter if letter.isascii() and letter.isprintable() else f"U+{ord(letter):04X}"


def frame_of(records: Iterable[Record]) -> Any:
    """Return the records as a pandas frame."""
    try:
        import pandas
    except ImportError:
        raise ImportError("a frame needs pandas: `pip install pandas`.") from None
    return pandas.DataFrame(list(records), columns=list(Record._fields))
