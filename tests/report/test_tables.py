"""Tables: the same cells on the terminal, on a page, in CSV and in LaTeX."""

import csv

import jinja2
import pytest
from report.tags import Tags

from holdfast.cli import common
from holdfast.report.page_shell import PAGE
from holdfast.report.tables import Cell, Table

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
    assert first == rf'ac[k=2], \textless{{}}b\textgreater{{}}"50\%" \& \$x\_1\$ {escaped} & 1.20 &  \\'


def test_a_page_has_every_cell_as_text() -> None:
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True)
    templates.globals |= {"marks": "●◆", "colours": 8}
    macros = templates.get_template("parts.html").module
    page = Tags(str(macros.section(TABLE, routers=True)))  # type: ignore[attr-defined]
    assert NAME in page.text and "A note [of] it." in page.text
    assert [attributes for tag, attributes in page.tags if tag == "tr"][1:] == [{"data-router": "0"}, {"data-router": "1"}]
    assert "b" not in dict(page.tags)
    assert not str(macros.section(Table.of("Empty", []))).strip()  # type: ignore[attr-defined]


def test_a_terminal_has_every_cell_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    common.show(TABLE)
    shown = capsys.readouterr().out
    assert all(line in shown for line in NAME.splitlines()) and "clean, %" in shown and "A note [of] it." in shown


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        ("no difference +1.50 (-3.17 to +6.00)", "+1.50 (-3.17 to +6.00)"),  # with its zeros
        ("no difference 0.00 (-0.51 to +0.50)", "0.00 (-0.51 to +0.50)"),
        ("2.38% (1.90% to 2.83%)", "2.38% (1.90% to 2.83%)"),
        ("1,234.50 (1,200.00 to 1,270.00)", "1,234.50 (1,200.00 to 1,270.00)"),
        ("2.5e-05 (1 to 2)", "0.25 (0.125 to 1.5)"),  # not the end of a number
        ("no difference (95% interval -3 to +6, 3 seeds)", "+0.25 (+0.125 to +1.5)"),
    ],
)
def test_a_brief_cell_has_the_digits_of_its_text(text: str, brief: str) -> None:
    assert Cell(text, 0.25, 0.125, 1.5).brief == brief


def test_a_column_that_is_empty_in_every_row_is_left_out() -> None:
    rows: list[dict[str, object]] = [
        {"router": "", "a": "\u2013", "b": "1", "c": ""},
        {"router": "", "a": "", "b": "\u2013", "c": ""},
    ]
    table = Table.of("Some", rows).without_empty()
    assert list(table.columns) == ["router", "b"] and [list(row) for row in table.rows] == [["", "1"], ["", "\u2013"]]
    assert Table("None", ["a", "b"], []).without_empty().columns == ["a", "b"]
