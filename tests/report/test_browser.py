"""The page in headless Chromium: does it draw, filter, fit, and stay quiet?"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.stored import stored

from holdfast.report import write_report
from holdfast.report.results import parse

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
EVIL = '<img src=x onerror="alert(1)">%{x}<b>'
ROUTERS = ("smoe", "smooth", EVIL)

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="there is no chromium with its chromedriver")

# Visible traces by plot: how many plotly has drawn, and of which routers.
DRAWN = """
const shown = (plot) => plot._fullData.filter((trace) => trace.visible === true);
return Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.dataset.plot, {
  drawn: plot.querySelectorAll(".scatterlayer .trace").length,
  shapes: plot.querySelectorAll(".scatterlayer .point, .scatterlayer .js-line").length,
  routers: [...new Set(shown(plot).map((trace) => trace.meta.router))],
  colours: [...new Set(shown(plot).map((trace) => trace.meta.router + " " + (trace.marker ?? trace.line).color))],
}]));
"""
PLOTS = {"clean-attacked", "differences", "training", "load", "entropy", "near-ties"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(parse(stored(ROUTERS)), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER, env={**os.environ, "SE_OFFLINE": "true"}))
    yield browser
    browser.quit()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def browser(chromium: Any, path: Path, request: pytest.FixtureRequest) -> Any:
    width, theme = request.param
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    chromium.get(path.as_uri())
    return chromium


def drawn(browser: Any) -> dict[str, dict[str, Any]]:
    return browser.execute_script(DRAWN)


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def test_every_plot_is_drawn_and_the_console_is_silent(browser: Any) -> None:
    found = drawn(browser)
    assert set(found) == PLOTS
    for name, plot in found.items():
        assert plot["drawn"] > 0 and plot["shapes"] > 0, name
        assert plot["routers"] == ([1, 2] if name == "differences" else [0, 1, 2]), name
    assert browser.get_log("browser") == []


def test_nothing_but_the_file_is_asked_for(browser: Any) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert len([url for url in asked if url.startswith("file:")]) == 1
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_no_button_sends_a_plot_anywhere(browser: Any) -> None:
    titles = "return [...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)"
    assert set(browser.execute_script(titles)) <= {"Download plot as a PNG", "Download plot as a png", "Reset axes"}


def test_a_click_on_a_router_hides_it_everywhere_and_another_brings_it_back(browser: Any) -> None:
    before = drawn(browser)
    click(browser, ".chip[data-router='1']")
    after = drawn(browser)
    for name in PLOTS:
        assert 1 not in after[name]["routers"] and 2 in after[name]["routers"], name
        assert after[name]["drawn"] < before[name]["drawn"], name
    rows = browser.find_elements("css selector", "tr[data-router]")
    assert [row.is_displayed() for row in rows] == [True, False, True] * 2
    assert browser.find_element("css selector", ".chip[data-router='1']").get_attribute("aria-pressed") == "false"
    click(browser, ".chip[data-router='1']")
    assert drawn(browser) == before


def test_hiding_the_last_router_shows_all(browser: Any) -> None:
    before = drawn(browser)
    for place in range(len(ROUTERS)):
        click(browser, f".chip[data-router='{place}']")
    assert drawn(browser) == before
    click(browser, ".chip[data-router='0']")
    click(browser, "#everything")
    assert drawn(browser) == before


def test_a_layer_can_be_chosen(browser: Any) -> None:
    ask = "return document.getElementById('plot-near-ties')._fullData.filter((t) => t.visible).map((t) => t.meta.layer)"
    assert browser.execute_script(ask) == ["all"] * 3
    click(browser, "#layer option[value='1']")
    assert browser.execute_script(ask) == ["1"] * 3


def test_a_router_has_one_colour_in_all_plots(browser: Any) -> None:
    colours = {colour for plot in drawn(browser).values() for colour in plot["colours"]}
    assert len(colours) == len(ROUTERS)


def test_nothing_is_wider_than_the_screen(browser: Any) -> None:
    width = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]
    edges = "return [...document.querySelectorAll('.plot .main-svg')].map((svg) => svg.getBoundingClientRect().right)"
    assert max(browser.execute_script(edges)) <= width[1]


def test_no_axis_title_is_cut_off(browser: Any) -> None:
    outside = """
    return [...document.querySelectorAll(".plot .xtitle, .plot .ytitle")].filter((title) => {
      const inner = title.getBoundingClientRect(), outer = title.closest(".plot").getBoundingClientRect();
      return inner.left < outer.left || inner.right > outer.right || inner.top < outer.top || inner.bottom > outer.bottom;
    }).map((title) => title.textContent);
    """
    assert browser.execute_script(outside) == []


def test_a_name_is_shown_as_it_is_written(browser: Any) -> None:
    assert browser.find_element("css selector", ".chip[data-router='2']").text.endswith(EVIL)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#plot-clean-attacked .ytick')].map((t) => t.textContent)"
    )
    assert EVIL in [label.strip() for label in labels]
    assert browser.find_elements("css selector", "img") == []


def test_it_prints_light_and_within_the_page(browser: Any) -> None:
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    plot = "const plot = document.getElementById('plot-training')._fullLayout; return [plot.paper_bgcolor, plot.width]"
    assert browser.execute_script(plot) == ["#ffffff", 660]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    ground = browser.execute_script("return getComputedStyle(document.documentElement).getPropertyValue('--ground')")
    assert browser.execute_script(plot)[0] == ground.strip()
    assert browser.get_log("browser") == []
