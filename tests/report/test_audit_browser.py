"""The page of an audit in headless Chromium: does it draw, fit, and stay quiet?"""

from pathlib import Path
from typing import Any

import pytest
from report.audited import at_risk, layer, pair, perturbed, report_of, stored_audit
from report.browsing import (
    COVERED,
    EVIL,
    check_first_screen,
    check_page,
    drawn,
    on_all_screens,
    open_tab,
    require_no_title_cut_off,
    visit,
)
from report.geometries import piece
from report.routes import stored_routes

from holdfast.report import write_audit
from holdfast.report.first_screen import MOST_ROWS, first_screen

pytestmark = pytest.mark.slow  # starts a browser

LAYERS = 12
CHANGED = ("model.bf16", "attack", "words", "typos", "noise.0.05", "noise.0.01", "backend", "routing.bf16", "routing.fp16")
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
    stored["view"]["routes"] = stored_routes(8, LAYERS, flips=(1, 4))
    stored["what_if"]["routes"] = stored_routes(8, LAYERS, 1, flips=())
    stored["at_risk"] += [at_risk(0.0, EVIL, f"a {EVIL} b"), at_risk(0.0, "a" * 500, "b" * 300 + "a" * 500)]
    return stored


def whole() -> dict[str, Any]:
    """Return an audit with all perturbations: some change nothing, and more change something than fit on a first screen."""
    stored = stored_audit()
    stored["perturbations"] = {name: perturbed(name, 0.0, 0.0, harmless=True) for name in ("none", "batch.alone")}
    stored["data"]["source"] = {"name": "python-docs"}
    other = stored["what_if"]
    for place, name in enumerate(CHANGED):
        share = 0.3 / 3**place
        stored["perturbations"][name] = perturbed(f"the perturbation {name}", share, share / 2)
        loss = {"before": 2.0, "after": 2.0 + share, "change": share, "size": share}
        stored["perturbations"][name]["overall"] |= {"prediction_flips": share, "predictions": 4670, "loss": loss}
        other["prediction_flips"][name] = pair(share, share * (0.5, 1.0, 1.6)[place % 3])
        other["flip_output"][name], other["output"][name] = pair(share / 4, share / 500), pair(share, share)
        other["flips"][name] = pair(share, share)
    for measure in ("flips", "flip_output", "output", "prediction_flips"):
        other[measure]["none"] = other[measure]["batch.alone"] = pair(0.0, 0.0)
        del other[measure]["noise.0.01"]
    return stored


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audit")
    kinds = {"small": stored_audit(), "large": large(), "whole": whole(), "plain": whole() | {"what_if": None}}
    return {name: write_audit(report_of(stored), folder / f"{name}.html") for name, stored in kinds.items()}


@pytest.fixture(params=["small", "large"])
def browser(screen: Any, pages: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    visit(screen, pages[request.param])
    return screen


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_page_fits_prints_and_is_silent(screen: Any, pages: dict[str, Path], name: str) -> None:
    check_page(screen, pages[name], ".plot .main-svg, .piece, .context, .findings li", "flips")


@on_all_screens
def test_the_answer_and_its_price_are_inside_the_first_screen(screen: Any, pages: dict[str, Path]) -> None:
    wide = screen.execute_script("return innerWidth") > 1000
    figures = "#answer .dots" if wide else "#answer .dots:first-child"
    check_first_screen(screen, pages["whole"], f"#verdict, #answer .further, #answer .tiles, {figures}")
    assert screen.find_element("id", "verdict").text.startswith("With smooth, predictions change less often under")
    assert wide == (len(screen.find_elements("css selector", figures)) == 2)
    first = first_screen(report_of(whole()), [])
    tiles = [tile.text.split("\n") for tile in screen.find_elements("css selector", ".tiles li")]
    assert [" ".join(tile) for tile in tiles] == [f"{tile.name} {tile.value} {tile.note}" for tile in first.tiles]
    values = [value.text for value in screen.find_elements("css selector", ".dots .value")]
    assert values == [f"{row.text} {row.mark}" for plot in first.plots for row in plot.rows] and len(values) == 2 * MOST_ROWS
    colours = "return [...document.querySelectorAll('.dots:first-child .after')].map((dot) => getComputedStyle(dot).color)"
    marks = [row.mark for row in first.plots[0].rows]
    assert set(marks) == {"▼", "▲", "≈"}
    borders = colours.replace(".color", ".borderTopColor")
    assert len(set(zip(marks, screen.execute_script(borders), strict=True))) == 3


@on_all_screens
def test_a_dot_is_where_its_number_is(screen: Any, pages: dict[str, Path]) -> None:
    visit(screen, pages["whole"])
    middles = """
    return [...document.querySelectorAll(".dots:first-child li .track")].map((track) => {
      const outer = track.getBoundingClientRect();
      return [...track.querySelectorAll(".before, .after")].map((dot) => {
        const inner = dot.getBoundingClientRect();
        return (100 * ((inner.left + inner.right) / 2 - outer.left)) / outer.width;
      });
    });
    """
    drawn_at = screen.execute_script(middles)
    expected = [row.places for row in first_screen(report_of(whole()), []).plots[0].rows]
    assert drawn_at == [pytest.approx(list(places), abs=0.6) for places in expected]


@on_all_screens
def test_the_main_finding_and_its_picture_are_inside_the_first_screen(screen: Any, pages: dict[str, Path]) -> None:
    check_first_screen(screen, pages["plain"], "#verdict, #answer .further, #answer .dots:first-child")
    assert screen.find_element("id", "verdict").text.startswith("Severe: 30% of predictions change and the loss")
    assert screen.find_elements("css selector", ".tiles, .before, .link") == []


def test_every_plot_is_drawn_in_its_tab(browser: Any) -> None:
    assert set(drawn(browser)) == {"flips"}
    open_tab(browser, "layers")
    assert {"radii", "undecided", "load"} <= set(drawn(browser)) <= {*PLOTS}
    names = "return [...document.querySelectorAll('#plot-undecided .legendtext')].map((text) => text.textContent)"
    assert browser.execute_script(names) == ["bf16", "fp16"]


def test_the_tabs_show_one_part_each_and_keep_the_answer(browser: Any) -> None:
    parts = {"result": "#findings", "layers": "#plot-load", "explorer": "#tokens", "method": ".how"}
    tabs = [tab.text for tab in browser.find_elements("css selector", "[role=tab]")]
    assert [tab.lower() for tab in tabs] == [*parts]
    for name in parts:
        open_tab(browser, name)
        shown = [one for one, part in parts.items() if browser.find_element("css selector", part).is_displayed()]
        assert shown == [name] and browser.find_element("id", "verdict").is_displayed()
        assert browser.execute_script("return location.hash") == ("" if name == "result" else f"#tab={name}")


@pytest.mark.parametrize("tab", ["result", "layers"])
def test_no_title_is_cut_off_or_lies_over_numbers(browser: Any, tab: str) -> None:
    open_tab(browser, tab)
    drawn(browser)
    assert browser.execute_script(COVERED) == []
    require_no_title_cut_off(browser)
    over = """
    return [...document.querySelectorAll("[role=tabpanel]:not([hidden]) .plot")].filter((plot) => {
      const title = plot.querySelector(".xtitle").getBoundingClientRect();
      const ticks = [...plot.querySelectorAll(".xtick text")].map((tick) => tick.getBoundingClientRect().bottom);
      return title.bottom < Math.max(...ticks) + 2;
    }).map((plot) => plot.id);
    """
    assert browser.execute_script(over) == []


def test_a_layer_can_be_chosen(browser: Any) -> None:
    open_tab(browser, "layers")
    ask = "return document.getElementById('plot-radii')._fullData.filter((t) => t.visible).map((t) => t.meta.layer)"
    assert browser.execute_script(ask) == ["all"]
    browser.find_element("css selector", "#layer option[value='1']").click()
    assert browser.execute_script(ask) == ["1"]
    assert browser.find_element("css selector", "#title-radii .layer").text == "layer 1"
