"""The page of each router is up to date, complete, and says what the code does."""

import inspect
import re
import shutil
from pathlib import Path

import pytest
import router_pages
from router_pages import DOCS, PAGES, TEXTS, own_presets, tables

from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import GIVEN, NOISE

SECTIONS = ["Idea", "Formula", "Picture", "Options", "Traits", "Cost", "Certificate", "Results", "Papers"]
NAMES = [preset.name for preset in own_presets()]
WHICH = (DOCS / "which-router.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all pages again, where an old page of a router that is gone lies."""
    folder = tmp_path_factory.mktemp("routers")
    (folder / "gone.md").write_text("# gone\n")
    router_pages.write_pages(folder)
    return folder


def test_the_stored_pages_are_what_the_script_writes(written: Path) -> None:
    """If this fails, run `python docs/site/router_pages.py` and look at the difference."""
    assert {page.name for page in PAGES.glob("*.md")} == {page.name for page in written.glob("*.md")}
    stale = [page.name for page in written.glob("*.md") if page.read_text() != (PAGES / page.name).read_text()]
    assert stale == []


def test_every_router_has_a_page_with_all_sections(written: Path) -> None:
    assert {page.stem for page in written.glob("*.md")} == set(NAMES) == set(TEXTS)
    for page in written.glob("*.md"):
        assert re.findall(r"^## (.+)$", page.read_text(), flags=re.MULTILINE) == SECTIONS, page.name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_combination
def test_every_option_is_on_the_page_with_a_meaning(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    section = page.split("## Options\n")[1].split("\n## ")[0]
    rows = {row[0].strip("`"): row for table in tables(section) for row in table.rows}
    assert all(row[3] for row in rows.values()), "an option without a text in the docstring of its part"
    assert rows.keys() <= {*REGISTRY.options(name), "k"}
    of_parts = {
        option for part in router_pages._parts(REGISTRY[name]).values() for option in inspect.signature(part).parameters
    }
    hidden = {*GIVEN, *NOISE}
    assert {option.rstrip("_") for option in of_parts - hidden} <= rows.keys()


def test_a_changed_result_makes_the_stored_page_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("results.md", "performance.md", "which-router.md", "comparing.md"):
        shutil.copy(DOCS / name, tmp_path)
    results = (tmp_path / "results.md").read_text()
    (tmp_path / "results.md").write_text(re.sub(r"(\| `ac` \| \d+ \| 2\.00 \|) [\d.]+", r"\1 9.999", results))
    monkeypatch.setattr(router_pages, "DOCS", tmp_path)
    assert "9.999" in router_pages.page(REGISTRY["ac"]) != (PAGES / "ac.md").read_text()


def test_the_table_of_routers_leads_to_the_pages() -> None:
    listed = re.findall(r"^\| \[`[\w-]+`\]\(routers/([\w-]+)\.md\)", (DOCS / "routers.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


def test_the_advice_has_only_numbers_of_the_measurements() -> None:
    sources = ("results.md", "performance.md", "mismatch.md", "replay.md", "audit.md", "comparing.md")
    measured = "".join((DOCS / name).read_text(encoding="utf-8") for name in sources)
    numbers = re.findall(r"[-+]?\d+\.\d+(?:e-\d+)?", WHICH)
    assert len(numbers) > 40
    known = set(re.findall(r"[-+]?\d+\.\d+(?:e-\d+)?", measured))
    unsigned = {number.lstrip("+-") for number in known}
    assert [number for number in numbers if number not in (known if number[0] in "+-" else unsigned)] == []
