"""Imports point one way: from the instruments to the heart, never back or in a circle. docs/design.md has the map."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
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
    "progress",
    "checked",
    "files",
    "stored",
    "plugins",
    "locking",
    "model_size",
    "kernels",
    "routing",
    "certificates",
    "layers",
    "hub",
    "replaying",
    "planning",
    "data",
    "attacks",
    "metrics",
    "geometry",
    "testing",
    "train",
    "auditing",
    "mismatch",
    "report",
    "comparing",
    "public",
    "registration",
    "cli",
    "__main__",
]
STRANGERS = {"attacks", "metrics", "certificates"}  # these import records and protocols, never each other or models
NOT_FOR_STRANGERS = {"hub", "layers"}

# These read the declarations of a part and never its class.
INSTRUMENTS = {"certificates", *LAYERS[LAYERS.index("hub") :]} - {"replaying", "data", "comparing", "__main__"}


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


def circle(source: Path) -> list[str]:
    """Return the modules of one import circle below `source`, or nothing."""
    names = {file: ".".join(("holdfast", *file.relative_to(source).with_suffix("").parts)) for file in source.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for file, name in names.items()}
    graph = {}
    for module, file in modules.items():
        targets = {name if name in modules else name.rpartition(".")[0] for name in imports(file)}
        graph[module] = (targets & modules.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(SOURCE) == []


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
