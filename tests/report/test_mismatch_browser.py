"""The page of a mismatch report in headless Chromium: does it draw, fit and stay quiet?"""

import json
from pathlib import Path
from typing import Any

import pytest
from report.browsing import visit
from report.mismatches import report_of, stored_mismatch

from holdfast.report import write_mismatch

pytestmark = pytest.mark.slow  # starts a browser

WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait

EVIL = '<img src=x onerror="alert(1)"></script>%{x}<b>'
DRAWN = """
return Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.dataset.plot,
  plot.querySelectorAll(".scatterlayer .point, .scatterlayer .js-line").length]));
"""
PLOTS = {f"{name}-{kind}" for name in ("gaps", "tail", "layers", "tokens") for kind in ("recorded", "simulated")}
on_all_screens = pytest.mark.parametrize(
    "screen", [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")], indirect=True
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = stored_mismatch()
    stored["model"]["name"] = EVIL
    stored["data"]["engine"] = EVIL + "x" * 150
    stored["rows"][4]["router"] = EVIL
    return write_mismatch(report_of(stored), tmp_path_factory.mktemp("mismatch") / "page.html")


@on_all_screens
def test_a_page_by_hand_is_drawn_fits_and_is_silent(screen: Any, page: Path) -> None:
    visit(screen, page)
    WebDriverWait(screen, 20).until(lambda browser: all(browser.execute_script(DRAWN).values()))
    assert set(screen.execute_script(DRAWN)) == PLOTS
    width = screen.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] <= width[1]
    edges = "return [...document.querySelectorAll('.plot .main-svg')].map((part) => part.getBoundingClientRect().right)"
    assert max(screen.execute_script(edges)) <= width[1]
    dark = screen.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    ground = "return document.getElementById('plot-tail-simulated')._fullLayout.paper_bgcolor"
    assert screen.execute_script(ground) == ("#14171b" if dark else "#ffffff")
    colours = "return document.getElementById('plot-tail-simulated')._fullData.map((trace) => trace.line.color)"
    assert len(set(screen.execute_script(colours))) == 3
    assert screen.find_elements("css selector", "img") == []
    assert screen.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in screen.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
