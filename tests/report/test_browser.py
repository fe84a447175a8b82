"""The page in headless Chromium: does it draw, filter, fit, and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import check_page, visit
from report.stored import SNAPSHOTS, parse, stored_costs, stored_images

from holdfast.report import write_report
from holdfast.report.page_shell import COLOURS

pytestmark = pytest.mark.slow  # starts a browser

WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait

EVIL = '<img src=x onerror="alert(1)">%{x}<b>'
ROUTERS = ("smoe", "smooth", EVIL)
PIECES = ["Return", "<script>alert(1)</script>", EVIL, "</script>", "\"'", "שלום\u202e", "two\nlines\r\n", "", "a" * 500]
SHOWN_PIECES = [*PIECES[:6], "two↵lines↵", *PIECES[7:]]

# Visible traces by plot: how many plotly has drawn, and of which routers.
DRAWN = """
const shown = (plot) => plot._fullData.filter((trace) => trace.visible === true);
return Object.fromEntries([...document.querySelectorAll(".plot:not(#plot-graph)")].map((plot) => [plot.dataset.plot, {
  drawn: plot.querySelectorAll(".scatterlayer .trace").length,
  shapes: plot.querySelectorAll(".scatterlayer .point, .scatterlayer .js-line").length,
  routers: [...new Set(shown(plot).map((trace) => trace.meta.router))],
  colours: [...new Set(shown(plot).map((trace) => trace.meta.router + " " + (trace.marker ?? trace.line).color))],
}]));
"""
PLOTS = {"clean-attacked", "differences", "training", "load", "entropy", "near-ties"}
PLOTS |= {"cost", "every-attack", "fluctuation", "consistency"}


def texts() -> dict[str, Any]:
    """In the second layer, experts have numbers beyond the colours."""
    content = stored_costs(ROUTERS)
    for cell in content["cells"]:
        first = [at + ROUTERS.index(cell["router"]) for at in range(len(PIECES))]
        second = [len(COLOURS) + expert for expert in first]
        cell["view"] = {"kind": "text", "pieces": PIECES, "experts": [first, second]}
    return content


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    kinds = {"texts": texts(), "images": stored_images(ROUTERS)}
    return {name: write_report(parse(content), folder / f"{name}.html") for name, content in kinds.items()}


@pytest.fixture
def browser(screen: Any, pages: dict[str, Path]) -> Any:
    visit(screen, pages["texts"])
    return screen


@pytest.fixture
def images(screen: Any, pages: dict[str, Path]) -> Any:
    visit(screen, pages["images"])
    return screen


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
    assert [row.is_displayed() for row in rows] == [True, False, True] * 3
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


@pytest.mark.parametrize("page", ["texts", "images"])
def test_a_page_fits_prints_and_is_silent(screen: Any, pages: dict[str, Path], page: str) -> None:
    check_page(screen, pages[page], ".plot .main-svg, .piece, .patch, .image, canvas, select:not(nav *)", "training")


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
    WebDriverWait(browser, 10).until(lambda browser: browser.execute_script(images) == len(found))
    return found


def note(browser: Any, section: str) -> str:
    return str(browser.find_element("css selector", f"#{section} .shown-layer").text)


def test_there_is_a_heat_map_for_each_snapshot_on_one_scale(browser: Any) -> None:
    assert corners(browser) == [0.0, 0.1, 0.2] and note(browser, "graph") == "layer 0"
    ask = "return document.getElementById('plot-graph')._fullLayout.annotations.map((title) => title.text)"
    assert browser.execute_script(ask) == [f"step {step}" for step in SNAPSHOTS]
    scale = "const {cmin, cmax} = document.getElementById('plot-graph')._fullLayout.coloraxis; return [cmin, cmax]"
    assert browser.execute_script(scale) == [0, 0.5]
    square = "const {xaxis, yaxis} = document.getElementById('plot-graph')._fullLayout; return xaxis._length - yaxis._length"
    assert abs(browser.execute_script(square)) < 1


def test_heat_maps_do_not_overlap(browser: Any) -> None:
    corners(browser)  # once they are drawn
    overlapping = """
    const maps = document.querySelectorAll("#plot-graph .heatmaplayer image");
    const boxes = [...maps].map((map) => map.getBoundingClientRect());
    return boxes.flatMap((one, at) => boxes.slice(at + 1).filter((other) =>
      one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)).length;
    """
    assert browser.execute_script(overlapping) == 0


def test_the_layer_and_the_router_choose_the_graph(browser: Any) -> None:
    click(browser, "#layer option[value='1']")
    assert corners(browser) == [0.3, 0.4, 0.5] and note(browser, "graph") == "layer 1"
    click(browser, "#graph-router option[value='1']")
    assert corners(browser) == [0.31, 0.41, 0.51]
    assert "smooth" in browser.find_element("css selector", "#graph .caption").text
    assert browser.get_log("browser") == []


def test_the_graph_of_a_hidden_router_gives_way_and_comes_back(browser: Any) -> None:
    click(browser, "#graph-router option[value='1']")
    click(browser, ".chip[data-router='1']")
    assert corners(browser) == [0.0, 0.1, 0.2]
    assert not browser.find_element("css selector", "#graph-router option[value='1']").is_enabled()
    assert browser.find_element("css selector", "#graph-router").get_attribute("value") == "0"
    click(browser, ".chip[data-router='1']")
    assert corners(browser) == [0.01, 0.11, 0.21]


def test_a_window_without_width_leaves_the_console_silent(browser: Any) -> None:
    browser.execute_script("document.body.hidden = true; dispatchEvent(new Event('resize')); document.body.hidden = false")
    browser.execute_script("dispatchEvent(new Event('resize'))")
    assert corners(browser) == [0.0, 0.1, 0.2]
    assert browser.get_log("browser") == []


def painted(browser: Any, router: int, kind: str) -> list[list[str]]:
    """What a view's parts say, their tooltips, grounds and borders."""
    ask = """
    return [...document.querySelectorAll(arguments[0])].map((part) => {
      const style = getComputedStyle(part);
      return [part.textContent, part.title, style.backgroundColor, style.borderTopStyle];
    });
    """
    found: list[list[str]] = browser.execute_script(ask, f".view[data-router='{router}'] .{kind}")
    return found


def rgb(expert: int) -> str:
    colour = COLOURS[expert % len(COLOURS)]
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_every_piece_is_text_in_the_colour_of_its_expert(browser: Any) -> None:
    for router in range(len(ROUTERS)):
        found = painted(browser, router, "piece")
        assert [text for text, *_ in found] == SHOWN_PIECES
        experts = [at + router for at in range(len(PIECES))]
        assert [title for _, title, *_ in found] == [f"expert {expert}" for expert in experts]
        assert [ground for *_, ground, _ in found] == [rgb(expert) for expert in experts]
    assert browser.find_elements("css selector", "img") == []
    assert browser.get_log("browser") == []


def test_another_layer_has_other_experts_and_repeated_colours_get_a_border(browser: Any) -> None:
    assert {border for *_, border in painted(browser, 1, "piece")} == {"solid"} and note(browser, "views") == "layer 0"
    click(browser, "#layer option[value='1']")
    found = painted(browser, 1, "piece")
    assert found[2][1:] == [f"expert {len(COLOURS) + 3}", rgb(3), "dashed"] and note(browser, "views") == "layer 1"
    click(browser, "#layer option[value='all']")
    assert painted(browser, 1, "piece")[2][1:] == ["expert 3", rgb(3), "solid"]


def test_the_legend_shows_every_expert_in_its_colour(browser: Any) -> None:
    ask = """return [...document.querySelectorAll(".legend .piece")].map((part) =>
      [part.textContent, getComputedStyle(part).backgroundColor, getComputedStyle(part).borderTopStyle])"""
    assert browser.execute_script(ask) == [
        [str(expert), rgb(expert), "solid" if expert < len(COLOURS) else "dashed"] for expert in (*range(11), *range(16, 27))
    ]


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_hiding_a_router_hides_its_view(screen: Any, pages: dict[str, Path], kind: str) -> None:
    visit(screen, pages[kind])
    views = screen.find_elements("css selector", ".view")
    click(screen, ".chip[data-router='1']")
    assert [view.is_displayed() for view in views] == [True, False, True]
    click(screen, "#everything")
    assert [view.is_displayed() for view in views] == [True, True, True]


def test_an_image_is_drawn_under_the_colours_of_its_patches(images: Any) -> None:
    grey = """return [...document.querySelectorAll(".view[data-router='2'] canvas")].map((canvas) =>
      [canvas.width, canvas.height, ...canvas.getContext("2d").getImageData(0, 0, 3, 1).data])"""
    black, white = [0, 0, 0, 255], [255, 255, 255, 255]
    assert images.execute_script(grey) == [[6, 4, *white, *black, *black], [6, 4, *black, *white, *black]]
    found = painted(images, 2, "patch")
    assert [title for _, title, *_ in found] == [f"expert {at}" for at in (0, 1, 2, 3, 0, 1, 1, 2, 3, 0, 1, 2)]
    assert [ground for *_, ground, _ in found][:4] == [rgb(expert) for expert in range(4)]
    click(images, "#layer option[value='1']")
    assert [title for _, title, *_ in painted(images, 2, "patch")][:3] == ["expert 1", "expert 2", "expert 3"]
    captions = [found.text for found in images.find_elements("css selector", ".view[data-router='0'] figcaption")]
    assert captions == ["3", "8, predicted 5"]
    assert images.get_log("browser") == []


def test_patches_cover_the_image_row_by_row(images: Any) -> None:
    ask = """
    const box = (part) => part.getBoundingClientRect(), image = document.querySelector(".patches");
    const whole = box(image.querySelector("canvas"));
    return [...image.querySelectorAll(".patch")].map(box).map(({ left, top, width, height }) => [
      (left - whole.left) / whole.width, (top - whole.top) / whole.height, width / whole.width, height / whole.height]);
    """
    boxes = [[column / 3, row / 2, 1 / 3, 1 / 2] for row in range(2) for column in range(3)]
    assert images.execute_script(ask) == [pytest.approx(box, abs=0.02) for box in boxes]
