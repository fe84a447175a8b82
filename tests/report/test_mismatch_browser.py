"""The page of a mismatch report in headless Chromium: does it draw, fit and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import EVIL, check_first_screen, check_page, drawn, on_all_screens
from report.mismatches import report_of, stored_mismatch

from holdfast.report import write_mismatch
from holdfast.report.mismatch_page import remedy_bars

pytestmark = pytest.mark.slow  # starts a browser

PLOTS = {f"{name}-{kind}" for name in ("tail", "layers", "tokens") for kind in ("recorded", "simulated")}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = stored_mismatch()
    stored["model"]["name"] = EVIL
    stored["data"]["engine"] = EVIL + "x" * 150
    stored["rows"][4]["router"] = EVIL
    return write_mismatch(report_of(stored), tmp_path_factory.mktemp("mismatch") / "page.html")


@on_all_screens
def test_a_page_by_hand_is_drawn_fits_and_is_silent(screen: Any, page: Path) -> None:
    check_page(screen, page, ".plot .main-svg", "tail-simulated")
    assert set(drawn(screen)) == PLOTS
    dark = screen.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    ground = "return document.getElementById('plot-tail-simulated')._fullLayout.paper_bgcolor"
    assert screen.execute_script(ground) == ("#14171b" if dark else "#ffffff")
    colours = "return document.getElementById('plot-tail-simulated')._fullData.map((trace) => trace.line.color)"
    assert len(set(screen.execute_script(colours))) == 3


@on_all_screens
def test_a_bar_a_remedy_with_its_price_is_inside_the_first_screen(screen: Any, tmp_path: Path) -> None:
    stored = stored_mismatch()
    check_first_screen(screen, write_mismatch(report_of(stored), tmp_path / "page.html"), "#verdict, #answer .bars")
    bars = [bar for kind in ("recorded", "simulated") for bar in remedy_bars(report_of(stored), kind)]
    rows = screen.find_elements("css selector", ".bars li")
    shown = [[row.find_element("css selector", part).text for part in (".label", ".value", ".cost")] for row in rows]
    assert shown == [[bar.label, f"{bar.text} {bar.verdict}".strip(), bar.price] for bar in bars]
    widths = """return [...document.querySelectorAll(".bars .length")].map((bar) =>
      (100 * bar.getBoundingClientRect().width) / bar.parentElement.getBoundingClientRect().width)"""
    assert screen.execute_script(widths) == pytest.approx([bar.width for bar in bars], abs=0.1)
