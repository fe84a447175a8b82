"""The page of an audit without a browser: its figures, what it escapes, what it refuses."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from report.audited import at_risk, perturbed, report_of, stored_audit
from report.geometries import piece
from report.tags import Tags
from wording import mentions

from holdfast.auditing import diagnose
from holdfast.auditing.reports import AtRisk
from holdfast.report import render_audit, write_audit
from holdfast.report.audit_page import LEAST, SHOWN, audit_plots, risks, token, view, what_if_tables
from holdfast.report.page_shell import SCRIPTS, luminance, short_share
from holdfast.report.plot_data import Plot

EVIL = "<img src=x onerror=alert(1)></script>%{x}"


def plots_of(stored: dict[str, Any]) -> dict[str, Plot]:
    return {plot.name: plot for plot in audit_plots(report_of(stored))}


@pytest.fixture(scope="module")
def page() -> Tags:
    return Tags(render_audit(report_of(stored_audit())))


@pytest.mark.parametrize(
    "value",
    [
        "tiny-mixtral",
        "layer 1: 30.0% of tokens are undecided in bf16. Training and serving may select different experts for them.",
        "number 0.3, threshold 0.02",
        "layer 0: 1 of 4 experts are dead. Their weights cost memory and are never used.",
        "number 1, threshold 0",
        "3 findings, the most harmful first: 1 severe and 2 serious.",
        "0.612",  # CV
        "36.00%",  # of the most entropy
        "4.00%",  # near ties
        "1.50%",  # undecided in bf16
        "0.10%",  # undecided in fp16
        "0.0123",  # the median
        "above 0.1",
        "5.50%",  # sets that change
        "2.75%",  # first experts
        "7.00%",
        "6.25%",
        "1.10%",
        "3.10%",
        "+0.2500",
        "there are no texts, only inputs.",
        "What if: the router smooth",
        "8.373",
        "experts per token",
        "5.5% → 2.1%",  # what if: tokens that flip
        "f70d1419",
        "2.13.7",
    ],
)
def test_the_values_are_there(page: Tags, value: str) -> None:
    assert value in page.text


def test_findings_are_those_of_diagnose_in_their_order(page: Tags) -> None:
    found = diagnose(report_of(stored_audit()))
    places = [page.text.index(finding.text) for finding in found]
    assert len(found) == 3 and places == sorted(places)


def test_many_findings_are_folded_but_all_there() -> None:
    stored = stored_audit()
    for level in range(12):
        stored["perturbations"][f"noise.0.00{level + 1}"] = perturbed(f"noise number {level}", 0.9, 0.9)
    page = Tags(render_audit(report_of(stored)))
    starts = [attributes.get("start") for tag, attributes in page.tags if tag == "ol" and attributes["class"] == "findings"]
    assert starts == [None, str(SHOWN + 1)]
    assert all(f"noise number {level}" in page.text for level in range(12))


def test_a_healthy_model_has_nothing_to_complain_about() -> None:
    stored = stored_audit()
    stored["layers"] = [stored["layers"][0]]
    stored["layers"][0]["load"]["dead"] = []
    del stored["perturbations"]["noise.0.01"]
    stored["what_if"], stored["at_risk"], stored["status"] = None, [], "interrupted"
    page = Tags(render_audit(report_of(stored)))
    lists = [attributes.get("class") for tag, attributes in page.tags if tag == "ol"]
    assert "interrupted" in page.text and "findings" not in lists
    assert not {"what-if", "tokens", "layer"} & {attributes.get("id") for _, attributes in page.tags}


def test_the_heat_map_is_of_the_flips_of_each_perturbation_and_layer() -> None:
    (heat,) = plots_of(stored_audit())["flips"].data
    assert heat["x"] == [0, 1] and heat["y"] == ["none", "noise.0.01"]
    assert heat["z"] == [[-5.0, -5.0], [pytest.approx(-2), pytest.approx(-1)]]
    assert heat["text"][1] == ["noise.0.01, layer 0: 1%", "noise.0.01, layer 1: 10%"]


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
    assert heat["z"][1] == [LEAST, None]
    assert heat["text"][1][1].endswith("nothing to compare")


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


def test_a_text_is_coloured_by_the_radius_in_each_layer_and_by_the_least_of_all() -> None:
    stored = stored_audit()
    stored["view"] = {"pieces": ["a", " b", "\n"], "layers": {"0": [1e-6, 0.5, None], "1": [0.5, 0.002, None]}}
    shown = view(report_of(stored))
    assert {layer: [piece["level"] for piece in pieces] for layer, pieces in shown.items()} == {
        "all": [0, 3, 4], "0": [0, 4, 4], "1": [4, 3, 4],
    }  # fmt: skip
    assert [piece["text"] for piece in shown["all"]] == ["a", " b", "↵"]
    page = Tags(render_audit(report_of(stored)))
    hidden = {attributes["data-layer"]: "hidden" in attributes for _, attributes in page.tags if "data-layer" in attributes}
    assert hidden == {"all": False, "0": True, "1": True}
    stored["view"]["layers"]["1"].pop()
    with pytest.raises(ValueError, match=r"radius.*piece"):
        render_audit(report_of(stored))


def evil() -> dict[str, Any]:
    stored = stored_audit()
    stored["model"]["name"] = stored["model"]["architecture"] = stored["what_if"]["router"] = EVIL
    stored["perturbations"] = {
        **stored["perturbations"],
        "noise.0.5": perturbed(EVIL, 1.0, 1.0),
        f"batch.{EVIL}": perturbed(EVIL, 1.0, 1.0, harmless=True),
    }
    stored["skipped"][EVIL] = {"about": EVIL, "reason": EVIL}
    stored["at_risk"] = [at_risk(0.0, EVIL, f"a {EVIL} b"), at_risk(0.0, EVIL, EVIL * 2)]
    stored["layers"][0]["undecided"] = {EVIL: stored["layers"][0]["undecided"]["fp16"]}
    stored["layers"][0]["radius"]["kind"] = EVIL
    stored["view"] = {"pieces": [EVIL], "layers": {"0": [0.1], "1": [None]}}
    stored["data"]["source"] = {EVIL: EVIL}
    stored["versions"][EVIL] = EVIL
    return stored


def test_strings_of_the_audit_are_text_and_nothing_else() -> None:
    page = Tags(render_audit(report_of(evil())))
    assert page.text.count(EVIL) >= 12
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert len(page.scripts) - 1 == 2 + len(SCRIPTS)
    drawn = json.loads(page.scripts[1])["plots"]
    for plot in drawn.values():
        for trace in plot["data"]:
            trace.pop("hovertemplate")
            assert EVIL not in json.dumps(trace) and "<img" not in json.dumps(trace)


def test_nothing_is_fetched_and_only_our_scripts_may_run(page: Tags) -> None:
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}, tag
    ours = render_audit(report_of(stored_audit())).replace(get_plotlyjs(), "")
    assert "://" not in ours and "@import" not in ours and "url(" not in ours
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert [base64.b64decode(checksum) for checksum in allowed] == [
        hashlib.sha256(script.encode()).digest() for script in page.scripts[2:]
    ]


def test_a_page_is_a_function_of_its_audit_and_leaves_it_alone() -> None:
    stored = stored_audit()
    assert render_audit(report_of(stored)) == render_audit(report_of(stored_audit()))
    assert stored == stored_audit()


def test_a_file_is_overwritten_only_when_forced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "audit.html"
    assert write_audit(report_of(stored_audit()), path) == path
    path.write_text("mine")
    with pytest.raises(ValueError, match="--force"):
        write_audit(report_of(stored_audit()), path)
    assert path.read_text() == "mine"
    write_audit(report_of(stored_audit()), str(path), force=True)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in path.parent.iterdir()] == ["audit.html"]


def test_audits_and_results_are_never_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(stored_audit()))
    for path in (tmp_path, tmp_path / "results.json", tmp_path / "audit.json", mine):
        with pytest.raises(ValueError, match=r"\.html"):
            write_audit(mine, path, force=True)
    assert json.loads(mine.read_text()) == stored_audit()


def test_a_saved_audit_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    report_of(stored_audit()).save(tmp_path / "audit.json")
    sources: list[Path | str] = [tmp_path, tmp_path / "audit.json", str(tmp_path)]
    for place, source in enumerate(sources):
        path = write_audit(source, tmp_path / f"{place}.html")
        assert path.read_text(encoding="utf-8") == render_audit(report_of(stored_audit()))


def without(*path: Any) -> dict[str, Any]:
    content = stored_audit()
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return content


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "{", "JSON"),
        ("[]", "None"),
        (json.dumps({**stored_audit(), "schema": 2}), "2"),
        (json.dumps(without("layers", 1, "load")), "layers[1].load is missing"),
        (json.dumps(without("layers", 1, "radius", "counts", 0)), "5 counts"),
        (json.dumps(without("perturbations", "none", "overall")), "perturbations.none.overall is missing"),
        (
            json.dumps(without("perturbations", "none", "layers", 0, "flips")),
            "perturbations.none.layers[0].flips is missing",
        ),
        (json.dumps(without("perturbations", "none", "harmless")), "perturbations.none.harmless is missing"),
        (json.dumps(without("layers", 0, "entropy_share")), "layers[0].entropy_share is missing"),
        (json.dumps(without("what_if", "output")), "what_if.output is missing"),
        (json.dumps({**stored_audit(), "magic": 1}), "magic"),
        (
            json.dumps({**stored_audit(), "perturbations": {"none": {**perturbed("", 1.0), "layers": []}}}),
            "needs its layers",
        ),
        (json.dumps({**stored_audit(), "layers": []}), "layers must not be empty"),
        (json.dumps({**stored_audit(), "model": "mixtral"}), "model must be a section"),
        (json.dumps({**stored_audit(), "settings": {"tokens": float("nan")}}), "not JSON (NaN is no number of JSON)"),
    ],
)
def test_damaged_audits_get_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(text)
    with pytest.raises(ValueError, match=r"audit\.json") as caught:
        write_audit(tmp_path, tmp_path / "page.html")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json.*: No such file"):
        write_audit(tmp_path / "none.json", tmp_path / "page.html")


def test_a_what_if_shows_the_part_of_flips_beside_the_total_and_the_predictions() -> None:
    stored = stored_audit()
    stored["what_if"]["prediction_flips"]["noise.0.01"]["after"] = 0.04
    what_if = report_of(stored).what_if
    assert what_if is not None
    changes, _ = what_if_tables(what_if)
    assert dict(zip(changes.columns, changes.rows[1], strict=True)) == {
        "perturbation": "noise.0.01",
        "tokens that flip": "5.5% → 2.1%",
        "output change by flips": "6.2% → 0.30%",
        "total output change": "7.0% → 8.1%",  # rises while the part of flips falls
        "predictions that change": "3.1% → 4.0%",
    }
    page = Tags(render_audit(report_of(stored)))
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert columns.count("total output change") == columns.count("output change by flips") == 2


def test_a_what_if_without_labels_has_no_loss_among_its_costs() -> None:
    stored = stored_audit()
    for name in ("loss", "perplexity"):
        stored["what_if"]["cost"][name] = {"before": None, "after": None}
    what_if = report_of(stored).what_if
    assert what_if is not None
    assert what_if_tables(what_if)[1].rows == [["experts per token", "2 → 3.5"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (1e-9, "<0.001%"),
        (1e-5, "0.0010%"),
        (0.00012783, "0.013%"),
        (0.0507, "5.1%"),
        (0.0996, "10%"),
        (0.1445, "14%"),
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
