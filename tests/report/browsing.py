"""Pages in a browser."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EVIL = '<img src=x onerror="alert(1)"></script>%{x}<b>'
DRAWN = """
const shown = [...document.querySelectorAll(".plot")].filter((plot) => plot.offsetParent);
return Object.fromEntries(shown.map((plot) => [plot.dataset.plot, plot.querySelectorAll(
  ".heatmaplayer image, .barlayer .point, .scatterlayer .point, .scatterlayer .js-line").length]));
"""
COVERED = """ // a phone has no such buttons
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const bar = plot.querySelector(".modebar")?.getBoundingClientRect();
  const parts = [...plot.querySelectorAll(".legend, .xtitle, .ytitle, .xtick text, .cbtitle")];
  return innerWidth > 500 && bar?.width && parts.some((part) => meet(bar, part.getBoundingClientRect()));
}).map((plot) => plot.id);
"""
on_all_screens = pytest.mark.parametrize(
    "screen", [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")], indirect=True
)


def emulate(browser: Any, width: int, theme: str) -> None:
    """Set the size and the theme of the screen, and forget the page and the messages of the last test."""
    screen = {"width": width, "height": 844 if width < 500 else 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)


def wait(browser: Any, condition: Callable[[Any], Any]) -> Any:
    """Wait until `condition(browser)` is true, and return it; on a busy machine that may take a while."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 120).until(condition)


def visit(browser: Any, page: Path) -> None:
    """On a busy machine the driver comes back while a page is still loading."""
    browser.get(page.as_uri())
    ready = "return location.href === arguments[0] && document.readyState === 'complete'"
    wait(browser, lambda browser: browser.execute_script(ready, page.as_uri()))


def open_tab(browser: Any, name: str) -> None:
    """Click on a tab."""
    browser.find_element("css selector", f"#tab-{name}").click()


def show_explorer(browser: Any) -> None:
    """Bring the Explorer to the screen: it is drawn only then."""
    if browser.find_elements("css selector", "#tab-explorer"):
        open_tab(browser, "explorer")
    browser.execute_script("document.getElementById('explorer').scrollIntoView()")
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 0, "y": 0})  # away from its tokens
    wait(browser, lambda browser: browser.find_elements("css selector", "#explorer.x-ready .x-token"))


def drawn(browser: Any) -> dict[str, int]:
    """Return the number of shapes in each plot that is shown. Heat maps are drawn a moment after the rest."""
    wait(browser, lambda browser: all(browser.execute_script(DRAWN).values()))
    found: dict[str, int] = browser.execute_script(DRAWN)
    return found


def require_fit(browser: Any, parts: str = "body") -> None:
    """Require that the page and its `parts` are no wider than the screen."""
    # not innerWidth: a phone zooms out until all fits, and says that its window is that wide
    width, visible = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    edges = "return [...document.querySelectorAll(arguments[0])].map((part) => part.getBoundingClientRect().right)"
    assert width <= visible and max(browser.execute_script(edges, parts)) <= visible + 1  # a part of a pixel


def require_no_title_cut_off(browser: Any) -> None:
    outside = """
    const titles = document.querySelectorAll(".plot .xtitle, .plot .ytitle, .plot .cbtitle text");
    return [...titles].filter((title) => {
      const inner = title.getBoundingClientRect(), outer = title.closest(".plot").getBoundingClientRect();
      return inner.left < outer.left || inner.right > outer.right || inner.top < outer.top || inner.bottom > outer.bottom;
    }).map((title) => title.textContent);
    """
    assert browser.execute_script(outside) == []


def requests(browser: Any) -> list[str]:
    """Return the addresses that the page has asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def check_first_screen(browser: Any, page: Path, parts: str) -> None:
    """Check that each of `parts` is inside the first screen, and that their rows have no texts over each other."""
    visit(browser, page)
    outside = """
    const { clientWidth: width, clientHeight: height } = document.documentElement;
    return [...document.querySelectorAll(arguments[0])].filter((part) => {
      const box = part.getBoundingClientRect();
      return !box.height || box.left < 0 || box.top < 0 || box.right > width || box.bottom > height;
    }).map((part) => part.outerHTML.slice(0, 80));
    """
    assert len(browser.find_elements("css selector", parts)) >= len(parts.split(","))
    assert browser.execute_script(outside, parts) == []
    over = """
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    return [...document.querySelectorAll("#answer figure li, #answer .tiles li")].filter((row) => {
      const boxes = [...row.children].filter((part) => !part.matches(".track")).map((part) => part.getBoundingClientRect());
      const inner = row.scrollWidth > row.clientWidth;
      return inner || boxes.some((one, place) => boxes.slice(place + 1).some((other) => meet(one, other)));
    }).map((row) => row.textContent);
    """
    assert browser.execute_script(over) == []


def check_page(browser: Any, page: Path, parts: str, printed: str) -> None:
    """Check that `parts` fit on the screen, that a plot prints light and within the page, and that all else is quiet."""
    visit(browser, page)
    drawn(browser)
    require_fit(browser, parts)
    assert browser.execute_script(COVERED) == []  # the buttons of a plot cover nothing that is read
    layout = f"const plot = document.getElementById('plot-{printed}')._fullLayout; return [plot.paper_bgcolor, plot.width]"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(layout) == ["#ffffff", 660]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    ground = browser.execute_script("return getComputedStyle(document.documentElement).getPropertyValue('--ground')")
    assert browser.execute_script(layout)[0] == ground.strip()
    asked = requests(browser)
    assert len([url for url in asked if url.startswith("file:")]) == 1
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert browser.find_elements("css selector", "img") == []
