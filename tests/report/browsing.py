"""Pages in a browser."""

from pathlib import Path
from typing import Any


def visit(browser: Any, page: Path) -> None:
    """On a busy machine the driver comes back while a page is still loading."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(page.as_uri())
    ready = "return location.href === arguments[0] && document.readyState === 'complete'"
    WebDriverWait(browser, 30).until(lambda browser: browser.execute_script(ready, page.as_uri()))
