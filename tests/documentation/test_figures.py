"""Pictures of the documents show their stored numbers and nothing else, and can be read on a telephone."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import figures
import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = figures.names()
SHOWN = 358  # pixels of a picture on a page of a telephone that is 390 pixels wide
SMALLEST = 8  # pixels of a text


@pytest.fixture
def stored() -> Any:
    return figures.numbers("what_if")


def svg(name: str) -> ElementTree.Element:
    return ElementTree.fromstring((figures.PICTURES / f"{name}.svg").read_text(encoding="utf-8"))


def test_the_stored_pictures_are_what_make_figures_draws(tmp_path: Path) -> None:
    """If this fails, run `make figures` and look at the difference."""
    recipe = subprocess.run(["make", "--dry-run", "figures"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "python docs/site/figures.py" in recipe
    drawn = figures.draw(tmp_path)
    assert {file.name for file in drawn} == {file.name for file in figures.PICTURES.glob("*.svg")} != set()
    assert [file.name for file in drawn if file.read_bytes() != (figures.PICTURES / file.name).read_bytes()] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_combination
def test_texts_of_a_picture_are_large_enough_on_a_telephone_and_have_two_themes(name: str) -> None:
    style = "".join(element.text or "" for element in svg(name).iter() if element.tag.endswith("style"))
    sizes = [float(size) for size in re.findall(r"(?:font|font-size): (\d+)px", style)]
    width = float(svg(name).attrib["viewBox"].split()[2])
    assert sizes and min(sizes) * SHOWN / width >= SMALLEST
    assert "prefers-color-scheme: dark" in style and svg(name).attrib["aria-label"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_picture_leaves_its_frame(name: str, chromium: Any) -> None:
    chromium.get((figures.PICTURES / f"{name}.svg").as_uri())
    places = chromium.execute_script(
        "const box = document.documentElement.viewBox.baseVal;"
        "return [...document.querySelectorAll('text')].map(e => [e.textContent, e.getBBox()])"
        ".map(([words, b]) => [words, b.x >= 0 && b.x + b.width <= box.width && b.y >= 0 && b.y + b.height <= box.height])"
    )
    assert places and [words for words, inside in places if not inside] == []


def test_a_picture_follows_the_stored_numbers(stored: Any) -> None:
    draw = figures.script("what_if").picture
    changed = copy.deepcopy(stored)
    changed["what_if"]["flip_output"]["attack"]["after"] = stored["what_if"]["flip_output"]["attack"]["before"] / 2
    assert "2.0 times less" not in draw(stored) and "2.0 times less" in draw(changed)


def test_every_perturbation_under_which_flips_changed_something_is_shown(stored: Any) -> None:
    texts = [element.text for element in svg("what_if").iter() if element.text]
    changed = [pair for pair in stored["what_if"]["flip_output"].values() if pair["before"] > 0]
    assert len([text for text in texts if text.endswith("times less")]) == len(changed) > 0
