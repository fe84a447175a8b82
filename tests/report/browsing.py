"""Pages in a browser."""

import json
from pathlib import Path
from typing import Any

import pytest

EVIL = '<img src=x onerror="alert(1)"></script>%{x}<b>'
DRAWN = """
return Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.dataset.plot, plot.querySelectorAll(
  ".heatmaplayer image, .barlayer .point, .scatterlayer .point, .scatterlayer .js-line").length]));
"""
on_all_screens = pytest.mark.parametrize(
    "screen", [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")], indirect=True
)


def visit(browser: Any, page: Path) -> None:
    """On a busy machine the driver comes back while a page is still loading."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(page.as_uri())
    ready = "return location.href === arguments[0] && document.readyState === 'complete'"
    WebDriverWait(browser, 30).until(lambda browser: browser.execute_script(ready, page.as_uri()))


def drawn(browser: Any) -> dict[str, int]:
    """Return the number of shapes in each plot. Heat maps are drawn a moment after the rest."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 20).until(lambda browser: all(browser.execute_script(DRAWN).values()))
    found: dict[str, int] = browser.execute_script(DRAWN)
    return found


def check_page(browser: Any, page: Path, parts: str, printed: str) -> None:
    """Check that `parts` fit on the screen, that a plot prints light and within the page, and that all else is quiet."""
    visit(browser, page)
    drawn(browser)
    # not innerWidth: a phone zooms out until all fits, and says that its window is that wide
    width = browser.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] <= width[1]
    edges = f"return [...document.querySelectorAll('{parts}')].map((part) => part.getBoundingClientRect().right)"
    assert max(browser.execute_script(edges)) <= width[1]
    layout = f"const plot = document.getElementById('plot-{printed}')._fullLayout; return [plot.paper_bgcolor, plot.width]"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(layout) == ["#ffffff", 660]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    ground = browser.execute_script("return getComputedStyle(document.documentElement).getPropertyValue('--ground')")
    assert browser.execute_script(layout)[0] == ground.strip()
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert len([url for url in asked if url.startswith("file:")]) == 1
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert browser.find_elements("css selector", "img") == []
    assert browser.get_log("browser") == []
