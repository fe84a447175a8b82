"""Two sentences, and no more in them than the figures hold."""

import re
from typing import Any

import pytest
from report.stored import by_column, difference, parse, stored, stored_costs, stored_images
from wording import mentions

from holdfast.report import render
from holdfast.report.comparison_page import verdict
from holdfast.report.comparison_tables import main_table
from holdfast.report.page_shell import listed
from holdfast.report.plots import differences


def test_a_change_is_said_with_its_interval_and_its_price() -> None:
    clean, attacked = verdict(parse(stored()))
    change = ("smooth lowered", "3.12", "95%", "1.62 to 4.62")
    assert mentions(clean, "smoe", *change, "2.40", "2.00", "ac ", "no difference", "3 seeds")
    assert mentions(attacked, "attack", *change, "ac ", "no difference", "3 seeds") and "2.40" not in attacked


def test_the_cost_of_the_attack_on_untouched_words_is_said() -> None:
    clean, _, cost, change = verdict(parse(stored_costs()))
    assert mentions(clean, "2.40", "2.00", "no difference", "smoe, top 3;")
    assert mentions(cost, "every router", "2.00% to 2.30%", "no 95%")
    assert mentions(change, "No router", "smoe") and "smooth" not in change


def with_shifts(**differences: tuple[float, float]) -> dict[str, Any]:
    """Return a comparison with two shifted test sets; the differences of the second router are given by test."""
    content = stored_images()
    measures = {"drawings": ("error, %", "lower"), "others": ("AUPR, %", "higher")}
    for place, row in enumerate(content["rows"]):
        row["shifts"] = {name: {"measure": one, "better": better, "figure": 5.0} for name, (one, better) in measures.items()}
        for name, shift in row["shifts"].items() if place else ():
            shift["difference"] = difference(*(differences.get(name, (0.1, 1.1)) if place == 1 else (0.1, 1.1)))
    return content


def test_differences_on_shifted_test_sets_are_said() -> None:
    told = verdict(parse(with_shifts(drawings=(-2.0, 1.0), others=(4.0, 1.5))))
    assert len(told) == 3
    assert mentions(told[-1], "drawings and others", "smooth lowered the error on drawings by 2 percentage points", "1 to 3")
    assert mentions(told[-1], "smooth raised the AUPR on others by 4 percentage points", "2.5 to 5.5", "no other difference")
    assert "no router made a difference to smoe" in verdict(parse(with_shifts()))[-1]


def test_one_seed_says_nothing_about_shifted_test_sets() -> None:
    content = with_shifts()
    for row in content["rows"]:
        for shift in row["shifts"].values():
            shift.get("difference", {}).update(low=None, high=None)
    assert len(verdict(parse(content))) == 2


def test_a_cost_that_cannot_be_shown_is_said_too() -> None:
    content = stored_costs()
    content["rows"][2]["cost"]["low"] = -0.001
    content["rows"][1]["cost_difference"] = difference(-0.004, 0.002)
    content["rows"][1]["equal_compute"]["difference"] = difference(-1.5, 0.5)
    clean, _, cost, unseen, change = verdict(parse(content))
    assert mentions(clean, "2.00", "1.5 better", "smoe, top 3;")
    assert "smoe 2.00%, smooth 2.10% and smoe, top 3 2.30%" in cost
    assert mentions(unseen, "ac ", "no 95%") and "smooth" not in unseen
    assert mentions(change, "smooth", "lowered", "0.4 points", "95%", "0.2 to 0.6")
    assert mentions(verdict(parse(stored_costs(["smoe"])))[-1], "smoe 2.00%", "95%")
    assert not any("2.00%" in sentence for sentence in verdict(parse(stored_costs(["smoe"], seeds=2))))  # no claim


def test_a_router_that_is_worse_is_called_so() -> None:
    content = stored(["smoe", "smooth"])
    content["rows"][1]["clean_difference"] = difference(2.0, 1.0)
    assert mentions(verdict(parse(content))[0], "smooth raised", " 2 ", "95%", "1 to 3")


def test_an_interval_that_touches_0_is_no_difference() -> None:
    content = stored(["smoe", "smooth"])
    content["rows"][1]["clean_difference"] = difference(-2.0, 2.0)
    assert mentions(verdict(parse(content))[0], "smoe", "smooth", "2.40", "2.00", "no difference", "3 seeds")


@pytest.mark.parametrize("seeds", [1, 2])
def test_from_fewer_than_three_seeds_nothing_can_be_said(seeds: int) -> None:
    first, second = verdict(parse(stored(seeds=seeds)))
    assert "Fewer than 3 seeds" in first and "these models only" in second
    assert not re.search(r"lowered|raised|no difference|\d\.\d", first + second)


def test_what_could_have_been_shown_is_said() -> None:
    assert "ac made no difference that 3 seeds can show (they would show one above 1.5)" in verdict(parse(stored()))[0]
    error = verdict(parse(stored_images()))[0]
    assert "they would show one above 1.5 percentage points" in error


def test_a_router_that_sees_later_tokens_is_not_ranked() -> None:
    content = stored(["smoe", "ac", "capacity"])
    row = content["rows"][2] | {"apart": "sees later tokens"}
    del row["clean_difference"], row["attacked_difference"]
    content["rows"][2] = row
    told = verdict(parse(content))
    assert len(told) == 3 and not any("capacity" in sentence for sentence in told[:2])
    assert told[2] == "capacity sees later tokens, so its perplexity is not compared with that of the others."
    assert by_column(main_table(parse(content)))[2]["clean, difference"] == "sees later tokens"
    page = render(parse(content))
    assert "capacity (sees later tokens)" in page
    content["rows"] = [row, *content["rows"][:2]]
    assert mentions(" ".join(verdict(parse(content))), "capacity, the baseline, sees later tokens", "Name another router")


def test_correlations_are_better_if_higher() -> None:
    content = stored_costs()
    content["run"]["measure"] = {"name": "Pearson", "long": "Pearson correlation", "attack": "none", "better": "higher"}
    content["rows"][1]["equal_compute"]["difference"] = difference(-1.5, 0.5)
    results = parse(content)
    assert "1.5 worse than smoe, top 3" in verdict(results)[0] and results.run.measure.sentence.endswith("higher is better.")
    assert "right of 0 is better" in differences(results).caption
    content["rows"][0]["clean"] = 0.8712
    (first, *_) = by_column(main_table(parse(content)))
    assert first["clean Pearson"] == "0.8712"  # with two decimals, routers would look equal


def test_a_router_without_enough_seeds_is_set_apart() -> None:
    content = stored()
    content["rows"][2]["clean_difference"].update(low=None, high=None, seeds=1)
    del content["rows"][2]["attacked_difference"]
    for sentence in verdict(parse(content)):
        assert mentions(sentence, "; ", "ac ", "seeds")


def test_a_single_router_has_nothing_to_be_compared_with() -> None:
    first, second = verdict(parse(stored(["smoe"])))
    assert "smoe" in first and "3.12" not in first
    assert "184.50" in second and "191.25" in second


def test_an_error_in_percent_changes_by_percentage_points() -> None:
    clean, _ = verdict(parse(stored_images()))
    assert mentions(clean, "smooth lowered", "3.12 percentage points", "95%", "1.62 to 4.62")
    _, level = verdict(parse(stored_images(["smoe"])))
    assert mentions(level, "184.50%", "191.25%")


def test_names_are_listed_as_people_do() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
