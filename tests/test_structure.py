"""No modules of the package import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


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
