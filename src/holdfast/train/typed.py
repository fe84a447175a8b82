"""Dataclasses from plain values, every one checked. An unknown key raises an error that names the nearest."""

import math
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

from holdfast.routing.options import Limits, check_value
from holdfast.suggest import unknown

Count = Annotated[int, Limits(0, math.inf, "a whole number from 0 up")]
Positive = Annotated[int, Limits(1, math.inf, "a whole number above 0")]
Length = Annotated[int, Limits(1, 2**24, "a whole number from 1 to 16,777,216")]
Pixels = Annotated[int, Limits(1, 2**13, "a whole number from 1 to 8,192")]
Steps = Annotated[int, Limits(1, 100_000, "a whole number from 1 to 100,000")]
Amount = Annotated[float, Limits(0, math.inf, "a number from 0 up")]
Share = Annotated[float, Limits(0, 1, "a number between 0 and 1")]


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
    return kind(**{key: _fitting(hints[key], value, _join(path, key)) for key, value in values.items()})


def _fitting(kind: Any, value: Any, path: str) -> Any:
    return typed(kind, value, path) if is_dataclass(kind) else check_value(kind, value, path)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
