"""The README: short, its example runs as printed, and it claims only what was measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from readme_model import write_what_the_readme_opens
from router_pages import PAGES, TEXTS, own_presets

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return README.split(f"## {heading}\n")[1].split("\n## ")[0]


def rows(heading: str) -> list[str]:
    """Return the rows of the first table of a section, without its head."""
    return [line for line in section(heading).splitlines() if line.startswith("|")][2:]


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    write_what_the_readme_opens(tmp_path)
    (tmp_path / "example.py").write_text(example())
    line = [sys.executable, "example.py"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = {name: (float(before), float(after)) for name, before, after in map(str.split, run.stdout.splitlines())}
    assert len(printed) == 4
    before, after = printed["output.noise.0.01.flip"]
    assert 0 < after < before
    before, after = printed["experts_per_token"]
    assert before < after


def test_the_differences_of_the_result_table_are_in_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    differences = re.findall(r"[-+]\d+\.\d+", "\n".join(rows("What we measured")))
    assert len(differences) >= 12
    assert [number for number in differences if number not in results] == []


def test_the_costs_are_in_the_performance_page() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\b\d\.\d+\b", section("What it costs"))
    assert len(numbers) >= 8
    assert [number for number in numbers if number not in performance] == []


def test_every_row_of_the_results_links_a_paper_and_the_page_of_each_router() -> None:
    names = {preset.name for preset in own_presets()}
    assert len(rows("What we measured")) >= 7
    for row in rows("What we measured"):
        router, paper = (cell.strip() for cell in row.split("|")[1:3])
        linked = re.findall(r"\[`([\w-]+)`\]\(docs/routers/([\w-]+)\.md\)", router)
        assert linked and all(name == page and name in names and (PAGES / f"{page}.md").exists() for name, page in linked)
        addresses = re.findall(r"\]\((https://[^)]+)\)", paper)
        assert len(addresses) == len(linked)
        for address, (name, _) in zip(addresses, linked, strict=True):
            assert f"]({address})" in " ".join(TEXTS[name]["papers"]), f"{address} is not a paper on the page of {name}"
