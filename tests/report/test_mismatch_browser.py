"""The page of a mismatch report in headless Chromium: does it draw, fit and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import EVIL, check_page, drawn, on_all_screens
from report.mismatches import report_of, stored_mismatch

from holdfast.report import write_mismatch

pytestmark = pytest.mark.slow  # starts a browser

PLOTS = {f"{name}-{kind}" for name in ("gaps", "tail", "layers", "tokens") for kind in ("recorded", "simulated")}


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
