"""Exports: every number of a page is in its CSV, with all digits; LaTeX, JSON, frames, print and notebooks show the same."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from report.browsing import EVIL
from report.stored import parse, stored
from report.tags import Tags
from report.test_every_page import of_every_kind
from report.test_every_page import read as report_of

import holdfast
from holdfast.report.export import Page
from holdfast.report.plot_data import Plot, names_axis, trace
from holdfast.report.svg import first_screen_svgs, has_svg, nice_ticks, plot_svg
from holdfast.report.tables import Cell, Record, Table
from holdfast.stored import late

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
TEX = next(filter(None, map(shutil.which, ("pdflatex", "xelatex", "lualatex", "tectonic"))), None)


def page_of(kind: str) -> Page:
    report = report_of(kind)
    page: Page = late(report.page)(report)
    return page


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@of_every_kind
def test_every_number_of_a_page_is_in_its_csv(kind: str) -> None:
    page = page_of(kind)
    shown, rows = page.html(), read(page.csv())
    tags, texts = Tags(shown), Tags(shown.replace("</", " </"))  # texts of neighbours are not one number
    known = {found for row in rows for field in row.values() for found in NUMBER.findall(field)}
    explained = NUMBER.findall(str(page.values.get("meaning", "")))  # how to read the numbers
    assert set(NUMBER.findall(texts.text)) <= known.union(explained)
    values = {float(row["value"]) for row in rows if row["value"]}
    for plot in json.loads(tags.scripts[1])["plots"].values():
        by_name = plot["layout"]["yaxis"].get("type") == "category"
        for curve in plot["data"]:
            if "%{y" in curve.get("hovertemplate", "") and curve["type"] == "scatter":
                drawn = [number for number in curve["x" if by_name else "y"] if number is not None]
                assert {float(f"{number:.12g}") for number in drawn} <= values, plot["title"]


def test_a_number_of_a_table_has_all_digits_and_its_interval() -> None:
    content = stored()
    content["rows"][1]["clean"] = 181.123456789
    content["rows"][1]["clean_difference"] |= {"mean": -3.123456789, "low": -4.987654321}
    rows = parse(content)
    page = late(rows.page)(rows)
    found = {(row["row"], row["column"]): row for row in read(page.csv()) if row["part"] == "Results"}
    clean, difference = found["smooth", "clean perplexity"], found["smooth", "clean, difference"]
    assert (clean["value"], clean["text"]) == ("181.123456789", "181.12")
    assert [difference[name] for name in ("value", "low", "high")] == ["-3.123456789", "-4.987654321", "-1.625"]
    assert difference["text"].startswith("-3.123 (95% interval -4.988 to -1.625")


def test_rows_with_the_same_name_have_their_own_lines() -> None:
    table = Table.of("T", [{"router": "smoe", "k": "1", "clean": "3.50"}, {"router": "smoe", "k": "2", "clean": ""}], "N.")
    assert list(table.records()) == [
        Record("T", 1, "smoe", "k", 1.0, None, None, "1"),
        Record("T", 1, "smoe", "clean", 3.5, None, None, "3.50"),
        Record("T", 2, "smoe", "k", 2.0, None, None, "2"),
        Record("T", None, "", "note", None, None, None, "N."),
    ]


def test_a_pair_of_numbers_is_two_records() -> None:
    table = Table.of("T", [{"what": "loss", "flips": Cell("5% → ?", pair=(5.0, None))}])
    assert [(record.column, record.value) for record in table.records()] == [("flips, before", 5.0), ("flips, after", None)]


def test_only_a_text_that_is_a_number_has_a_value() -> None:
    texts = ["1,234", "-0.5%", "1e-05", "2 of 4", "1,23", "", "nan", "inf", "?"]
    assert [Cell.of(text).value for text in texts] == [1234.0, -0.5, 1e-05, None, None, None, None, None, None]


@of_every_kind
def test_json_and_frame_have_the_records_of_the_csv(kind: str) -> None:
    page = page_of(kind)
    content = json.loads(page.json())
    assert content["schema"] == 1 and [Record(**record) for record in content["records"]] == page.records()
    rows = [list(row.values()) for row in read(page.csv())]
    shown = [
        ["" if one is None else f"{one:.12g}" if isinstance(one, float) else str(one) for one in r] for r in page.records()
    ]
    assert rows == shown
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = report_of(kind).frame()
    assert list(frame.columns) == list(Record._fields) and len(frame) == len(rows)
    assert frame["value"].dtype == float
    assert math.isclose(frame["value"].sum(), sum(float(row[4] or 0) for row in rows), rel_tol=1e-9)


@of_every_kind
def test_a_report_prints_as_a_short_table_and_is_one_in_a_notebook(kind: str) -> None:
    report = report_of(kind)
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert len(lines) < 25 and set(lines[2]) == {"-"}
    page = Tags(report._repr_html_())
    assert [tag for tag, _ in page.tags].count("table") == 1
    assert "script" not in dict(page.tags) and all(not attributes for _, attributes in page.tags)


def test_texts_in_a_notebook_are_text() -> None:
    content = stored(("smoe", EVIL))
    assert "img" not in dict(Tags(parse(content)._repr_html_()).tags)


def test_a_routing_prints_its_first_tokens() -> None:
    router = holdfast.create_router("top-p", dim=8, experts=4, p=0.5)
    routing = router(torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0)))
    title, head, rule, *rows = str(routing).splitlines()
    assert title == "Routing: 20 tokens, 4 experts, 4 slots" and head.split() == ["token", "experts", "weights"]
    assert len(rows) == 8 and set(rule) == {"-"}
    first = [str(expert) for expert in routing.experts[0].tolist() if expert < 4]
    assert rows[0].replace(",", "").split()[: 1 + len(first)] == ["0", *first]
    assert "20 tokens" in routing._repr_html_() and "experts per token" in routing._repr_html_()
    assert "0 slots" not in str(routing.map_tokens(lambda rows: rows[:0]))


HARD = ["[x]", "*", "a--b", "-1.5", "x-1", "50%", "a_b & {c} # $d ^ ~ \\", "<b>|", "?`", "中 é\n\t…→\u2013", '"q"', ""]


def test_latex_of_any_text_is_on_one_line_and_only_ascii() -> None:
    text = Table("T", ["a", *HARD], [[one, *HARD] for one in HARD]).to_latex()
    assert text.isascii() and text.count("\n") == len(HARD) + 6
    rows = text.splitlines()[4:-2]
    assert rows[0].startswith("{}[x] & ") and rows[1].startswith("{}* & ") and rows[2].startswith("a-{}-b")
    assert rows[3].startswith("$-$1.5") and rows[4].startswith("x-1") and rows[8].startswith("?{`}")
    assert rows[9].startswith(r"U+4E2D U+00E9 \ldots{}$\rightarrow$\textendash{}")
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == len(HARD) and row.endswith(r" \\")


@pytest.mark.skipif(TEX is None, reason="no TeX is installed")
@of_every_kind
def test_latex_compiles(kind: str, tmp_path: Path) -> None:
    hard = Table(str(HARD), ["a", *HARD], [[one, *HARD] for one in HARD], str(HARD))
    page = page_of(kind)
    page.values["hard"] = hard
    start = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "page.tex").write_text(f"{start}{page.latex()}\\end{{document}}\n", encoding="utf-8")
    options = [] if "tectonic" in str(TEX) else ["-interaction=nonstopmode", "-halt-on-error"]
    done = subprocess.run([str(TEX), *options, "page.tex"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def test_an_svg_has_every_row_mark_and_interval() -> None:
    page = page_of("costs")
    plot = next(plot for plot in page.plots if plot.name == "differences")
    picture = plot_svg(plot)
    tags = Tags(picture)
    drawn = [tag for tag, _ in tags.tags]
    assert has_svg(plot) and drawn.count("polygon") == 6 and tags.text.count("attacked") == 3
    assert picture.count("m0 -4v8") == 6  # the ends of intervals
    assert "://" not in picture.replace("http://www.w3.org/2000/svg", "") and "script" not in drawn


def test_marks_of_an_svg_are_where_the_axis_says() -> None:
    """The first and the last tick are at the ends, so that a value in the middle is in the middle."""
    marks = trace(0, [0.0, 10.0, 5.0], ["a<br>b", EVIL, "c"], mode="markers", marker={"symbol": "circle"})
    picture = plot_svg(Plot("p", "T", "", [marks], {"yaxis": names_axis(), "xaxis": {}}))
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', picture)]
    assert places[2] == pytest.approx((places[0] + places[1]) / 2, abs=0.1)
    ticks = dict(re.findall(r'<text x="([\d.]+)"[^>]*class="mid">([\d.]+)<', picture))
    assert ticks[f"{places[0]:.1f}"] == "0" and ticks[f"{places[1]:.1f}"] == "10"
    assert "<img" not in picture


def test_the_dots_and_bars_of_first_screens_have_an_svg() -> None:
    audit = dict(first_screen_svgs(page_of("audit").exported))
    assert list(audit) == ["Predictions that change", "Output change by flips"]
    dots = Tags(audit["Output change by flips"])
    assert [tag for tag, _ in dots.tags].count("circle") == 2 and "6.2% → 0.30%" in dots.text
    bars = dict(first_screen_svgs(page_of("mismatch").exported)).values()
    assert [picture.count("<rect") for picture in bars] == [2, 3]
    assert not dict(first_screen_svgs(page_of("geometry").exported))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (-3.1, 0.2, [-4, -3, -2, -1, 0, 1]),
        (5, 5, [0, 2, 4, 6, 8, 10]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)
