"""The page of a sweep: a column for each swept key, settings side by side, and a verdict within equal settings."""

from typing import Any

from report.browsing import EVIL
from report.stored import by_column, parse, repeated, stored

from holdfast.report import render
from holdfast.report.comparison_page import verdict
from holdfast.report.comparison_tables import main_table, settings_table
from holdfast.report.plots import plots
from holdfast.train.results import Results


def stored_sweep(
    values: tuple[Any, ...] = (1, 2), seeds: int = 3, routers: tuple[str, ...] = ("smoe", "smooth")
) -> dict[str, Any]:
    """Rows and cells of each setting as of a comparison without a sweep; in the second, `smooth` is no different."""
    content = repeated(stored(routers, seeds), [{"sparse.k": value, "training.steps": 12} for value in values])
    low, high = (-1.0, 9.0) if seeds > 1 else (None, None)
    for row in content["rows"][2 * len(routers) - 1 :: len(routers)] if len(routers) > 1 else ():
        row["clean"] += 7
        row["clean_difference"] |= {"mean": 3.9, "low": low, "high": high}
    return content


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
    assert settings_table(parse(stored())).rows == [] and "Settings side by side" in render(results)
    (plot,) = [plot for plot in plots(results) if plot.name == "clean-attacked"]
    assert {trace["meta"]["router"] for trace in plot.data} == {0, 1, 2, 3}


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


def test_texts_are_escaped() -> None:
    page = render(page_of(values=(EVIL, "b")))
    assert EVIL not in page and "&lt;img src=x" in page
