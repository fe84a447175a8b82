"""The verdict strip: who is better in what, where its bars are, and the sentence above it."""

from collections.abc import Sequence
from typing import Any

import pytest
from report.stored import difference, parse, stored, stored_costs, stored_images

from holdfast.metrics import Difference
from holdfast.report.page_shell import bytes_text, flops_text, seconds_text
from holdfast.report.strip import Aspect, Bar, column, headline, strip


def with_steadiness(routers: Sequence[str] = ("smoe", "smooth", "ac", "smoe, top 3"), seeds: int = 3) -> dict[str, Any]:
    """The second router is steadier by 2 points, and its step takes half as long again."""
    content = stored_costs(routers, seeds)
    for place, row in enumerate(content["rows"]):
        row |= {"step_seconds": 0.3 if place == 1 else 0.2, "flops": 1.5e6, "peak_bytes": 3 * 2**30}
        row["consistency"] = difference(0.95 + 0.02 * (place == 1), 0.01, seeds)
        if place:
            row["consistency_difference"] = difference(0.02 if place == 1 else 0.0, 0.01, seeds)
    return content


def bars_of(differences: list[Difference | None], sign: int = 1) -> list[Bar]:
    """Return the bars of a column with these differences; each row has the level 7."""
    results = parse(stored(("smoe", "a", "b", "c")))
    given = {id(row): one for row, one in zip(results.rows, differences, strict=False)}
    aspect = Aspect("a", "b", lambda row: "7", lambda row: given[id(row)], sign=sign, digits=1)
    return column(results, results.rows[: len(differences)], aspect).bars


def kinds(content: dict[str, Any]) -> dict[str, list[str]]:
    return {column.title: [bar.kind for bar in column.bars] for column in strip(parse(content)).columns}


def test_every_aspect_says_who_is_better() -> None:
    same = ["same", "same"]
    assert kinds(with_steadiness()) == {
        "Clean perplexity": ["baseline", "better", *same],
        "Cost of the attack": ["baseline", "same", *same],
        "Steadiness": ["baseline", "better", *same],
    }
    of_images = kinds(stored_images())
    assert of_images == {"Clean error": ["baseline", "better", "same"], "Error under attack": ["baseline", "better", "same"]}
    assert all(set(found) == {"baseline", "unknown"} for found in kinds(with_steadiness(seeds=2)).values())


def test_better_is_on_the_right_whichever_number_is_better() -> None:
    found = Difference(-2.0, -3.0, -1.0, 3, "seeds and examples")
    for sign, kind, places in ((-1, "better", (66.67, 83.33, 100.0)), (1, "worse", (0.0, 16.67, 33.33))):
        bar = bars_of([None, found], sign)[1]
        assert (bar.kind, bar.places, bar.better_by) == (kind, places, sign * -2.0)
        assert bar.text == "-2.0 (-3.0 to -1.0)" and bar.level == "7"


def test_an_outlier_is_cut_off_and_leaves_the_others_their_room() -> None:
    found: list[Difference | None] = [
        Difference(mean, mean - 1, mean + 1, 3, "seeds and examples") for mean in (1.0, -1.0, 1.0, 90.0)
    ]
    bars = bars_of(found)
    assert [bar.places for bar in bars] == [
        (50.0, 75.0, 100.0),
        (0.0, 25.0, 50.0),
        (50.0, 75.0, 100.0),
        (100.0, 100.0, 100.0),
    ]
    assert [bar.is_cut for bar in bars] == [(False, False)] * 3 + [(False, True)]


def test_a_router_that_stands_apart_is_not_compared() -> None:
    content = stored()
    row = content["rows"][2] | {"apart": "sees later tokens"}
    del row["clean_difference"], row["attacked_difference"]
    content["rows"][2] = row
    bar = strip(parse(content)).columns[0].bars[2]
    assert (bar.kind, bar.text, bar.level) == ("none", "sees later tokens", "184.75")


def test_chips_have_what_is_stored_and_mark_what_costs_more() -> None:
    rows = strip(parse(with_steadiness())).rows
    assert [chip.text for chip in rows[0].chips] == ["2.00", "200 ms", "1.5 M", "3 GiB"]
    assert [(chip.name, chip.ratio) for chip in rows[1].chips if chip.is_more] == [
        ("experts", "1.2\u00d7"),
        ("step", "1.5\u00d7"),
    ]
    assert [chip.name for chip in strip(parse(stored())).rows[0].chips] == ["experts"]


def test_times_and_sizes_have_the_unit_that_suits_them() -> None:
    assert [seconds_text(one) for one in (0.0123, 0.31, 2.4, 720, 12600)] == ["12 ms", "310 ms", "2.4 s", "12 min", "3.5 h"]
    assert [flops_text(1.34e6), bytes_text(2.1 * 2**30), bytes_text(None)] == ["1.3 M", "2.1 GiB", "–"]  # noqa: RUF001


NONE, WORSE, BETTER = (0.5, 6.0), (8.0, 6.0), (-8.0, 6.0)


def cleaned(
    content: dict[str, Any], *clean: tuple[float, float], attacked: tuple[float, float] = (0.1, 0.5)
) -> dict[str, Any]:
    """Return a comparison whose routers have these clean differences, and the second this cost."""
    for row, one in zip(content["rows"][1:], clean, strict=False):
        row["clean_difference"] = difference(*one)
    content["rows"][1]["cost_difference"] = difference(*attacked)
    return content


HEADLINES = [
    ((NONE, NONE), "No router beat smoe, clean or in cost of attack: 3 seeds cannot show differences below 6 perplexity."),
    (
        (NONE, WORSE),
        "No router beat smoe on clean data and 1 was worse: 3 seeds cannot show differences below 6 perplexity.",
    ),
    ((BETTER, WORSE), "smooth beat smoe by 8 perplexity with 20% more experts: 3 seeds cannot show differences below 6."),
    ((BETTER, (-9.0, 2.0)), "2 routers beat smoe, ac most, by 9 perplexity: 3 seeds cannot show differences below 6."),
]


@pytest.mark.parametrize(("clean", "says"), HEADLINES)
def test_one_sentence_says_who_won_and_what_could_have_been_seen(clean: tuple[Any, ...], says: str) -> None:
    content = cleaned(stored_costs(["smoe", "smooth", "ac"]), *clean)
    content["rows"][1]["more_compute"] = 0.2
    said = headline(parse(content))
    assert said.startswith(says) and len(said.split()) <= 20


def test_a_router_that_only_resists_the_attack_is_named() -> None:
    said = headline(parse(cleaned(stored_costs(["smoe", "smooth"]), NONE, attacked=(-0.02, 0.01))))
    assert said.startswith("No router beat smoe on clean data, but attack costs smooth less: 3 seeds cannot show")
    assert len(said.split()) <= 20


def test_the_sentence_names_the_attack_as_its_column_does() -> None:
    """A router with the same cost of the attack can have a better figure under attack, as it can be better on clean data."""
    said = headline(parse(cleaned(stored_costs(["smoe", "smooth"]), NONE)))
    assert said.startswith("No router beat smoe, clean or in cost of attack:")
    content = stored_images(["smoe", "smooth"])
    for kind in ("clean_difference", "attacked_difference"):
        content["rows"][1][kind] = difference(*NONE)
    assert headline(parse(content)).startswith("No router beat smoe, clean or under attack:")


def test_a_change_that_rounds_to_zero_has_no_sign() -> None:
    content = cleaned(stored_costs(["smoe", "smooth"]), (-0.001, 1.5), attacked=(-0.00001, 0.0004))
    clean, cost, *_ = strip(parse(content)).columns
    assert clean.bars[1].text == "0.00 (-1.50 to +1.50)" and cost.bars[1].text == "0.00 (-0.04 to +0.04)"


def test_the_baseline_with_more_experts_does_not_win() -> None:
    content = cleaned(stored_costs(["smoe", "ac", "smoe, top 3"]), NONE, BETTER)
    assert headline(parse(content)).startswith("No router beat smoe")


def test_without_enough_seeds_or_routers_nothing_is_claimed() -> None:
    assert headline(parse(stored(seeds=2))) == "2 seeds cannot show whether a router differs from smoe: train 3 or more."
    assert headline(parse(stored(["smoe"]))) == "Only smoe was trained, so there is nothing to compare it with."
    content = stored()
    content["rows"][0]["apart"] = "sees later tokens"
    assert "name another router first" in headline(parse(content))


def test_a_sweep_is_counted() -> None:
    content = stored(["smoe", "smooth", "ac"])
    for row, cell in zip(content["rows"] * 3, content["cells"], strict=True):
        row["settings"] = cell["settings"] = {"sparse.k": 1}
    said = headline(parse(content))
    assert said == "In equal settings, 1 of 2 rows beat smoe, 0 lost: 3 seeds cannot show differences below 1.5."
