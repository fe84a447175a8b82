"""The page of an audit without a browser: its figures, what it escapes, what it refuses."""

import json
import math
from typing import Any

import pytest
from report.audited import at_risk, perturbed, report_of, stored_audit
from report.geometries import piece
from report.tags import Tags
from wording import mentions

from holdfast.auditing import diagnose
from holdfast.auditing.reports import AtRisk
from holdfast.report import render_audit
from holdfast.report.audit_page import (
    LEAST,
    SHOWN,
    audit_plots,
    perturbations_table,
    token,
    what_if_tables,
)
from holdfast.report.page_shell import luminance, risks, short_share
from holdfast.report.plot_data import Plot


def plots_of(stored: dict[str, Any]) -> dict[str, Plot]:
    return {plot.name: plot for plot in audit_plots(report_of(stored))}


def test_findings_are_those_of_diagnose_in_their_order() -> None:
    page = Tags(render_audit(report_of(stored_audit())))
    found = diagnose(report_of(stored_audit()))
    places = [page.text.index(finding.text) for finding in found]
    assert len(found) == 3 and places == sorted(places)


def test_many_findings_are_folded_but_all_there() -> None:
    stored = stored_audit()
    for level in range(12):
        stored["perturbations"][f"noise.0.00{level + 1}"] = perturbed(f"noise number {level}", 0.9, 0.9)
    page = Tags(render_audit(report_of(stored)))
    starts = [attributes.get("start") for tag, attributes in page.tags if tag == "ol" and attributes["class"] == "findings"]
    assert starts == [None, str(SHOWN + 1), None]  # predictions, the others, experts
    assert all(f"noise number {level}" in page.text for level in range(12))


def test_a_healthy_model_has_nothing_to_complain_about() -> None:
    stored = stored_audit()
    stored["layers"] = [stored["layers"][0]]
    stored["layers"][0]["load"]["dead"] = []
    del stored["perturbations"]["noise.0.01"]
    stored["what_if"], stored["view"], stored["at_risk"], stored["status"] = None, None, [], "interrupted"
    page = Tags(render_audit(report_of(stored)))
    lists = [attributes.get("class") for tag, attributes in page.tags if tag == "ol"]
    assert "interrupted" in page.text and "findings" not in lists
    assert not {"what-if", "tokens", "layer"} & {attributes.get("id") for _, attributes in page.tags}


def test_the_heat_map_is_of_the_flips_of_each_perturbation_and_layer() -> None:
    (heat,) = plots_of(stored_audit())["flips"].data
    assert heat["x"] == [0, 1] and heat["y"] == ["noise.0.01"]
    assert heat["z"] == [[pytest.approx(-2), pytest.approx(-1)]]
    assert heat["text"] == [["noise.0.01, layer 0: 1%", "noise.0.01, layer 1: 10%"]]
    assert plots_of(stored_audit())["flips"].caption.endswith("No token flips under none.")


def test_tokens_near_ties_and_a_slice_are_drawn_where_they_are_stored() -> None:
    stored = stored_audit()
    assert plots_of(stored).keys() == {"flips", "radii", "undecided", "load"}
    near = {"tokens": 256, "widths": [0.001, 0.01], "exact": True}
    near["orders"] = [{"order": 1, "shares": [0.01, 0.12]}, {"order": 2, "shares": [0.0, 0.005]}]
    stored["layers"][0]["boundaries"] = {**near, "slice": piece("boundaries")}
    stored["layers"][1]["boundaries"] = {"skipped": "its ties are not flats."}
    plots = plots_of(stored)
    assert [trace["y"] for trace in plots["near-ties"].data] == [[12.0], [0.5]] and "256 tokens" in plots[
        "near-ties"
    ].caption
    assert plots["slice"].title == "A slice through layer 0" and plots["slice"].data[0]["z"] == piece("boundaries")["cells"]
    assert not plots["slice"].layered  # the same slice for every layer that is chosen
    Tags(render_audit(report_of(stored)))


def test_the_least_change_is_no_zero_and_a_layer_without_tokens_is_a_gap() -> None:
    stored = stored_audit()
    stored["perturbations"]["noise.0.01"] = perturbed("a little", 1e-9)
    (heat,) = plots_of(stored)["flips"].data
    assert heat["z"] == [[LEAST, None]]
    assert heat["text"][0][1].endswith("nothing to compare")


def test_radii_are_shares_of_the_tokens_in_logarithmic_bins_by_layer_and_together() -> None:
    bars = {trace["meta"]["layer"]: trace for trace in plots_of(stored_audit())["radii"].data}
    assert list(bars) == ["all", "0", "1"]
    assert bars["0"]["y"] == [0.25, 0.75, 24.0, 50.0, 25.0]
    assert bars["1"]["y"] == [0.0, 0.0, 0.0, 25.0, 75.0]
    assert bars["all"]["y"] == [0.125, 0.375, 12.0, 37.5, 50.0]
    assert bars["0"]["x"] == pytest.approx([-4.5, -3.5, -2.5, -1.5, -0.5]) and bars["0"]["width"] == pytest.approx([1] * 5)
    assert [text.split(":")[0] for text in bars["0"]["text"]] == [
        "below 0.0001", "0.0001 to 0.001", "0.001 to 0.01", "0.01 to 0.1", "above 0.1",
    ]  # fmt: skip
    layout = plots_of(stored_audit())["radii"].layout
    assert layout["xaxis"]["tickvals"] == [-4, -3, -2, -1] and layout["shapes"][0]["x0"] == math.log10(0.001)


def test_undecided_shares_are_percent_by_layer_for_each_dtype() -> None:
    lines = {trace["name"]: trace for trace in plots_of(stored_audit())["undecided"].data}
    assert lines["bf16"]["x"] == [0, 1] and lines["bf16"]["y"] == pytest.approx([1.5, 30])
    assert lines["fp16"]["y"] == pytest.approx([0.1, 1])


def test_load_is_over_an_even_load_and_layers_may_differ_in_experts() -> None:
    stored = stored_audit()
    stored["layers"][1]["load"]["percent"] = [50.0, 150.0]
    (heat,) = plots_of(stored)["load"].data
    assert heat["y"] == ["0", "1"] and heat["x"] == [0, 1, 2, 3]
    assert heat["z"] == [pytest.approx([1.6, 1.2, 1.2, 0.0]), [0.5, 1.5, None, None]]
    assert mentions(heat["text"][0][0], "layer 0, expert 0", "1.60")


def test_a_layer_without_a_certificate_says_why_and_has_no_radii() -> None:
    stored = stored_audit()
    stored["layers"][0] |= {"radius": None, "undecided": {}, "no_certificate": "no bound is known."}
    bars, lines = plots_of(stored)["radii"].data, plots_of(stored)["undecided"].data
    assert [trace["meta"]["layer"] for trace in bars] == ["all", "1"] and lines[0]["x"] == [1]
    page = Tags(render_audit(report_of(stored)))
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert columns.count("why no certificate") == columns.count("undecided in bf16") == 2
    assert "no bound is known." in page.text


def test_without_any_certificate_there_are_no_plots_of_them() -> None:
    stored = stored_audit()
    for layer in stored["layers"]:
        layer |= {"radius": None, "undecided": {}, "no_certificate": "no bound is known."}
    assert set(plots_of(stored)) == {"flips", "load"}
    render_audit(report_of(stored))


def test_a_token_is_marked_in_its_context_where_it_can_be_told() -> None:
    seen = [token(entry) for entry in report_of(stored_audit()).at_risk]
    parts = [[one[part] for part in ("before", "text", "after", "context")] for one in seen]
    assert parts[0] == ["in the", " night", " of the year", ""]
    assert parts[1] == ["", "the", "", "the cat and the dog"]
    assert parts[2:] == [["", "token 26", "", ""], ["", "row 7", "", ""]]
    assert token(AtRisk(**at_risk(0.1, "\r\n", "a\r\nb\nc")))["after"] == "b↵c"
    assert mentions(seen[0]["where"], "3", "0", "position 7", "sequence 0", "batch 0")


def test_tokens_are_coloured_by_their_radius() -> None:
    levels = [token(AtRisk(**at_risk(size, "a", "a")))["level"] for size in (0.0, 9e-6, 1e-5, 5e-4, 0.001, 0.01, 3.0)]
    assert levels == [0, 0, 1, 2, 3, 4, 4] and len(risks()) == 5
    brightness = [luminance(risk["colour"]) for risk in risks()]
    assert brightness == sorted(brightness)
    page = Tags(render_audit(report_of(stored_audit())))
    pieces = [attributes for _, attributes in page.tags if "data-radius" in attributes]
    assert [(piece["class"], piece["data-radius"]) for piece in pieces] == [
        ("piece risk-0", "2e-06"), ("piece risk-2", "0.0005"), ("piece risk-4", "0.02"), ("piece risk-4", "0.03"),
    ]  # fmt: skip


def test_a_what_if_shows_the_part_of_flips_beside_the_total_and_the_predictions() -> None:
    stored = stored_audit()
    stored["what_if"]["prediction_flips"]["noise.0.01"]["after"] = 0.04
    tables = what_if_tables(report_of(stored))
    assert tables is not None
    (row,) = tables[0].rows  # nothing changes under none
    assert dict(zip(tables[0].columns, row, strict=True)) == {
        "perturbation": "noise.0.01",
        "predictions that change": "3.1% → 4.0%",
        "change of the loss": "+0.2500 → \u2013",
        "total output change": "7.0% → 8.1%",  # rises while the part of flips falls
        "output change by flips": "6.2% → 0.30%",
        "tokens that flip": "5.5% → 2.1%",
    }
    page = Tags(render_audit(report_of(stored)))
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert columns.count("total output change") == columns.count("output change by flips") == 1


def test_a_what_if_without_labels_has_no_loss_among_its_costs() -> None:
    stored = stored_audit()
    for name in ("loss", "perplexity"):
        stored["what_if"]["cost"][name] = {"before": None, "after": None}
    tables = what_if_tables(report_of(stored))
    assert tables is not None and tables[1].rows == [["experts per token", "2 → 3.5"]]


def test_perturbations_are_ordered_by_the_predictions_that_change() -> None:
    stored = stored_audit()
    for name, share in (("words", 0.2), ("typos", 0.01), ("routing.bf16", 0.0)):
        stored["perturbations"][name] = perturbed(name, 0.1, 0.1)
        stored["perturbations"][name]["overall"]["prediction_flips"] = share
    rows = perturbations_table(report_of(stored)).rows
    assert [row[0] for row in rows] == ["words", "noise.0.01", "typos", "routing.bf16"]
    assert [row[2] for row in rows] == ["20%", "3.1%", "1.0%", "0%"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (1e-9, "<0.001%"),
        (1e-5, "0.0010%"),
        (0.00012783, "0.013%"),
        (0.0507, "5.1%"),
        (12.5, "1250%"),
        (None, "\u2013"),
        (math.nan, "\u2013"),
    ],
)
def test_short_shares_have_two_significant_digits(value: float | None, text: str) -> None:
    assert short_share(value) == text


def test_numbers_that_broke_are_dashes() -> None:
    stored = stored_audit()
    stored["layers"][0]["entropy"] = stored["perturbations"]["none"]["overall"]["loss"] = None
    stored["perturbations"]["none"]["overall"]["output"]["total"] = stored["at_risk"][0]["relative"] = None
    stored["what_if"]["cost"]["loss"]["after"] = None
    page = Tags(render_audit(report_of(stored)))
    assert page.text.count("\u2013") >= 5
    json.loads(page.scripts[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
