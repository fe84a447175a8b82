"""Every kind of page is for everyone: axe-core finds nothing serious, a keyboard reaches everything, plots are texts too."""

from pathlib import Path
from typing import Any

import pytest
from report.attacked import stored_attack
from report.axe import axe as axe
from report.axe import violations_of_every_tab
from report.browsing import on_all_screens, visit, wait
from report.test_every_page import KINDS, read

from holdfast.report.attack_page import render_attack

pytestmark = pytest.mark.slow  # starts a browser


@pytest.fixture(params=["costs", "images", "audit", "geometry", "mismatch", "predictions", "attack"])
def opened(screen: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind, page = request.param, tmp_path / "page.html"
    page.write_text(render_attack(stored_attack()) if kind == "attack" else KINDS[kind][2](read(kind)), encoding="utf-8")
    visit(screen, page)
    return screen


@on_all_screens
def test_axe_finds_nothing_serious_in_any_tab(opened: Any, axe: str) -> None:
    found = violations_of_every_tab(opened, axe)
    assert not found, "\n".join(found)


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(opened: Any) -> None:
    """Controls that are one group, such as tabs, may have one stop for all: the others have the tabindex -1."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    controls = """
    const found = document.querySelectorAll("a[href], button, select, input, summary, [tabindex]");
    const seen = (one) => one.checkVisibility({ visibilityProperty: true });
    return [...found].filter((one) => seen(one) && one.tabIndex >= 0 && !one.disabled);
    """
    expected = opened.execute_script(controls)
    outlined = """
    const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
    return outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
    """
    reached, hidden = [], []
    for _ in range(2 * len(expected)):  # boxes that scroll are stops too
        ActionChains(opened).send_keys(Keys.TAB).perform()
        one = opened.switch_to.active_element
        if one.tag_name == "body":
            break  # behind the last stop
        reached.append(one)
        if not opened.execute_script(outlined):
            hidden.append(one.get_attribute("outerHTML"))
    missed = [one.get_attribute("outerHTML") for one in expected if one not in reached]
    assert len(expected) > 3 and (missed, hidden) == ([], [])


def test_every_plot_gives_its_points_as_text(opened: Any) -> None:
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")  # which shows all tabs
    opened.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    lists = """
    return [...document.querySelectorAll(".plot")].filter((plot) => plot.checkVisibility()).map((plot) =>
      [plot.id, plot.getAttribute("role"), plot.parentElement.querySelectorAll(".as-text li").length]);
    """
    wait(opened, lambda browser: all(count for *_, count in browser.execute_script(lists)))
    assert {role for _, role, _ in opened.execute_script(lists)} == {"group"}


def test_points_as_text_are_what_hovering_shows(screen: Any, tmp_path: Path) -> None:
    page = tmp_path / "attack.html"
    page.write_text(render_attack(stored_attack()), encoding="utf-8")
    visit(screen, page)
    screen.find_element("css selector", ".as-text summary").click()
    shown = "return [...document.querySelectorAll('.as-text li')].map((item) => item.textContent)"
    wait(screen, lambda browser: browser.execute_script(shown))
    errors = {"PGD": (12, 41, 73), "SPSA": (12, 35, 61)}
    points = [(name, budget, error) for name, curve in errors.items() for budget, error in enumerate(curve)]
    assert screen.execute_script(shown) == [f"{name}, budget {budget}/255: {error}.00%" for name, budget, error in points]
