"""The documentation site: strict, complete, and whole without a network, in a browser at two widths and in two themes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report.browsing import requests, require_fit, visit, wait

ROOT = Path(__file__).parent.parent.parent
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


def pages(site: Path) -> list[str]:
    """Return the pages of the site itself; those in examples/ are written by commands."""
    found = (path.relative_to(site) for path in site.rglob("*.html") if path.name != "404.html")
    return sorted(path.as_posix() for path in found if path.parts[0] != "examples")


@pytest.mark.parametrize(
    ("screen", "all_pages"),
    [((1400, "light"), True), ((390, "dark"), True), ((390, "light"), False), ((1400, "dark"), False)],
    indirect=["screen"],
)
def test_pages_open_from_a_file_without_a_message_or_a_request_elsewhere(screen: Any, all_pages: bool, site: Path) -> None:
    shown = pages(site) if all_pages else list(FEW)
    assert len(shown) >= len(FEW)
    for page in shown:
        visit(screen, site / page)
        require_fit(screen)
        missing = "return [...document.images].filter(one => !one.naturalWidth).map(one => one.src)"
        assert screen.execute_script(missing) == [], page
        assert screen.get_log("browser") == [], page
        asked = requests(screen)
        assert any(url.endswith(".css") for url in asked), "the requests of the page were not seen"
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == [], page
    dark = screen.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    scheme = screen.execute_script("return document.body.getAttribute('data-md-color-scheme')")
    assert scheme == ("slate" if dark else "default")


def test_the_leaderboard_of_the_site_opens_and_is_linked(screen: Any, site: Path) -> None:
    assert 'href="examples/leaderboard.html"' in (site / "examples.html").read_text(encoding="utf-8")
    visit(screen, site / "examples" / "leaderboard.html")
    assert "symphony+smooth" in screen.find_element("css selector", "table").text


@pytest.mark.parametrize("screen", [(1400, "light")], indirect=True)
def test_the_search_works_from_a_file(screen: Any, site: Path) -> None:
    visit(screen, site / "glossary.html")
    field = screen.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys("undecided")  # no hyphen: the page searches while one types, and "near-" is not a valid query
    links = wait(screen, lambda browser: browser.find_elements("css selector", ".md-search-result__link"))
    targets = [link.get_attribute("href") for link in links]
    assert any("glossary.html" in target for target in targets)


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
