"""The README's picture shows the stored numbers of one audit, and nothing else."""

import copy
import json
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "readme_picture.py"))


@pytest.fixture
def stored() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((PICTURES / "what_if.json").read_text())
    return numbers


def test_the_stored_picture_is_the_one_that_the_script_draws(script: dict[str, Any], stored: dict[str, Any]) -> None:
    assert (PICTURES / "what_if.svg").read_text() == script["picture"](stored)


def test_the_picture_follows_the_stored_numbers(script: dict[str, Any], stored: dict[str, Any]) -> None:
    changed = copy.deepcopy(stored)
    changed["what_if"]["flip_output"]["attack"]["after"] = stored["what_if"]["flip_output"]["attack"]["before"] / 2
    assert "50% remains" not in script["picture"](stored)
    assert "50% remains" in script["picture"](changed)


def test_every_perturbation_under_which_flips_changed_something_is_shown(
    script: dict[str, Any], stored: dict[str, Any]
) -> None:
    texts = [element.text for element in ElementTree.fromstring(script["picture"](stored)).iter() if element.text]
    changed = [pair for pair in stored["what_if"]["flip_output"].values() if pair["before"] > 0]
    assert len([text for text in texts if text.endswith("remains")]) == len(changed) > 0


def test_the_readme_shows_the_picture() -> None:
    assert "](docs/pictures/what_if.svg)" in (ROOT / "README.md").read_text()
