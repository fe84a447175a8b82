"""What a reader sees first, and how tabs, sorting and links work: with a mouse, with a keyboard, on paper."""

from pathlib import Path
from typing import Any

import pytest
from report.browsing import check_first_screen, check_page, on_all_screens, open_tab, require_fit, visit
from report.stored import parse, stored_costs
from report.test_strip import with_steadiness

from holdfast.report import write_report

pytestmark = pytest.mark.slow  # starts a browser

TABS = ["result", "cost", "training", "routing", "explorer", "method"]
ROUTERS = ["smoe", "symphony", "similarity", "ac", "smooth", "smoe, top 3"]  # of `holdfast compare` without options
SHOWN = "return [...document.querySelectorAll('[role=tabpanel]')].filter((panel) => !panel.hidden).map((panel) => panel.id)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = with_steadiness(ROUTERS)
    content["command"] = "holdfast compare --set training.steps=60 --seeds 3"
    for cell in content["cells"]:
        cell["origin"] = {"device": "CPU, x86_64", "finished": "2026-11-18T15:04:05+00:00", "seconds": 50.0}
    return write_report(parse(content), tmp_path_factory.mktemp("first") / "report.html")


@on_all_screens
def test_verdict_and_strip_are_inside_the_first_screen(screen: Any, page: Path) -> None:
    check_page(screen, page, "#strip td, #strip th, .forest, .price, #command", "clean-attacked")
    check_first_screen(screen, page, "#verdict, #strip, #strip tr, .price")
    tall = "return [...document.querySelectorAll('#strip .forest')].map((part) => part.getBoundingClientRect().height)"
    forests = screen.execute_script(tall)
    assert len(forests) == 3 * len(ROUTERS) and sum(height > 8 for height in forests) == 3 * (len(ROUTERS) - 1)


def test_the_line_below_says_when_where_how_long_and_with_what(screen: Any, page: Path) -> None:
    visit(screen, page)
    line = screen.find_element("css selector", ".made")
    for part in ("18 November 2026, 15:04 UTC", "CPU, x86_64", "15 min for 18 cells", "holdfast compare --set"):
        assert part in line.text
    screen.execute_script("window.copied = []; navigator.clipboard.writeText = async (text) => { copied.push(text); }")
    line.find_element("css selector", "button").click()
    assert screen.execute_script("return copied") == ["holdfast compare --set training.steps=60 --seeds 3"]
    assert line.find_element("css selector", "button").text == "copied"


def test_one_panel_is_shown_and_the_keyboard_moves_between_tabs(screen: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    visit(screen, page)
    assert screen.execute_script(SHOWN) == ["panel-result"]
    tab = screen.find_element("css selector", "#tab-result")
    for key, name in (
        (Keys.ARROW_RIGHT, "cost"),
        (Keys.END, "method"),
        (Keys.ARROW_RIGHT, "result"),
        (Keys.ARROW_LEFT, "method"),
    ):
        tab.send_keys(key)
        tab = screen.switch_to.active_element
        assert (tab.get_attribute("id"), screen.execute_script(SHOWN)) == (f"tab-{name}", [f"panel-{name}"])
    chosen = "return [...document.querySelectorAll('[role=tab]')].map((tab) => [tab.ariaSelected, tab.tabIndex])"
    assert screen.execute_script(chosen) == [["false", -1]] * 5 + [["true", 0]]


def test_controls_are_on_the_tabs_where_they_change_something(screen: Any, page: Path) -> None:
    visit(screen, page)
    found = {}
    for name in ("result", "routing", "method"):
        open_tab(screen, name)
        found[name] = [screen.find_element("css selector", part).is_displayed() for part in (".chip", "#layer")]
    assert found == {"result": [True, False], "routing": [True, True], "method": [False, False]}


def test_a_tab_chosen_from_far_below_begins_at_its_top(screen: Any, page: Path) -> None:
    visit(screen, page)
    screen.execute_script("scrollTo(0, document.body.scrollHeight)")
    open_tab(screen, "training")
    places = screen.execute_script(
        "return ['.bar', '#panel-training'].map((part) => document.querySelector(part).getBoundingClientRect().top)"
    )
    assert abs(places[0]) < 2 and 0 < places[1] < 200


def test_a_link_shows_the_same_tab_routers_layer_and_order(screen: Any, page: Path) -> None:
    visit(screen, page)
    assert screen.execute_script("return location.hash") == ""
    open_tab(screen, "routing")
    screen.find_element("css selector", ".chip[data-router='5']").click()
    screen.find_element("css selector", "#layer option[value='1']").click()
    order(screen, "#strip", 1)
    link = screen.current_url
    assert link.endswith("#tab=routing&hide=smoe%2C+top+3&layer=1&sort=strip.1.rising")
    screen.get("about:blank")
    screen.get(link)
    assert screen.execute_script(SHOWN) == ["panel-routing"]
    assert screen.execute_script("return document.getElementById('layer').value") == "1"
    pressed = "return [...document.querySelectorAll('.chip')].map((chip) => chip.ariaPressed)"
    assert screen.execute_script(pressed) == ["true"] * 5 + ["false"]
    assert names(screen, "#strip")[0] == "symphony"
    traces = "document.getElementById('plot-load')._fullData.filter((trace) => trace.visible)"
    layers = f"return {traces}.map((trace) => trace.meta.layer)"
    assert set(screen.execute_script(layers)) == {"1"}
    screen.execute_script("location.hash = ''")
    assert screen.execute_script(SHOWN) == ["panel-result"] and screen.execute_script(pressed) == ["true"] * 6
    assert names(screen, "#strip") == ROUTERS


def order(browser: Any, table: str, column: int) -> None:
    """Sort by a column as a reader would: with its head, or on a phone with the list of columns."""
    heads = browser.find_elements("css selector", f"{table} thead .sort")
    if heads[column].is_displayed():
        heads[column].click()
    else:
        label = browser.execute_script("return document.querySelector(arguments[0]).previousElementSibling", table)
        label.find_element("css selector", f"option[value='{column}']").click()


def names(browser: Any, table: str) -> list[str]:
    ask = f"return [...document.querySelectorAll('{table} tbody th')].map((head) => head.lastChild.textContent.trim())"
    found: list[str] = browser.execute_script(ask)
    return ["smoe" if name == "baseline" else name for name in found]


def test_the_strip_is_sorted_with_the_best_first_and_the_worst_first(screen: Any, page: Path) -> None:
    visit(screen, page)
    button = "document.querySelectorAll('#strip thead .sort')[3]"
    for best, order_now in (("symphony", "ascending"), ("symphony", "descending")):
        screen.execute_script(f"{button}.click()")
        assert screen.execute_script(f"return {button}.parentElement.ariaSort") == order_now
        assert names(screen, "#strip")[0 if order_now == "ascending" else -1] == best


def test_tables_are_sorted_by_any_column(screen: Any, page: Path) -> None:
    visit(screen, page)
    table = "#panel-result .sheet table"
    columns = screen.execute_script(
        f"return [...document.querySelectorAll('{table} thead th')].map((h) => h.textContent.trim())"
    )
    assert names(screen, table)[:6] == ROUTERS
    order(screen, table, columns.index("experts per token"))
    assert names(screen, table)[5] == "symphony"
    order(screen, table, columns.index("router"))
    assert names(screen, table)[:6] == sorted(ROUTERS)
    order(screen, table, columns.index("clean, difference"))
    assert names(screen, table)[0] == "symphony"


def test_paper_has_all_tabs_with_their_plots(screen: Any, page: Path) -> None:
    visit(screen, page)
    open_tab(screen, "method")
    screen.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert screen.execute_script(SHOWN) == [f"panel-{name}" for name in TABS]
    plots = "[...document.querySelectorAll('.plot')]"
    empty = f"return {plots}.filter((plot) => !plot.querySelector('.main-svg')).map((plot) => plot.id)"
    assert screen.execute_script(empty) == []
    screen.execute_script("dispatchEvent(new Event('afterprint'))")
    assert screen.execute_script(SHOWN) == ["panel-method"]


def test_a_page_without_javascript_hides_nothing(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    panels = html.split("<main>")[1].split("</main>")[0]
    filled_by_script = '<p class="x-legend" hidden></p>'  # of the Explorer, empty before
    assert panels.count('role="tabpanel"') == len(TABS) and " hidden" not in panels.replace(filled_by_script, "")


def test_fifty_routers_fit_into_a_page_that_can_be_sent(screen: Any, tmp_path: Path) -> None:
    content = stored_costs([f"router-{number}" for number in range(50)], seeds=5)
    for cell in content["cells"]:
        first = cell["snapshots"]["layers"][0]
        graphs = [[[0.123] * 32 for _ in range(32)] for _ in first["graphs"]]
        cell["snapshots"]["layers"] = [first | {"layer": layer, "graphs": graphs} for layer in range(4)]
    page = write_report(parse(content), tmp_path / "many.html")
    assert page.stat().st_size < 8e6
    visit(screen, page)
    box = screen.execute_script("return document.querySelector('.strip-box').getBoundingClientRect().bottom")
    assert box < 844 and len(screen.find_elements("css selector", "#strip tbody tr")) == 50
    require_fit(screen)
