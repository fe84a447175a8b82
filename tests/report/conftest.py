"""A headless Chromium, as a desktop and as a phone, for pages of comparisons and of audits."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from report.browsing import emulate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER, env={**os.environ, "SE_OFFLINE": "true"}))
    yield browser
    browser.quit()


@pytest.fixture(params=[(1280, "light"), (360, "dark")], ids=["desktop", "phone"])
def screen(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The browser with a screen of some size and theme, which no page of the test may leave a message in."""
    emulate(chromium, *request.param)
    yield chromium
    assert chromium.get_log("browser") == []
