"""The page of a mismatch report without a browser: its numbers, what it draws, escapes and refuses."""

from typing import Any

import pytest
from report.mismatches import TAIL, estimate, report_of, stored_mismatch
from report.tags import Tags

from holdfast.report import render_mismatch
from holdfast.report.first_screen import Bar
from holdfast.report.mismatch_page import remedy_bars, rollout_plots
from holdfast.report.plot_data import Plot


def plots_of(stored: dict[str, Any]) -> dict[str, Plot]:
    mismatch = report_of(stored)
    return {plot.name: plot for kind in mismatch.rollouts for plot in rollout_plots(mismatch, kind)}


def test_tails_and_layers_are_drawn_for_each_remedy() -> None:
    plots = plots_of(stored_mismatch())
    names = ("tail", "layers", "tokens")
    assert set(plots) == {f"{name}-{kind}" for name in names for kind in ("recorded", "simulated")}
    tail = plots["tail-simulated"].data
    assert [trace["name"] for trace in tail] == ["live", "replay", "smooth[budget=0.25]"]
    assert tail[0]["x"] == TAIL and tail[0]["y"][:3] == pytest.approx([90.0, 25.0, 1.23]) and tail[0]["y"][3] is None
    layers = plots["layers-recorded"].data[0]
    assert layers["y"] == pytest.approx([2.13, 4.26, 6.39]) and layers["error_y"]["array"] == pytest.approx([0.1] * 3)
    assert plots["tokens-recorded"].data[0]["y"] == pytest.approx([4.26, 8.52, 12.78])
    # A remedy has one colour on the whole page.
    assert [trace["meta"]["router"] for trace in tail] == [bar.place for bar in bars_of(stored_mismatch())] == [0, 1, 2]


def bars_of(stored: dict[str, Any]) -> list[Bar]:
    return remedy_bars(report_of(stored), "simulated")


def test_a_remedy_has_a_bar_its_interval_and_its_price() -> None:
    stored = stored_mismatch()
    stored["rows"][3]["logprobs"]["change"]["mean"] = estimate(0.0001, 0.001)
    stored["rows"][4]["experts_per_token"] = 2.5
    live, replay, smooth = bars_of(stored)
    longest = 0.0128  # the end of the interval of live
    assert live.width == pytest.approx(100 * 0.0123 / longest, abs=0.01)
    assert live.interval == pytest.approx((100 * 0.0118 / longest, 100.0), abs=0.01)
    assert replay.width == pytest.approx(100 * 0.0041 / longest, abs=0.01)
    assert [bar.text for bar in (live, replay, smooth)] == ["0.0123", "0.00410", "0.00670"]
    assert [bar.verdict for bar in (live, replay, smooth)] == ["", "no clear difference", "lower by 0.00560"]
    assert [bar.price for bar in (live, smooth)] == ["loss 3.457, 2 experts per token", "loss 3.457, 2.5 experts per token"]
    stored["rows"][2]["logprobs"]["mean"] = estimate(0.0123)
    stored["rows"][3]["logprobs"]["change"]["mean"] = estimate(0.02, 0.001)
    stored["rows"][4] |= {"loss": None, "experts_per_token": None}
    live, replay, smooth = bars_of(stored)
    assert live.interval is None and replay.verdict == "higher by 0.0200" and smooth.price == ""


def test_no_difference_and_no_interval_are_said() -> None:
    stored = stored_mismatch()
    stored["rows"][1]["logprobs"]["change"]["mean"] = estimate(0.0001, 0.001)
    stored["rows"][3]["logprobs"]["change"]["mean"] = estimate(-0.5)
    text = Tags(render_mismatch(report_of(stored))).text
    assert "0.00% are outside; the mean gap does not clearly differ from live (95% interval" in text
    assert "from one sequence there is no interval" in text and "No remedy clearly lowers the gap" in text
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
    assert "Nothing can be concluded about the gap" in page.text and "figure" not in {tag for tag, _ in page.tags}
    assert [name for name, plot in plots_of(stored).items() if plot.data] == ["layers-recorded", "tokens-recorded"]


def test_an_interrupted_report_and_one_of_skipped_rows_are_rendered() -> None:
    stored = stored_mismatch()
    stored["status"], stored["rows"] = "interrupted", []
    text = Tags(render_mismatch(report_of(stored))).text
    assert "Interrupted" in text and "No row could be measured" in text and "its gates are of two kinds." in text
