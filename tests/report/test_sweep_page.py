"""The page of a sweep: a column for each swept key, settings side by side, and a verdict within equal settings."""

import copy
from pathlib import Path
from typing import Any

import pytest
from report.browsing import check_page
from report.stored import by_column, parse, stored

from holdfast.report import write_report
from holdfast.report.comparison_page import render, verdict
from holdfast.report.comparison_tables import main_table, settings_table
from holdfast.train.results import Results

EVIL = '<img src=x onerror="alert(1)">'


def stored_sweep(
    values: tuple[Any, ...] = (1, 2), seeds: int = 3, routers: tuple[str, ...] = ("smoe", "smooth")
) -> dict[str, Any]:
    """Rows and cells of each setting as of a comparison without a sweep; in the second, `smooth` is no different."""
    content = stored(routers, seeds)
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for place, value in enumerate(values):
        for own, given in ((rows, content["rows"]), (cells, content["cells"])):
            for one in copy.deepcopy(given):
                own.append({**one, "settings": {"sparse.k": value, "training.steps": 12}})
        if place and len(routers) > 1:
            rows[-1]["clean"] += 7
            low, high = (-1.0, 9.0) if seeds > 1 else (None, None)
            rows[-1]["clean_difference"] = {**rows[-1]["clean_difference"], "mean": 3.9, "low": low, "high": high}
    return {**content, "rows": rows, "cells": cells}


def page_of(**given: Any) -> Results:
    return parse(stored_sweep(**given))


def test_the_table_has_a_column_for_each_key_and_a_baseline_in_each_setting() -> None:
    rows = by_column(main_table(page_of()))
    assert [row["sparse.k"] for row in rows] == ["1", "1", "2", "2"] and {row["training.steps"] for row in rows} == {"12"}
    assert [row["clean, difference"] == "baseline" for row in rows] == [True, False, True, False]
    assert list(rows[0])[:3] == ["router", "sparse.k", "training.steps"]
    assert "sparse.k" not in main_table(parse(stored())).columns


def test_settings_are_side_by_side() -> None:
    results = page_of()
    rows = by_column(settings_table(results))
    assert [row["setting"] for row in rows] == ["k=1, steps=12", "k=2, steps=12"]
    assert [row["smooth, clean"] for row in rows] == [f"{row.clean:.2f}" for row in results.rows if row.router == "smooth"]
    assert rows[0]["smooth, clean"] != rows[1]["smooth, clean"]
    assert settings_table(parse(stored())).rows == []


def test_a_router_that_misses_a_setting_has_a_dash_there() -> None:
    content = stored_sweep()
    del content["rows"][3]
    assert by_column(settings_table(parse(content)))[1]["smooth, clean"] == "\u2013"


def test_keys_with_the_same_last_part_are_shown_whole() -> None:
    content = stored_sweep()
    for one in (*content["rows"], *content["cells"]):
        one["settings"] = {"sparse.k": one["settings"]["sparse.k"], "model.config.k": 3}
    assert parse(content).rows[0].label == "smoe, sparse.k=1, model.config.k=3"


def test_the_verdict_counts_settings_in_which_a_router_differs() -> None:
    told = " ".join(verdict(page_of()))
    assert "2 settings of sparse.k and training.steps were trained" in told
    clean = "smooth lowered the perplexity in 1 and made no difference that its seeds can show in 1 of 2 settings"
    assert f"On clean data, against smoe: {clean}." in told
    assert "Under attack, against smoe: smooth lowered the perplexity in 2 of 2 settings" in told
    assert "about 0.2 of these 4 intervals would miss 0 by chance" in told
    assert "The lowest clean perplexity, 181.38, has smooth, k=1, steps=12." in told


def test_one_seed_or_one_router_shows_no_difference() -> None:
    assert "Fewer than 3 seeds cannot show whether a router differs from smoe" in " ".join(verdict(page_of(seeds=1)))
    assert "no other router to compare it with" in " ".join(verdict(page_of(routers=("smoe",))))


def test_cells_belong_to_the_row_of_their_setting() -> None:
    results = page_of()
    for row in results.rows:
        cells = results.cells_of(row)
        assert len(cells) == 3 and all((cell.router, cell.settings) == (row.router, row.settings) for cell in cells)


def test_values_are_escaped() -> None:
    page = render(page_of(values=(EVIL, "b")))
    assert EVIL not in page and "&lt;img src=x" in page


@pytest.mark.slow  # starts a browser
def test_it_is_drawn_and_fits(screen: Any, tmp_path: Path) -> None:
    page = write_report(page_of(values=(EVIL, 2, 3)), tmp_path / "sweep.html")
    check_page(screen, page, ".plot .main-svg", "training")
    drawn = "return document.getElementById('plot-clean-attacked')._fullData.map((trace) => trace.meta.router)"
    assert set(screen.execute_script(drawn)) == set(range(6))
    assert len(screen.find_elements("css selector", ".chip")) == 6
    headings = [heading.text for heading in screen.find_elements("css selector", "h2")]
    assert "Settings side by side" in headings
    screen.find_element("css selector", ".chip[data-router='1']").click()
    visible = drawn.replace(".map(", ".filter((trace) => trace.visible === true).map(")
    assert set(screen.execute_script(visible)) == {0, 2, 3, 4, 5}
