"""Tables: the same cells on the terminal, on a page, in CSV and in LaTeX."""

import csv

import jinja2
import pytest
from report.tags import Tags

from holdfast.cli import common
from holdfast.report.page_shell import PAGE
from holdfast.report.tables import Table

NAME = 'ac[k=2],\n<b>"50%" & $x_1$ ~ ^ \\ # {}'
TABLE = Table.of("Results", [{"router": NAME, "clean, %": "1.20"}, {"router": "smoe", "attacked": "+3"}], "A note [of] it.")


def test_a_table_has_the_columns_of_all_rows() -> None:
    assert TABLE.columns == ["router", "clean, %", "attacked"]
    assert TABLE.rows == [[NAME, "1.20", ""], ["smoe", "", "+3"]]
    assert TABLE.without("clean, %").rows == [[NAME, ""], ["smoe", "+3"]]
    turned = TABLE.turned()
    assert (turned.columns, turned.rows[1]) == (("router", NAME, "smoe"), ("attacked", "", "+3"))


def test_csv_is_read_back_as_it_was() -> None:
    assert list(csv.reader(TABLE.to_csv().splitlines(keepends=True))) == [TABLE.columns, *TABLE.rows]


def test_latex_is_escaped() -> None:
    head, first = TABLE.to_latex().splitlines()[2:5:2]
    assert head == r"router & clean, \% & attacked \\"
    escaped = r"\textasciitilde{} \textasciicircum{} \textbackslash{} \# \{\}"
    assert first == rf'ac[k=2], <b>"50\%" \& \$x\_1\$ {escaped} & 1.20 &  \\'


def test_a_page_has_every_cell_as_text() -> None:
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True)
    macros = templates.get_template("parts.html").module
    page = Tags(str(macros.section(TABLE, marks="●◆", colours=8)))  # type: ignore[attr-defined]
    assert NAME in page.text and "A note [of] it." in page.text
    assert [attributes for tag, attributes in page.tags if tag == "tr"][1:] == [{"data-router": "0"}, {"data-router": "1"}]
    assert "b" not in dict(page.tags)
    assert not str(macros.section(Table.of("Empty", []))).strip()  # type: ignore[attr-defined]


def test_a_terminal_has_every_cell_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    common.show(TABLE)
    shown = capsys.readouterr().out
    assert all(line in shown for line in NAME.splitlines()) and "clean, %" in shown and "A note [of] it." in shown
