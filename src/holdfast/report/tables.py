"""`Table`: every table of a report, made once and shown on the terminal and on pages, or written as CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


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
        return cls(title, columns, [[str(row.get(column, "")) for column in columns] for row in rows], note)

    def without(self, *columns: str) -> Table:
        """Return the table without these columns."""
        kept = [place for place, column in enumerate(self.columns) if column not in columns]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)

    def turned(self) -> Table:
        """Return the table with columns as rows, for many columns and few rows."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return replace(self, columns=columns, rows=rows)

    def to_csv(self) -> str:
        """Return the columns and rows as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def to_latex(self) -> str:
        """Return a `tabular` with the rules of the LaTeX package booktabs; title and note are left to the document."""
        lines = []
        for row in (self.columns, *self.rows):
            cells = (re.sub(r"[\\~^&%$#_{}]", lambda found: LATEX[found[0]], cell) for cell in row)
            lines.append(" & ".join(" ".join(cell.split()) for cell in cells) + r" \\")
        start = f"\\begin{{tabular}}{{{'l' * len(self.columns)}}}"
        return "\n".join([start, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])
