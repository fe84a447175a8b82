"""Dataclasses from plain values, every one checked. A key that nobody knows is an error that names the nearest."""

import contextlib
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.suggest import unknown

Positive = Annotated[int, "a whole number above 0"]
Share = Annotated[float, "a number between 0 and 1"]


def typed(kind: Any, values: Any, path: str = "") -> Any:
    """An instance of the dataclass `kind`; a ValueError names the first value that does not fit, by its path."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'it'} should be a section with keys, not {values!r}.")
    hints, known = get_type_hints(kind, include_extras=True), {entry.name: entry for entry in fields(kind)}
    for key in values:
        if key not in known:
            raise ValueError(f"{_join(path, key)}: {unknown('key', str(key), known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{_join(path, name)} is missing.")
    return kind(**{key: _value(hints[key], value, _join(path, key)) for key, value in values.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind):
        return typed(kind, value, path)
    if kind in (float, Share) and isinstance(value, str):  # YAML takes 1e-3 for a text
        with contextlib.suppress(ValueError):
            value = float(value)
    if not _fits(kind, value):
        raise ValueError(f"{path} is {value!r}, not {_words(kind)}.")
    return float(value) if kind in (float, Share) else value


def _fits(kind: Any, value: Any) -> bool:
    origin, inside = get_origin(kind), get_args(kind)
    if kind == Positive:
        return _fits(int, value) and value > 0
    if kind == Share:
        return _fits(float, value) and 0 <= value <= 1
    if origin in (Union, types.UnionType):
        return any(_fits(option, value) for option in inside)
    if origin is Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(_fits(inside[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return isinstance(value, kind) and not (kind is int and (isinstance(value, bool) or value < 0))


def _words(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if kind in (Positive, Share):
        return str(kind.__metadata__[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_words(option) for option in inside)
    if origin is Literal:
        return " or ".join(repr(option) for option in inside)
    names = {
        int: "a whole number",
        float: "a number from 0 up",
        str: "a text",
        bool: "true or false",
        types.NoneType: "empty",
    }
    return names.get(kind, "a list of whole numbers" if origin is list else "a section")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
