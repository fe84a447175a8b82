"""The page in headless Chromium: does it draw, filter, fit, and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import EVIL, check_page, open_tab, require_fit, require_no_title_cut_off, visit, wait
from report.stored import SNAPSHOTS, parse, stored_costs, stored_images
from report.test_domain_page import stored_domains
from report.test_sweep_page import stored_sweep

from holdfast.report import write_report

pytestmark = pytest.mark.slow  # starts a browser


ROUTERS = ("smoe", "smooth", EVIL)

# Visible traces by plot: how many plotly has drawn, and of which routers.
DRAWN = """
const PLOTS = "[role=tabpanel]:not([hidden]) .plot:not(#plot-graph, #plot-curves)";
const shown = (plot) => plot._fullData.filter((trace) => trace.visible === true);
return Object.fromEntries([...document.querySelectorAll(PLOTS)].map((plot) => [plot.dataset.plot, {
  drawn: plot.querySelectorAll(".scatterlayer .trace").length,
  shapes: plot.querySelectorAll(".scatterlayer .point, .scatterlayer .js-line").length,
  routers: [...new Set(shown(plot).map((trace) => trace.meta.router))],
  colours: [...new Set(shown(plot).filter(({ mode }) => mode !== "none") // a band
    .map((trace) => trace.meta.router + " " + (trace.marker ?? trace.line).color))],
}]));
"""
PLOTS = {"clean-attacked", "differences", "training", "load", "entropy", "near-ties"}
PLOTS |= {"cost", "every-attack", "validation", "consistency", "price", "training-level", "validation-level"}
OF_BASELINE = {"training-level", "validation-level"}
OF_OTHERS = {"differences", "training", "validation"}
TABS = ("result", "cost", "training", "routing", "explorer", "method")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    kinds = {
        "texts": stored_costs(ROUTERS),
        "images": stored_images(ROUTERS),
        "sweep": stored_sweep(values=(EVIL.partition("</")[0], 2, 3)),
        "domains": stored_domains(domains=("photo", "sketch", EVIL)),
    }
    return {name: write_report(parse(content), folder / f"{name}.html") for name, content in kinds.items()}


@pytest.fixture
def browser(screen: Any, pages: dict[str, Path]) -> Any:
    visit(screen, pages["texts"])
    return screen


def drawn(browser: Any) -> dict[str, dict[str, Any]]:
    """Return the plots of all tabs; in the end the first tab is open."""
    found: dict[str, dict[str, Any]] = {}
    for name in (*TABS[1:], TABS[0]):
        open_tab(browser, name)
        found |= browser.execute_script(DRAWN)
    return found


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def test_every_plot_is_drawn_and_the_console_is_silent(browser: Any) -> None:
    found = drawn(browser)
    assert set(found) == PLOTS
    for name, plot in found.items():
        assert plot["drawn"] > 0 and plot["shapes"] > 0, name
        assert plot["routers"] == ([1, 2] if name in OF_OTHERS else [0] if name in OF_BASELINE else [0, 1, 2]), name


def test_no_button_sends_a_plot_anywhere(browser: Any) -> None:
    titles = "return [...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)"
    assert set(browser.execute_script(titles)) <= {"Download plot as a PNG", "Download plot as a png", "Reset axes"}


def test_a_click_on_a_router_hides_it_everywhere_and_another_brings_it_back(browser: Any) -> None:
    before = drawn(browser)
    click(browser, ".chip[data-router='1']")
    after = drawn(browser)
    for name in PLOTS - OF_BASELINE:
        assert 1 not in after[name]["routers"] and 2 in after[name]["routers"], name
        assert after[name]["drawn"] < before[name]["drawn"], name
    rows = "return [...document.querySelectorAll('tr[data-router]')].map((row) => [row.dataset.router, row.hidden])"
    found = browser.execute_script(rows)
    assert {router for router, _ in found} == {"0", "1", "2"} and len(found) == 3 * 5
    assert all(hidden == (router == "1") for router, hidden in found)
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
    open_tab(browser, "routing")
    ask = "return document.getElementById('plot-near-ties')._fullData.filter((t) => t.visible).map((t) => t.meta.layer)"
    assert browser.execute_script(ask) == ["all"] * 3
    click(browser, "#layer option[value='1']")
    assert browser.execute_script(ask) == ["1"] * 3


def test_a_router_has_one_colour_in_all_plots(browser: Any) -> None:
    colours = {colour for plot in drawn(browser).values() for colour in plot["colours"]}
    assert len(colours) == len(ROUTERS)


@pytest.mark.parametrize("page", ["texts", "images", "sweep", "domains"])
def test_a_page_fits_prints_and_is_silent(screen: Any, pages: dict[str, Path], page: str) -> None:
    parts = ".plot .main-svg, .piece, select:not(nav *), .strip td"
    check_page(screen, pages[page], parts, "clean-attacked")
    for tab in screen.find_elements("css selector", "[role=tab]"):
        tab.click()
        require_fit(screen, parts)


def test_no_axis_title_is_cut_off(browser: Any) -> None:
    for tab in TABS:
        open_tab(browser, tab)
        require_no_title_cut_off(browser)


def test_a_name_is_shown_as_it_is_written(browser: Any) -> None:
    assert browser.find_element("css selector", ".chip[data-router='2']").text.endswith(EVIL)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#plot-clean-attacked .ytick')].map((t) => t.textContent)"
    )
    assert EVIL in [label.strip() for label in labels]


def test_the_graph_prints_light_and_within_the_page(browser: Any) -> None:
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    layout = "const plot = document.getElementById('plot-graph')._fullLayout; return [plot.paper_bgcolor, plot.width]"
    assert browser.execute_script(layout) == ["#ffffff", 660]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")


def corners(browser: Any) -> list[float]:
    """The first entries of the heat maps, once plotly has drawn them."""
    plot = "document.getElementById('plot-graph')"
    found: list[float] = browser.execute_script(f"return {plot}._fullData.map((trace) => trace.z[0][0])")
    images = f"return {plot}.querySelectorAll('.heatmaplayer image').length"
    wait(browser, lambda browser: browser.execute_script(images) == len(found))
    return found


def note(browser: Any, section: str) -> str:
    return str(browser.find_element("css selector", f"#{section} .shown-layer").text)


def test_there_is_a_heat_map_for_each_snapshot_on_one_scale(browser: Any) -> None:
    open_tab(browser, "routing")
    assert corners(browser) == [0.0, 0.1, 0.2] and note(browser, "graph") == "layer 0"
    ask = "return document.getElementById('plot-graph')._fullLayout.annotations.map((title) => title.text)"
    assert browser.execute_script(ask) == [f"step {step}" for step in SNAPSHOTS]
    scale = "const {cmin, cmax} = document.getElementById('plot-graph')._fullLayout.coloraxis; return [cmin, cmax]"
    assert browser.execute_script(scale) == [0, 0.5]
    square = "const {xaxis, yaxis} = document.getElementById('plot-graph')._fullLayout; return xaxis._length - yaxis._length"
    assert abs(browser.execute_script(square)) < 1


def test_heat_maps_do_not_overlap(browser: Any) -> None:
    open_tab(browser, "routing")
    corners(browser)  # once they are drawn
    overlapping = """
    const maps = document.querySelectorAll("#plot-graph .heatmaplayer image");
    const boxes = [...maps].map((map) => map.getBoundingClientRect());
    return boxes.flatMap((one, at) => boxes.slice(at + 1).filter((other) =>
      one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)).length;
    """
    assert browser.execute_script(overlapping) == 0


def test_the_layer_and_the_router_choose_the_graph(browser: Any) -> None:
    open_tab(browser, "routing")
    click(browser, "#layer option[value='1']")
    assert corners(browser) == [0.3, 0.4, 0.5] and note(browser, "graph") == "layer 1"
    click(browser, "#graph-router option[value='1']")
    assert corners(browser) == [0.31, 0.41, 0.51]
    assert "smooth" in browser.find_element("css selector", "#graph .caption").text


def test_the_graph_of_a_hidden_router_gives_way_and_comes_back(browser: Any) -> None:
    open_tab(browser, "routing")
    click(browser, "#graph-router option[value='1']")
    click(browser, ".chip[data-router='1']")
    assert corners(browser) == [0.0, 0.1, 0.2]
    assert not browser.find_element("css selector", "#graph-router option[value='1']").is_enabled()
    assert browser.find_element("css selector", "#graph-router").get_attribute("value") == "0"
    click(browser, ".chip[data-router='1']")
    assert corners(browser) == [0.01, 0.11, 0.21]


def test_a_window_without_width_leaves_the_console_silent(browser: Any) -> None:
    open_tab(browser, "routing")
    browser.execute_script("document.body.hidden = true; dispatchEvent(new Event('resize')); document.body.hidden = false")
    browser.execute_script("dispatchEvent(new Event('resize'))")
    assert corners(browser) == [0.0, 0.1, 0.2]


SHOWN_CURVES = """
const plot = document.getElementById("plot-curves");
return plot._fullData.filter((trace) => trace.visible === true).map((trace) => [trace.xaxis, trace.meta.router, trace.y]);
"""


def choose(browser: Any, measure: str) -> list[tuple[str, int, list[float]]]:
    """Choose a measure; return the panel, the router and the values of every curve that is shown."""
    (option,) = [one for one in browser.find_elements("css selector", "#curve-measure option") if one.text == measure]
    option.click()
    return [(panel, router, list(values)) for panel, router, values in browser.execute_script(SHOWN_CURVES)]


def test_the_curves_of_a_measure_have_a_panel_for_each_layer(browser: Any) -> None:
    open_tab(browser, "training")
    found = choose(browser, "entropy")
    assert [(panel, router) for panel, router, _ in found] == [(f"x{at}", router) for at in ("", 2) for router in range(3)]
    click(browser, ".chip[data-router='0']")
    widths = choose(browser, "strip width")
    assert [(panel, router) for panel, router, _ in widths] == [("x", 1), ("x2", 1)]
    assert widths[0][2] == pytest.approx([0.03, 0.05, 0.07])
    assert "smooth router adds experts" in browser.find_element("css selector", "#curves .caption").text
    click(browser, "#everything")


@pytest.mark.parametrize("layers", [1, 12])
def test_panels_of_layers_fit_and_do_not_overlap(screen: Any, layers: int, tmp_path: Path) -> None:
    content = stored_costs([f"router {number}" for number in range(8)])
    for cell in content["cells"]:
        first = cell["snapshots"]["layers"][0]
        cell["snapshots"]["layers"] = [first | {"layer": layer} for layer in range(layers)]
    visit(screen, write_report(parse(content), tmp_path / "many.html"))
    open_tab(screen, "training")
    boxes = """
    const ends = ({ _offset, _length }) => [_offset, _offset + _length];
    const panels = Object.values(document.getElementById("plot-curves")._fullLayout._plots);
    return panels.map(({ xaxis, yaxis }) => [...ends(xaxis), ...ends(yaxis)]);
    """
    found = screen.execute_script(boxes)
    assert len(found) == layers and len(screen.execute_script(SHOWN_CURVES)) == 8 * layers
    width = screen.execute_script("return document.getElementById('plot-curves').clientWidth")
    for place, (left, right, top, bottom) in enumerate(found):
        assert left >= 0 and right <= width and right - left > 90 and bottom - top > 90
        for other in found[place + 1 :]:
            assert left >= other[1] or other[0] >= right or top >= other[3] or other[2] >= bottom
