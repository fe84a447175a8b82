"""Imports point one way: from the instruments to the heart, never back. docs/design.md has the map."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import holdfast.routing
from holdfast.routing.parts import Part
from holdfast.routing.rules import Rule
from holdfast.routing.state import StatefulPart

SOURCE = Path(__file__).parent.parent / "src" / "holdfast"

# From the bottom up: each may import those before it, and itself.
LAYERS = [
    "version",
    "errors",
    "checked",
    "files",
    "stored",
    "plugins",
    "locking",
    "replacing",
    "model_size",
    "kernels",
    "routing",
    "layers",
    "hub",
    "replaying",
    "planning",
    "data",
    "attacks",
    "metrics",
    "certificates",
    "geometry",
    "testing",
    "train",
    "auditing",
    "mismatch",
    "report",
    "comparing",
    "cli",
    "__main__",
]
STRANGERS = {"attacks", "metrics", "certificates"}  # these import records and protocols, never each other or models
NOT_FOR_STRANGERS = {"hub", "layers"}

# These read the declarations of a part and never its class.
INSTRUMENTS = {
    "auditing",
    "mismatch",
    "certificates",
    "geometry",
    "planning",
    "metrics",
    "hub",
    "attacks",
    "testing",
    "train",
    "cli",
    "report",
}


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
        "layers/losses.py": "from holdfast import MoE",
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


def concrete_parts() -> set[str]:
    """Names of the classes in holdfast.routing that are parts or rules and neither abstract nor a base of others."""
    names = set()
    for module in pkgutil.iter_modules(holdfast.routing.__path__, "holdfast.routing."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_part = inspect.isclass(value) and issubclass(value, Part | Rule) and value is not Part
            if is_part and not inspect.isabstract(value) and value is not StatefulPart:
                names.add(name)
    return names


def classes_asked_for(source: Path, parts: set[str], rules: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """For each file of an instrument, how it asks which class a part is: `{"metrics/bad.py": ["names TopK", ...]}`.

    rules   those of the parts that the hub may import: its table of families makes them
    """
    found: dict[str, list[str]] = {}
    for file in sorted(source.rglob("*.py")):
        place = file.relative_to(source)
        if place.parts[0].removesuffix(".py") not in INSTRUMENTS:
            continue
        named = parts - rules if place.parts[0] == "hub" else parts
        nodes = list(ast.walk(ast.parse(file.read_text())))
        asked = sorted({sentence for node in nodes for sentence in _asks(node, named)})
        if asked:
            found[place.as_posix()] = asked
    return found


def _asks(node: ast.AST, parts: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
        yield from (f"imports {alias.name}" for alias in node.names if alias.name in parts)
    if isinstance(node, ast.Attribute) and node.attr in parts and _is_routing(node.value):
        yield f"names {node.attr}"
    if isinstance(node, ast.ImportFrom) and node.module == "functools":
        yield from (f"imports {alias.name}" for alias in node.names if alias.name.startswith("singledispatch"))
    if isinstance(node, ast.Attribute) and node.attr.startswith("singledispatch"):
        yield f"uses {node.attr}"
    if isinstance(node, ast.Compare) and any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Attribute) and _is_type_call(side.value):
                yield f"compares the method {side.attr} of a type"


def _is_routing(node: ast.AST) -> bool:
    """Return whether this is a module of routing, such as `holdfast.routing.scores`."""
    return "routing" in ast.unparse(node).split(".")


def _is_type_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def test_instruments_never_ask_which_class_a_part_is() -> None:
    parts = concrete_parts()
    assert {"TopK", "SmoothTopK", "TopP", "ReLU", "Cosine", "Clustered", "ExpertGraph", "Similarity", "Softmax"} <= parts
    assert classes_asked_for(SOURCE, parts, rules=frozenset({"Softmax"})) == {}


def test_the_check_sees_an_instrument_that_asks_for_a_class(tmp_path: Path) -> None:
    wrong = {
        "metrics/imports.py": "from holdfast.routing import Router, TopK",
        "hub/late.py": "def f():\n    from holdfast.routing.smoothing import SmoothTopK",
        "auditing/through_the_module.py": "import holdfast.routing\nisinstance(x, holdfast.routing.TopK)",
        "planning/dispatch.py": "from functools import singledispatch",
        "train/dispatch.py": "import functools\n@functools.singledispatchmethod\ndef f(x): ...",
        "certificates/method.py": "type(rule).ranks is Rule.ranks",
    }
    right = {
        "hub/rows.py": "from holdfast.routing.rules import Softmax\nSoftmax(renormalise=True)",
        "attacks/fine.py": "from holdfast.routing import Router, Selector\nisinstance(x, Router)",
        "layers/fine.py": "from holdfast.routing import TopK",
    }
    for name, text in {**wrong, **right}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    asking = classes_asked_for(tmp_path, {"TopK", "SmoothTopK", "Softmax"}, rules=frozenset({"Softmax"}))
    assert asking.keys() == wrong.keys()
