"""Dataclasses from plain values, every one checked. A key that nobody knows is an error that names the nearest."""

import contextlib
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.suggest import unknown

Count = Annotated[int, "a whole number from 0 up"]
Positive = Annotated[int, "a whole number above 0"]
Length = Annotated[int, "a whole number from 1 to 16,777,216"]
Pixels = Annotated[int, "a whole number from 1 to 8,192"]
Steps = Annotated[int, "a whole number from 1 to 100,000"]
Amount = Annotated[float, "a number from 0 up"]
Share = Annotated[float, "a number between 0 and 1"]
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "empty"}
LIMITS = {
    Count: (0, math.inf),
    Positive: (1, math.inf),
    Length: (1, 2**24),
    Pixels: (1, 2**13),
    Steps: (1, 100_000),
    Amount: (0, math.inf),
    Share: (0, 1),
}


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
    return kind(**{key: fitting(hints[key], value, _join(path, key)) for key, value in values.items()})


def fitting(kind: Any, value: Any, what: str) -> Any:
    """The value as `kind`; a ValueError says what `what` should be where it is not."""
    if is_dataclass(kind):
        return typed(kind, value, what)
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, str) and str not in kinds and any(_plain(each) is float for each in kinds):
        with contextlib.suppress(ValueError):  # YAML takes 1e-3 for a text
            value = float(value)
    if not any(_fits(each, value) for each in kinds):
        raise ValueError(f"{what} is {value!r}, not {' or '.join(map(_words, kinds))}.")
    return float(value) if _plain(kind) is float else value


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _fits(kind: Any, value: Any) -> bool:
    if kind in LIMITS:
        low, high = LIMITS[kind]
        return _fits(_plain(kind), value) and low <= value <= high
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(_fits(inside[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind not in NAMES:
        return True  # an option of a user's own router may be anything
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _words(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if kind in LIMITS:
        return str(kind.__metadata__[0])
    if origin is Literal:
        return " or ".join(repr(option) for option in inside)
    if origin is list:
        return "a list of whole numbers" if inside[0] in (int, Count) else "a list"
    return NAMES.get(kind, "a section")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
