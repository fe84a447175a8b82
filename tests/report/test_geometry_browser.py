"""The page of a geometry report in headless Chromium, also for the model of `make demo`: does it draw, fit, stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import EVIL, check_page, drawn, on_all_screens, visit
from report.geometries import measured, report_of, stored_geometry

from holdfast.auditing import GeometryReport
from holdfast.report import write_geometry
from holdfast_command import main

pytestmark = pytest.mark.slow  # starts a browser

SLICES = {"slice-boundaries-0", "slice-boundaries-1", "slice-tokens-0", "slice-tokens-1"}
CURVES = {"along", "difference", "ties", "hitting", "tsne"}


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = stored_geometry()
    stored["layers"][0]["pictures"]["slices"][0]["tokens"][0]["text"] = EVIL
    stored["layers"][0]["jumps"]["largest"][0] |= {"text": EVIL + "x" * 300}
    stored["model"]["name"] = EVIL
    stored["layers"].append(measured(3))
    return write_geometry(report_of(stored), tmp_path_factory.mktemp("geometry") / "page.html")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the cell that `make demo` audits, and measure it with 4,096 tokens."""
    folder = tmp_path_factory.mktemp("demo")
    trained = ["compare", "--routers", "smoe", "--seeds", "1", "--no-match-compute", "--out", str(folder / "demo")]
    assert main(trained) == 0
    assert main(["geometry", str(folder / "demo/cells/smoe-seed0"), "--out", str(folder / "out")]) == 0
    report = GeometryReport.load(folder / "out" / "geometry.json")
    assert report.data.tokens >= 4000 and len(report.layers) == 2 and not report.refused
    return folder / "out" / "geometry.html"


def check(browser: Any, page: Path, other: str) -> None:
    """Everything is drawn inside the screen, for the first layer and for another one, and the console is silent."""
    check_page(browser, page, ".plot .main-svg, .piece", "ties")
    assert set(drawn(browser)) == SLICES | CURVES
    browser.find_element("css selector", f"#layer option[value='{other}']").click()
    drawn(browser)
    shown = "return document.getElementById('plot-ties')._fullData.filter((t) => t.visible).map((t) => t.meta.layer)"
    assert set(browser.execute_script(shown)) == {other}
    texts = "return [...document.querySelectorAll('#jumps li')].filter((li) => !li.hidden).map((li) => li.dataset.layer)"
    assert set(browser.execute_script(texts)) == {other}


@on_all_screens
def test_a_page_by_hand_is_drawn_and_silent(screen: Any, by_hand: Path) -> None:
    check(screen, by_hand, "3")


@on_all_screens
def test_the_page_of_the_demos_model_is_drawn_and_silent(screen: Any, demo: Path) -> None:
    check(screen, demo, "1")


@on_all_screens
def test_cells_have_the_colours_of_the_theme_and_can_be_zoomed(screen: Any, by_hand: Path) -> None:
    visit(screen, by_hand)
    drawn(screen)
    dark = screen.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    asked = "return document.getElementById('plot-slice-tokens-0')._fullData[0].colorscale.map((step) => step[1])"
    themes = "return JSON.parse(document.getElementById('figures').textContent).themes"
    colours = set(screen.execute_script(themes)["dark" if dark else "light"]["cells"])
    found = set(screen.execute_script(asked))
    assert len(found) == 3 and found <= colours
    hover = "return document.getElementById('plot-slice-tokens-0')._fullData[0].text[3]"
    assert screen.execute_script(hover) == ["{1, 2}"] * 4
    touch = screen.execute_script("return matchMedia('(pointer: coarse)').matches")
    mode = "return document.getElementById('plot-slice-tokens-0')._fullLayout.dragmode"
    assert screen.execute_script(mode) == (False if touch else "zoom")
