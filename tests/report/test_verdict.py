"""Two sentences, and no more in them than the figures hold."""

from report.stored import stored, stored_pictures

from holdfast.report.results import parse
from holdfast.report.verdict import listed, verdict


def test_a_change_is_said_with_its_interval_and_its_price() -> None:
    clean, attacked = verdict(parse(stored()))
    change = "smooth lowered the perplexity by 3.12 (95% interval 1.62 to 4.62)"
    same = "ac made no difference that 3 seeds can show."
    assert clean == f"Against smoe, {change}, using 2.40 experts a token instead of 2.00; {same}"
    assert attacked == f"Under attack, {change}; {same}"


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
