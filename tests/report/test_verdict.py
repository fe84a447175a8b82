"""Two sentences, and no more in them than the figures hold."""

from report.stored import stored, stored_costs, stored_pictures

from holdfast.report.results import parse
from holdfast.report.verdict import listed, verdict


def test_a_change_is_said_with_its_interval_and_its_price() -> None:
    clean, attacked = verdict(parse(stored()))
    change = "smooth lowered the perplexity by 3.12 (95% interval 1.62 to 4.62)"
    same = "ac made no difference that 3 seeds can show."
    assert clean == f"Against smoe, {change}, using 2.40 experts a token instead of 2.00; {same}"
    assert attacked == f"Under attack, {change}; {same}"


def test_the_cost_of_the_attack_on_untouched_words_is_said() -> None:
    clean, _, cost, difference = verdict(parse(stored_costs()))
    assert "using 2.40 experts a token instead of 2.00, no difference to smoe, top 3;" in clean
    assert cost == (
        "On the words it left alone, the attack costs every router something: their perplexity rises by 2.00% to 2.30%, "
        "and no 95% interval holds 0."
    )
    assert difference == "No router's cost differs from that of smoe."


def test_a_cost_that_cannot_be_shown_is_said_too() -> None:
    content = stored_costs()
    content["rows"][2]["cost"]["low"] = -0.001
    content["rows"][1]["cost, difference"] = {"mean": -0.004, "low": -0.006, "high": -0.002, "seeds": 3, "words": ""}
    content["rows"][1]["equal compute"] |= {"mean": -1.5, "low": -2.0, "high": -1.0}
    clean, _, cost, unseen, difference = verdict(parse(content))
    assert "instead of 2.00, 1.5 better than smoe, top 3;" in clean
    assert cost.startswith("On the words it left alone, the attack costs smoe 2.00%, smooth 2.10% and smoe, top 3 2.30%")
    assert unseen == "For ac no cost on these words can be shown: no 95% interval lies above 0."
    assert "that of smooth is less by 0.4 points (95% interval 0.2 to 0.6)" in difference
    alone = verdict(parse(stored_costs(["smoe"], seeds=1)))
    assert alone[-1] == "On the words it left alone, the attack costs smoe 2.00% of perplexity (95% intervals above 0)."


def test_a_router_that_is_worse_is_called_so() -> None:
    content = stored(["smoe", "smooth"])
    content["rows"][1]["clean, difference"] = {"mean": 2.0, "low": 1.0, "high": 3.0, "seeds": 3, "words": ""}
    assert "smooth raised the perplexity by 2 (95% interval 1 to 3)" in verdict(parse(content))[0]


def test_an_interval_that_touches_0_is_no_difference() -> None:
    content = stored(["smoe", "smooth"])
    content["rows"][1]["clean, difference"] = {"mean": -2.0, "low": -4.0, "high": 0.0, "seeds": 3, "words": ""}
    assert verdict(parse(content))[0] == (
        "Against smoe, smooth (2.40 experts a token instead of 2.00) made no difference that 3 seeds can show."
    )


def test_from_one_seed_nothing_can_be_said() -> None:
    first, second = verdict(parse(stored(seeds=1)))
    assert "nothing can be said" in first
    assert "lowered" not in first + second


def test_a_router_without_enough_seeds_is_set_apart() -> None:
    content = stored()
    content["rows"][2]["clean, difference"].update(low=None, high=None, seeds=1)
    del content["rows"][2]["attacked, difference"]
    for sentence in verdict(parse(content)):
        assert sentence.endswith("; of ac nothing can be said, from fewer than two seeds.")


def test_a_single_router_has_nothing_to_be_compared_with() -> None:
    first, second = verdict(parse(stored(["smoe"])))
    assert "nothing to compare it with" in first
    assert "184.50" in second and "191.25" in second


def test_an_error_in_percent_changes_by_percentage_points() -> None:
    clean, _ = verdict(parse(stored_pictures()))
    assert "smooth lowered the error by 3.12 percentage points (95% interval 1.62 to 4.62)" in clean
    _, level = verdict(parse(stored_pictures(["smoe"])))
    assert level == "Its error is 184.50% on clean data and 191.25% under attack."


def test_names_are_listed_as_people_do() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
