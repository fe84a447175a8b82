"""Imports point one way: from the instruments to the heart, never back. docs/design.md has the map."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "holdfast"

# From the bottom up: each may import those before it, and itself.
LAYERS = [
    "version",
    "suggest",
    "writing",
    "reading",
    "locking",
    "replacing",
    "kernels",
    "routing",
    "layers",
    "losses",
    "hub",
    "planning",
    "data",
    "attacks",
    "metrics",
    "certificates",
    "geometry",
    "testing",
    "train",
    "auditing",
    "report",
    "cli",
    "__main__",
]
STRANGERS = {"attacks", "metrics", "certificates"}  # these know records and protocols, never each other or a concrete model
NOT_FOR_STRANGERS = {"hub", "layers"}


def imports(file: Path) -> Iterator[str]:
    """Full names of the holdfast modules that a file imports, at the top or late."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "holdfast")


def violations(source: Path) -> list[str]:
    """One sentence for each import that points the wrong way."""
    found = []
    for file in sorted(source.rglob("*.py")):
        place = file.relative_to(source)
        unit = place.parts[0].removesuffix(".py")
        if unit == "__init__":  # the package's own front: it re-exports from everywhere
            continue
        if unit not in LAYERS:
            found.append(f"{place}: {unit!r} is not on the map")
            continue
        for name in imports(file):
            target = name.split(".")[1] if "." in name else "__init__"
            if target not in LAYERS:
                found.append(f"{place} imports {name}, which is not on the map")
            elif not may_know(unit, target):
                found.append(f"{place} imports {name}: {unit!r} may not know {target!r}")
    return found


def may_know(unit: str, target: str) -> bool:
    if unit in STRANGERS and target != unit and target in STRANGERS | NOT_FOR_STRANGERS:
        return False
    return LAYERS.index(target) <= LAYERS.index(unit)


def test_imports_point_one_way() -> None:
    assert violations(SOURCE) == []


def test_the_check_sees_an_import_that_points_the_wrong_way(tmp_path: Path) -> None:
    """Early or late, direct or through the package's front, and between the instruments that must not know each other."""
    wrong = {
        "routing/bad.py": "from holdfast.layers import Experts",
        "kernels/bad.py": "def f():\n    import holdfast.routing.records",
        "losses.py": "from holdfast import MoE",
        "metrics/bad.py": "from holdfast.attacks import words",
        "certificates/bad.py": "from holdfast.layers.experts import Experts",
        "misc/new.py": "",
    }
    for name, text in {**wrong, "layers/fine.py": "from holdfast.routing import Router"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = violations(tmp_path)
    assert len(found) == len(wrong)
    assert all(any(sentence.startswith(name) for sentence in found) for name in wrong)
