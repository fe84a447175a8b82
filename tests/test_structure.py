"""The source tree stays a house that a stranger can live in: no import circles, no huge file, few files in the hub."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LONGEST = 450  # lines of a file
MOST_HUB_FILES = 14
MOST_FAMILY_FILES = 8


def imported(source: Path) -> dict[str, set[str]]:
    """Return, for each module below `source`, the modules of the same tree that it imports, at the top or in a function."""
    files = {".".join(file.relative_to(source).with_suffix("").parts): file for file in source.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {
                    name if (name := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
                }
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[module] = (names & modules.keys()) - {module}
    return found


def circle(modules: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import circle, or nothing."""
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(imported(SOURCE)) == []


def test_the_check_finds_a_circle_through_an_import_in_a_function(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from two import name\n")
    (tmp_path / "two.py").write_text("def name():\n    import one\n")
    assert set(circle(imported(tmp_path))) == {"one", "two"}


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_file_is_longer_than_a_reader_can_hold(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= LONGEST


def test_the_hub_has_few_files() -> None:
    hub = SOURCE / "holdfast" / "hub"
    assert len(list(hub.glob("*.py"))) <= MOST_HUB_FILES
    packages = {path.parent.name: len(list(path.parent.glob("*.py"))) for path in hub.glob("*/__init__.py")}
    assert packages == {"families": MOST_FAMILY_FILES}  # what is known about families, and nothing else
