"""The documentation site: strict, complete, and whole without a network, in a browser at two widths and in two themes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report.browsing import visit

ROOT = Path(__file__).parent.parent.parent
SCREENS = [(1400, "light"), (390, "dark"), (390, "light"), (1400, "dark")]
# Seen on all screens; the other pages on two of them.
FEW = (
    "index.html",
    "routers.html",
    "routers/smooth.html",
    "which-router.html",
    "how-to/trl.html",
    "reference/holdfast.html",
)

pytestmark = pytest.mark.slow  # builds the site, starts a browser

WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait


def pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


def show(browser: Any, width: int, theme: str) -> None:
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def test_pages_open_from_a_file_without_a_message_or_a_request_elsewhere(
    chromium: Any, site: Path, screen: tuple[int, str]
) -> None:
    show(chromium, *screen)
    shown = pages(site) if screen in SCREENS[:2] else list(FEW)
    assert len(shown) >= len(FEW)
    chromium.get("about:blank")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    for page in shown:
        visit(chromium, site / page)
        wide, visible = chromium.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= visible, f"{page} is {wide} pixels wide"
        missing = "return [...document.images].filter(one => !one.naturalWidth).map(one => one.src)"
        assert chromium.execute_script(missing) == [], page
        assert chromium.get_log("browser") == [], page
        asked = requests(chromium)
        assert any(url.endswith(".css") for url in asked), "the requests of the page were not seen"
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == [], page
    scheme = chromium.execute_script("return document.body.getAttribute('data-md-color-scheme')")
    assert scheme == {"light": "default", "dark": "slate"}[screen[1]]


def test_the_search_works_from_a_file(chromium: Any, site: Path) -> None:
    show(chromium, 1400, "light")
    visit(chromium, site / "glossary.html")
    chromium.get_log("browser")
    field = chromium.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys("undecided")  # no hyphen: the page searches while one types, and "near-" is not a valid query
    found = ".md-search-result__link"
    WebDriverWait(chromium, 20).until(lambda browser: browser.find_elements("css selector", found))
    targets = [link.get_attribute("href") for link in chromium.find_elements("css selector", found)]
    assert any("glossary.html" in target for target in targets)
    assert chromium.get_log("browser") == []


def test_no_page_names_a_file_of_another_host(site: Path) -> None:
    """Links that a reader may follow are fine; what a browser loads by itself must be in the site."""
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//|<link\b[^>]*\bhref=\"?(https?:)?//")
    for page in pages(site):
        assert not loaded.search((site / page).read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?:|@import", style.read_text(encoding="utf-8")), style.name


def test_every_public_name_has_a_place_in_the_reference(site: Path) -> None:
    import holdfast

    text = (site / "reference" / "holdfast.html").read_text(encoding="utf-8")
    names = set(holdfast.__all__) - {"geometry"}  # a package, with a page of its own
    assert {name for name in names if f'id="holdfast.{name}"' not in text} == set()
    assert 'id="holdfast.geometry.nearest_ties"' in (site / "reference" / "geometry.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[no such part](index.md#no-such-part)", "no-such-part"),
        ("[elsewhere](/index.md)", "absolute"),
        ("fine", None),
    ],
    ids=["link", "anchor", "absolute link", "nothing wrong"],
)
def test_the_settings_refuse_a_page_with_a_broken_link(tmp_path: Path, text: str, complaint: str | None) -> None:
    """With the settings of our own site, but two pages of its own, so that it is fast."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# A page\n\n{text}\n")
    settings = [f"INHERIT: {ROOT / 'mkdocs.yml'}", f"docs_dir: {tmp_path / 'pages'}", "hooks: []", "plugins: []"]
    settings += ["exclude_docs: ''", "nav: [index.md]", "theme: {name: mkdocs, palette: null, features: null, font: null}"]
    (tmp_path / "mkdocs.yml").write_text("\n".join(settings))
    line = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(tmp_path / "mkdocs.yml")]
    built = subprocess.run([*line, "--site-dir", str(tmp_path / "site")], capture_output=True, text=True)
    if complaint is None:
        assert built.returncode == 0, built.stderr
    else:
        assert built.returncode != 0 and complaint in built.stderr, built.stderr
