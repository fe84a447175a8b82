"""The page of a comparison over held-out domains: accuracies with intervals, their mean and worst, and a verdict."""

from dataclasses import asdict
from typing import Any

import numpy as np
from report.browsing import EVIL
from report.stored import by_column, parse, repeated, stored_images

from holdfast.metrics import Shares
from holdfast.report import render
from holdfast.report.comparison_page import verdict
from holdfast.report.comparison_tables import domain_table, main_table, settings_table
from holdfast.train.results import Results
from holdfast.train.summary import summarise_domains

DOMAINS = ("photo", "sketch")
IMAGES = 10_000  # of each domain


def stored_domains(
    domains: tuple[str, ...] = DOMAINS,
    seeds: int = 3,
    routers: tuple[str, ...] = ("smoe", "smooth", "ac"),
    more: dict[str, Any] | None = None,
    baseline: str | None = None,
    single_examples: bool = True,
) -> dict[str, Any]:
    """The second router is 5 points better on each domain and the third varies; the last domain is the hardest."""
    content = repeated(stored_images(routers, seeds), [{**(more or {}), "data.held_out": domain} for domain in domains])
    for cell in content["cells"]:
        number, place = routers.index(cell["router"]), domains.index(cell["settings"]["data.held_out"])
        better = 5 + 0.01 * cell["seed"] if number == 1 else 3 * cell["seed"] - 3 if number else 0
        cell["clean"]["figure"] = 20 + 30 * place + 0.5 * cell["seed"] - better
        wrong = np.arange(IMAGES) < round(IMAGES * cell["clean"]["figure"] / 100)  # the same images first, for all
        if single_examples:
            cell["clean"]["per_example"] = Shares(wrong.astype(float)).stored()
    summary = [asdict(row) for row in summarise_domains(content["cells"], baseline or routers[0])]
    for cell in content["cells"]:
        cell["clean"].pop("per_example", None)
    return {**content, "domains": summary}


def page_of(**given: Any) -> Results:
    return parse(stored_domains(**given))


def test_the_table_has_every_domain_and_the_mean_and_the_worst_with_intervals() -> None:
    rows = by_column(domain_table(page_of()))
    assert [row["router"] for row in rows] == ["smoe", "smooth", "ac"]
    columns = ["router", "seeds", "photo, %", "sketch, %", "mean, %", "mean, difference", "worst, %", "worst, difference"]
    assert list(rows[0]) == columns
    assert (rows[0]["photo, %"], rows[0]["sketch, %"]) == ("79.50", "49.50")
    # Student's t over seeds reaches 1.242 from the mean, and over the images 0.628: sqrt(0.788^2 + 0.979^2) / 2.
    assert rows[0]["mean, %"] == "64.50 (95% interval 63.11 to 65.89)"
    assert rows[0]["worst, %"].startswith("49.50 (95% interval")
    assert rows[0]["mean, difference"] == rows[0]["worst, difference"] == "baseline"
    assert rows[1]["mean, difference"].startswith("+5.01 (95% interval")
    assert rows[2]["worst, difference"].startswith("no difference (95% interval")


def test_the_verdict_is_about_the_mean_and_the_worst_accuracy() -> None:
    told = verdict(page_of())
    assert told[0] == "2 domains, photo and sketch, were held out in turn; accuracies are on the held-out domains."
    assert told[1] == "The mean accuracy of smoe is 64.50%, its worst 49.50%."
    raised = "smooth raised it by 5.01 percentage points (95% interval 4."
    same = "ac made no difference that 3 seeds can show (they would show one above 7.5 percentage points)"
    for place, start in ((2, "Against smoe, in the mean accuracy: "), (3, "In the worst accuracy: ")):
        assert told[place].startswith(start + raised) and told[place].endswith(f"; {same}.")


def test_cells_without_single_examples_are_one_sentence() -> None:
    results = page_of(single_examples=False)
    told = verdict(results)
    assert len(told) == 3 and "single test examples are not stored" in told[2]
    assert "these examples only" in by_column(domain_table(results))[1]["mean, difference"]


def test_a_router_that_is_worse_lowers_the_accuracy() -> None:
    told = " ".join(verdict(page_of(routers=("ac", "smooth", "smoe"))))
    assert "smooth raised" in told
    content = stored_domains(baseline="smooth")
    content["rows"].sort(key=lambda row: row["router"] != "smooth")
    told = " ".join(verdict(parse(content)))
    assert "Against smooth, in the mean accuracy: smoe lowered it by 5.01 percentage points (95% interval 4." in told


def test_one_seed_or_one_router_shows_no_difference() -> None:
    one_seed = page_of(seeds=1)
    assert "Fewer than 3 seeds cannot show whether a router differs from smoe" in " ".join(verdict(one_seed))
    assert "these models only" in by_column(domain_table(one_seed))[0]["mean, %"]
    assert "nothing to compare it with" in " ".join(verdict(page_of(routers=("smoe",))))


def test_domains_have_a_table_of_their_own_instead_of_settings_side_by_side() -> None:
    results = page_of()
    assert settings_table(results).rows == []
    assert [row["data.held_out"] for row in by_column(main_table(results))] == ["photo"] * 3 + ["sketch"] * 3
    page = render(results)
    assert "<h2>Held-out domains</h2>" in page and "Settings side by side" not in page
    note = domain_table(results).note
    assert note in page and "higher is better" in note


def test_a_sweep_over_domains_has_both_tables() -> None:
    results = page_of(more={"sparse.k": 2})
    assert [row[0] for row in domain_table(results).rows] == ["smoe, sparse.k=2", "smooth, sparse.k=2", "ac, sparse.k=2"]
    page = render(results)
    assert "Settings with the same held-out domain have the same test data" in page
    assert "The test data and the attack are the same in all settings" not in page


def test_a_comparison_without_domains_has_no_such_table() -> None:
    results = parse(stored_images())
    assert results.domains == [] and domain_table(results).rows == []
    assert "Held-out domains" not in render(results)


def test_texts_are_escaped() -> None:
    page = render(page_of(domains=(EVIL, "b")))
    assert EVIL not in page and "&lt;img src=x" in page
