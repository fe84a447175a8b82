"""The page of an audit in headless Chromium: does it draw, fit, and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.audited import at_risk, layer, perturbed, report_of, stored_audit
from report.browsing import EVIL, check_page, drawn, visit
from report.geometries import piece

from holdfast.report import write_audit

pytestmark = pytest.mark.slow  # starts a browser

LAYERS = 12
PLOTS = ("flips", "radii", "undecided", "load", "near-ties", "slice")  # the last two only in the large audit


def large() -> dict[str, Any]:
    """Many layers, names that are long or evil, tokens that are one long word."""
    stored = stored_audit()
    stored["layers"] = [layer(number) for number in range(LAYERS)]
    stored["model"]["name"] = EVIL
    near = [{"order": 1, "shares": [0.1]}, {"order": 2, "shares": [0.01]}]
    for each in stored["layers"]:
        each["boundaries"] = {"tokens": 256, "widths": [0.01], "exact": True, "orders": near}
    stored["layers"][3]["boundaries"]["slice"] = piece("boundaries", tokens=[{"token": 0, "x": 0.0, "y": 0.0, "text": EVIL}])
    stored["perturbations"]["noise.0.01"] = perturbed("noise", *(0.05 * number for number in range(LAYERS)))
    stored["perturbations"][f"batch.{EVIL}{'x' * 80}"] = perturbed(EVIL, *[0.5] * LAYERS, harmless=True)
    stored["at_risk"] += [at_risk(0.0, EVIL, f"a {EVIL} b"), at_risk(0.0, "a" * 500, "b" * 300 + "a" * 500)]
    return stored


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audit")
    kinds = {"small": stored_audit(), "large": large()}
    return {name: write_audit(report_of(stored), folder / f"{name}.html") for name, stored in kinds.items()}


@pytest.fixture(params=["small", "large"])
def browser(screen: Any, pages: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    visit(screen, pages[request.param])
    return screen


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_page_fits_prints_and_is_silent(screen: Any, pages: dict[str, Path], name: str) -> None:
    check_page(screen, pages[name], ".plot .main-svg, .piece, .context, .findings li", "flips")


def test_every_plot_is_drawn(browser: Any) -> None:
    assert {"flips", "radii", "undecided", "load"} <= set(drawn(browser)) <= {*PLOTS}
    names = "return [...document.querySelectorAll('#plot-undecided .legendtext')].map((text) => text.textContent)"
    assert browser.execute_script(names) == ["bf16", "fp16"]


def test_no_title_is_cut_off_or_lies_over_numbers(browser: Any) -> None:
    drawn(browser)
    outside = """
    return [...document.querySelectorAll(".plot .xtitle, .plot .ytitle, .plot .cbtitle text")].filter((title) => {
      const inner = title.getBoundingClientRect(), outer = title.closest(".plot").getBoundingClientRect();
      return inner.left < outer.left || inner.right > outer.right || inner.top < outer.top || inner.bottom > outer.bottom;
    }).map((title) => title.textContent);
    """
    assert browser.execute_script(outside) == []
    over = """
    return [...document.querySelectorAll(".plot")].filter((plot) => {
      const title = plot.querySelector(".xtitle").getBoundingClientRect();
      const ticks = [...plot.querySelectorAll(".xtick text")].map((tick) => tick.getBoundingClientRect().bottom);
      return title.bottom < Math.max(...ticks) + 2;
    }).map((plot) => plot.id);
    """
    assert browser.execute_script(over) == []


def test_a_layer_can_be_chosen(browser: Any) -> None:
    ask = "return document.getElementById('plot-radii')._fullData.filter((t) => t.visible).map((t) => t.meta.layer)"
    assert browser.execute_script(ask) == ["all"]
    browser.find_element("css selector", "#layer option[value='1']").click()
    assert browser.execute_script(ask) == ["1"]
    assert browser.find_element("css selector", ".layer").text == "layer 1"
    assert browser.get_log("browser") == []
