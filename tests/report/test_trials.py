"""Every attack, in a table and a plot."""

import pytest
from report.stored import stored, stored_once

from holdfast.report.plot_data import every_attack, every_attack_table
from holdfast.report.stored_comparison import parse


def test_the_table_has_a_mean_over_seeds_for_each_router_and_attack() -> None:
    assert list(every_attack_table(parse(stored()))) == [
        {"words": "192.25", "typos": "212.50"},
        {"words": "191.25", "typos": "211.50"},
        {"words": "190.25", "typos": "210.50"},
    ]


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
    assert list(every_attack_table(results))[1] == {"words": "\u2013", "typos": "211.50"}
    assert {name for trace in every_attack(results).data if trace["meta"]["router"] == 1 for name in trace["y"]} == {"typos"}


def test_a_seed_that_broke_is_left_out_of_the_mean() -> None:
    content = stored(["smoe"])
    content["cells"][0]["trials"]["words"]["figure"] = float("nan")
    assert next(every_attack_table(parse(content)))["words"] == "192.75"


@pytest.mark.parametrize("name", ["router", "items", "<b>PGD</b> 100%"])
def test_an_attack_may_have_any_name(name: str) -> None:
    from holdfast.report import render

    content = stored(["smoe"], seeds=1)
    content["cells"][0]["trials"] = {name: {"figure": 12.345}}
    page = render(parse(content))
    assert "12.35" in page or "12.34" in page
    assert "<b>PGD" not in page


def test_without_trials_there_is_nothing() -> None:
    results = parse(stored_once())
    assert list(every_attack_table(results)) == [] and every_attack(results).data == []


def test_the_cost_on_untouched_words_stands_beside_a_figure() -> None:
    content = stored()
    for cell in content["cells"]:
        cell["trials"]["typos"]["cost"] = {"mean": 0.01, "low": None, "high": None, "words": ""}
    assert next(every_attack_table(parse(content)))["typos, cost on untouched words"] == "+1.01%"
