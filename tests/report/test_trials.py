"""Every attack in a table and a plot, and consistency under noise."""

from typing import Any

import pytest
from report.stored import by_column, parse, stored

from holdfast.report import render
from holdfast.report.comparison_tables import attacks_table
from holdfast.report.plot_data import Plot
from holdfast.report.plots import consistency, every_attack


def test_the_table_has_a_mean_over_seeds_for_each_router_and_attack() -> None:
    table = attacks_table(parse(stored()))
    assert table.columns == ["router", "words", "typos"]
    assert table.rows == [["smoe", "192.25", "212.50"], ["smooth", "191.25", "211.50"], ["ac", "190.25", "210.50"]]


def test_the_plot_has_the_means_and_the_single_seeds() -> None:
    traces = [trace for trace in every_attack(parse(stored())).data if trace["meta"]["router"] == 1]
    *seeds, means = traces
    assert [trace["x"] for trace in seeds] == [[190.25, 191.25, 192.25], [209.5, 211.5, 213.5]]
    assert [trace["y"] for trace in seeds] == [["words"] * 3, ["typos"] * 3]
    assert (means["x"], means["y"]) == ([191.25, 211.5], ["words", "typos"])
    assert means["marker"]["size"] > seeds[0]["marker"]["size"]


def test_an_attack_that_a_router_was_spared_is_a_dash_and_no_mark() -> None:
    content = stored()
    for cell in content["cells"]:
        if cell["router"] == "smooth":
            del cell["trials"]["words"]
    results = parse(content)
    assert attacks_table(results).rows[1] == ["smooth", "\u2013", "211.50"]
    assert {name for trace in every_attack(results).data if trace["meta"]["router"] == 1 for name in trace["y"]} == {"typos"}


def test_a_seed_that_broke_is_left_out_of_the_mean() -> None:
    content = stored(["smoe"])
    content["cells"][0]["trials"]["words"]["figure"] = float("nan")
    assert by_column(attacks_table(parse(content)))[0]["words"] == "192.75"


@pytest.mark.parametrize("name", ["router", "items", "<b>PGD</b> 100%"])
def test_an_attack_may_have_any_name(name: str) -> None:
    content = stored(["smoe"], seeds=1)
    content["cells"][0]["trials"] = {name: {"figure": 12.345}}
    page = render(parse(content))
    assert "12.35" in page or "12.34" in page
    assert "<b>PGD" not in page


def test_without_trials_there_is_nothing() -> None:
    content = stored()
    for cell in content["cells"]:
        del cell["trials"]
    results = parse(content)
    assert attacks_table(results).rows == [] and every_attack(results).data == []


def test_the_cost_on_untouched_words_stands_beside_a_figure() -> None:
    content = stored()
    for cell in content["cells"]:
        cell["trials"]["typos"]["cost"] = {"mean": 0.01}
    assert by_column(attacks_table(parse(content)))[0]["typos, cost on untouched words"] == "+1.01%"


def curve(plot: Plot, meta: dict[str, Any]) -> dict[str, Any]:
    (found,) = [trace for trace in plot.data if trace["meta"] == meta]
    return found


def test_consistency_has_a_mean_for_each_layer_and_the_range_of_the_seeds() -> None:
    plot = consistency(parse(stored()))
    found = curve(plot, {"router": 1})
    assert found["x"] == [0, 1]  # the middle one of three
    assert found["y"] == pytest.approx([89 + 2 / 3, 79 + 2 / 3])
    assert found["error_y"]["array"] == pytest.approx([7 / 3, 7 / 3])
    assert found["error_y"]["arrayminus"] == pytest.approx([5 / 3, 5 / 3])
    assert "5%" in plot.caption
