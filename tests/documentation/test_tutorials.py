"""The tutorials: each page runs from top to bottom and prints what it shows; its picture shows the stored numbers."""

import re
import subprocess
import sys

import pytest
import tutorials
from tutorials import Block, blocks_of, difference

NAMES = sorted(tutorials.PICTURE_OF)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_combination
def test_a_tutorial_prints_what_it_shows(name: str) -> None:
    """In a process of its own, as a newcomer's script. If this fails after a change on purpose, run it without `--check`."""
    script = tutorials.DOCS / "site" / "tutorials.py"
    ran = subprocess.run([sys.executable, str(script), "--check", name], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_every_page_of_the_folder_is_run() -> None:
    assert sorted(page.stem for page in tutorials.PAGES.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_combination
def test_all_code_of_a_tutorial_is_found_and_prints_are_shown(name: str) -> None:
    """A fence that the pattern does not read would never be run."""
    page = tutorials.PAGES / f"{name}.md"
    text, blocks = page.read_text(encoding="utf-8"), blocks_of(page)
    assert len(blocks) == text.count("```python") >= 4
    assert (
        sum(block.title is not None for block in blocks)
        == len(re.findall(r"^```text title=", text, flags=re.MULTILINE))
        >= 2
    )


@pytest.mark.parametrize(
    ("title", "shown", "printed", "numbers", "differs"),
    [
        ("Output", "a 1\n", "a 1\n", True, False),
        ("Output", "a 1\n", "a 2\n", False, True),
        ("Output, approximate", "loss 4.00\n", "loss 4.40\n", True, False),
        ("Output, approximate", "loss 4.00\n", "loss 8.00\n", True, True),
        ("Output, approximate", "loss 4.00\n", "loss 8.00\n", False, False),
        ("Output, approximate", "loss 4.00\n", "cost 4.00\n", False, True),
        ("Output, for example", "loss 4.00\n", "other words\n", True, False),
        ("Output, for example", "loss 4.00\n", "", True, True),
        (None, None, "a\n", True, True),
        (None, None, "", True, False),
    ],
)
def test_a_difference_is_found(title: str | None, shown: str | None, printed: str, numbers: bool, differs: bool) -> None:
    assert (difference(Block("", 1, title, shown), printed, numbers=numbers) is not None) == differs
