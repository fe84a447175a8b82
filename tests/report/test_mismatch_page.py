"""The page of a mismatch report without a browser: its numbers, what it draws, escapes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from report.mismatches import TAIL, estimate, report_of, stored_mismatch
from report.tags import Tags

from holdfast.report import render_mismatch, write_mismatch
from holdfast.report.mismatch_page import rollout_plots
from holdfast.report.plot_data import Plot

EVIL = "<img src=x onerror=alert(1)></script>%{x}"


def plots_of(stored: dict[str, Any]) -> dict[str, Plot]:
    mismatch = report_of(stored)
    return {plot.name: plot for kind in mismatch.rollouts for plot in rollout_plots(mismatch, kind)}


@pytest.fixture(scope="module")
def page() -> Tags:
    return Tags(render_mismatch(report_of(stored_mismatch())))


@pytest.mark.parametrize(
    "value",
    [
        "tiny-mixtral",
        "2.13% of the routing decisions (one token in one layer) have different experts than in the recorded rollout, and",
        "differs by 0.0123 on average and by 0.135 at most",
        "With replay by 0.0045 and 0.0495, and 0.00% are outside; the mean gap changes by -0.0078 (95% interval -0.0088 to",
        "Recorded rollout: vLLM on a GPU",
        "Simulated rollout: bfloat16, batches of 1, token by token",
        "2.13% (2.03% to 2.23%)",
        "0.0123 (0.0118 to 0.0128)",
        "0.0861 (0.0851 to 0.0871)",  # 99% of gaps
        "1.0007 (1.0006 to 1.0008)",  # the mean ratio
        "0.30% (0.29% to 0.31%)",  # outside
        "-4.56% (-4.66% to -4.46%)",
        "outside 0.8 to 1.2",
        "smooth[budget=0.25]",
        "its gates are of two kinds.",
        "3.457",
        "f70d1419",
        "2.13.7",
    ],
)
def test_the_values_are_there(page: Tags, value: str) -> None:
    assert value in page.text


def test_tails_and_layers_are_drawn_for_each_remedy() -> None:
    plots = plots_of(stored_mismatch())
    names = ("gaps", "tail", "layers", "tokens")
    assert set(plots) == {f"{name}-{kind}" for name in names for kind in ("recorded", "simulated")}
    tail = plots["tail-simulated"].data
    assert [trace["name"] for trace in tail] == ["live", "replay", "smooth[budget=0.25]"]
    assert tail[0]["x"] == TAIL and tail[0]["y"][:3] == pytest.approx([90.0, 25.0, 1.23]) and tail[0]["y"][3] is None
    layers = plots["layers-recorded"].data[0]
    assert layers["y"] == pytest.approx([2.13, 4.26, 6.39]) and layers["error_y"]["array"] == pytest.approx([0.1] * 3)
    assert plots["tokens-recorded"].data[0]["y"] == pytest.approx([4.26, 8.52, 12.78])
    # A remedy has one colour on the whole page.
    assert [trace["meta"]["router"] for trace in plots["gaps-simulated"].data] == [0, 1, 2]
    assert [trace["x"][0] for trace in plots["gaps-simulated"].data] == [0.0123, 0.0041, 0.0067]


def test_no_difference_and_no_interval_are_said() -> None:
    stored = stored_mismatch()
    stored["rows"][1]["logprobs"]["change"]["mean"] = estimate(0.0001, 0.001)
    stored["rows"][3]["logprobs"]["change"]["mean"] = estimate(-0.5)
    text = Tags(render_mismatch(report_of(stored))).text
    assert "0.00% are outside; the mean gap does not clearly differ from live (95% interval" in text
    assert "from one sequence there is no interval" in text
    stored["rows"][0]["sets"]["layers"][0]["routers_differ"] = estimate(0.02)
    assert plots_of(stored)["layers-recorded"].data[0]["error_y"]["visible"] is False


def test_a_record_without_logprobs_has_its_sets_only() -> None:
    stored = stored_mismatch()
    stored["data"]["logprobs"] = False
    for row in stored["rows"][:2]:
        row["logprobs"] = None
    stored["rows"] = stored["rows"][:2]
    page = Tags(render_mismatch(report_of(stored)))
    assert "only its sets of experts were compared" in page.text and "2.13%" in page.text and "0.0123" not in page.text
    assert [name for name, plot in plots_of(stored).items() if plot.data] == ["layers-recorded", "tokens-recorded"]


def test_an_interrupted_report_and_one_of_skipped_rows_are_rendered() -> None:
    stored = stored_mismatch()
    stored["status"], stored["rows"] = "interrupted", []
    text = Tags(render_mismatch(report_of(stored))).text
    assert "Interrupted" in text and "No row could be measured" in text and "its gates are of two kinds." in text


def test_nothing_of_the_report_becomes_markup() -> None:
    stored = stored_mismatch()
    stored["model"]["name"] = stored["data"]["engine"] = stored["rows"][4]["router"] = EVIL
    stored["skipped"][0]["reason"] = EVIL
    html = render_mismatch(report_of(stored))
    page = Tags(html)
    assert not any(tag == "img" for tag, _ in page.tags) and "<img" not in html
    assert page.text.count(EVIL) >= 4  # shown as it is
    for plot in plots_of(stored).values():
        for trace in plot.data:
            for said in (trace.get("name"), trace["hovertemplate"].split(": ")[0], *map(str, trace["y"])):
                assert said is None or ("<img" not in said and "%{x}" not in said.replace("layer %{x", ""))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["schema"], 7, "not a mismatch report of schema 1"),
        (["rows", 0, "sets", "tokens"], "many", "rows[0].sets.tokens is 'many'"),
        (["rows", 0, "logprobs", "tail"], [0.5], "needs a share for each size"),
        (["settings", "tail"], [0.0, 1.0, 2.0, 3.0], "tail needs sizes above 0"),
        (["skipped", 0, "reason"], 3, "skipped[0].reason is 3"),
    ],
)
def test_a_damaged_report_gets_one_sentence(path: list[Any], value: Any, says: str, tmp_path: Path) -> None:
    stored = stored_mismatch()
    place: Any = stored
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "mismatch.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="measure the model again") as problem:
        write_mismatch(tmp_path, tmp_path / "page.html")
    assert says in str(problem.value) and "\n" not in str(problem.value)


def test_a_page_is_written_from_a_file_or_a_folder_and_not_over_the_report(tmp_path: Path) -> None:
    (tmp_path / "mismatch.json").write_text(json.dumps(stored_mismatch()))
    one = write_mismatch(tmp_path / "mismatch.json", tmp_path / "one.html").read_text(encoding="utf-8")
    assert one == write_mismatch(tmp_path, tmp_path / "two.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="the stored report itself"):
        write_mismatch(tmp_path / "mismatch.json", tmp_path / "mismatch.json", force=True)
    with pytest.raises(ValueError, match="--force"):
        write_mismatch(tmp_path, tmp_path / "one.html")
    (tmp_path / "mismatch.json").write_text("{")
    with pytest.raises(ValueError, match="it is not JSON"):
        write_mismatch(tmp_path, tmp_path / "three.html")
