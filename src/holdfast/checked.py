"""Plain values as typed data: the one check of router options, recipes and stored reports.

A dataclass says what is allowed: its annotations are types, `X | None`, `Literal`, `list[X]`, `dict[str, X]`, other
dataclasses, and numbers with `Limits`. `from_mapping` makes an instance from what YAML or JSON gave; its error gives the
path of the first wrong value (`training.steps`). An unknown key raises an error that suggests the closest one.
"""

import math
import sys
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.errors import unknown_name

LARGEST_DENOMINATOR = 10**6  # of a factor as a fraction, so that products with it fit into 64 bits
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "empty"}


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value of a number, for `Annotated[int, Limits(...)]`, and the words for an error."""

    low: float
    high: float
    words: str


Record = TypeVar("Record")


def from_mapping(kind: type[Record], values: Any, path: str = "", *, skip_unknown: bool = False) -> Record:
    """Return an instance of the dataclass `kind`; raise ValueError naming the path of the first value that is wrong.

    Values may be instances already, at any depth: these were checked where they were made.

    skip_unknown    leave out keys that are no fields, in dataclasses inside it too, instead of refusing them
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'it'} must be a section with keys, not {values!r}.")
    hints, known = type_hints(kind), {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    if skip_unknown:
        values = {key: value for key, value in values.items() if key in known}
    for key in values:
        if key not in known:
            raise ValueError(f"{_join(path, key)}: {unknown_name('key', str(key), known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{_join(path, name)} is missing.")
    how = {"skip_unknown": skip_unknown}
    return kind(**{key: check_value(hints[key], value, _join(path, key), **how) for key, value in values.items()})


def check_value(kind: Any, value: Any, path: str, *, skip_unknown: bool = False) -> Any:
    """Return `value` as the type `kind`; raise ValueError if it has another type. `path` names the value in the error."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for each in kinds:
        if is_dataclass(each) and (value is not None or types.NoneType not in kinds):
            return from_mapping(each, value, path, skip_unknown=skip_unknown)  # type: ignore[arg-type]
        if _holds_sections(each) and isinstance(value, list | dict):
            return _check_entries(each, value, path, skip_unknown=skip_unknown)
    if isinstance(value, str) and str not in kinds and any(_without_limits(each) is float for each in kinds):
        value = _as_number(value)
    if isinstance(value, list) and any(
        get_origin(each) is list and _without_limits(get_args(each)[0]) is float for each in kinds
    ):
        value = [_as_number(entry) if isinstance(entry, str) else entry for entry in value]
    if not any(_fits(each, value) for each in kinds):
        raise ValueError(f"{path} is {value!r}, not {' or '.join(map(_type_name, kinds))}.")
    plain = [_without_limits(each) for each in kinds]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_whole and float in plain and int not in plain else value


def _check_entries(kind: Any, value: list[Any] | dict[str, Any], path: str, **how: bool) -> Any:
    """Return a list or mapping whose entries are, or contain, dataclasses."""
    if not isinstance(value, get_origin(kind)):
        raise ValueError(f"{path} is not {'a list' if get_origin(kind) is list else 'a section with keys'}.")
    inside = get_args(kind)[-1]
    if isinstance(value, list):
        return [check_value(inside, entry, f"{path}[{number}]", **how) for number, entry in enumerate(value)]
    return {key: check_value(inside, entry, _join(path, key), **how) for key, entry in value.items()}


@cache
def type_hints(of: Any) -> dict[str, Any]:
    """Return the types of the fields of a class, or of the parameters of a function."""
    return get_type_hints(of, include_extras=True)


@cache
def _holds_sections(kind: Any) -> bool:
    """Whether a type is a list or mapping of dataclasses, at any depth."""
    inside = get_args(kind) if get_origin(kind) in (list, dict) else ()
    options = [option for entry in inside for option in (entry, *get_args(entry)) if not isinstance(option, Limits)]
    return any(is_dataclass(option) or _holds_sections(option) for option in options)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _as_number(text: str) -> float | str:
    """Return the number that a text stands for; the text itself if it is none. YAML reads 1e-3 and 1/255 as texts."""
    try:
        return read_number(text)
    except ValueError:
        return text


def read_number(text: str) -> float:
    """Return a number, or the quotient of two: "0.03", "1e-3" or "0.5/255". Raise ValueError if the text is neither."""
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number; write it as 0.03, 1e-3 or 1/255.")
    return value


def as_ratio(factor: float) -> tuple[int, int]:
    """Return the factor as numerator and denominator, without the rounding error of a float: 1.1 is 11 / 10."""
    return Fraction(str(factor)).limit_denominator(LARGEST_DENOMINATOR).as_integer_ratio()


def _without_limits(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(kind: Any) -> Limits | None:
    metadata = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return next((entry for entry in metadata if isinstance(entry, Limits)), None)


@cache
def _parts(kind: Any) -> tuple[Limits | None, Any, tuple[Any, ...]]:
    """Return the limits, the origin and the arguments of a type."""
    return _limits(kind), get_origin(kind), get_args(kind)


def _fits(kind: Any, value: Any) -> bool:
    if kind is float:  # first, because a report has many
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    limits, origin, inside = _parts(kind)
    if limits is not None:
        return _fits(_without_limits(kind), value) and limits.low <= value <= limits.high
    if origin in (Union, types.UnionType):
        return any(_fits(option, value) for option in inside)
    if origin is Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(_fits(inside[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(inside[1], entry) for entry in value.values())
    if kind not in TYPE_NAMES:
        return True  # a part may declare any other type, which is not checked here
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _type_name(kind: Any) -> str:
    limits = _limits(kind)
    if limits is not None:
        return limits.words
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(option) for option in inside)
    if origin is list:
        each, limits = _without_limits(inside[0]), _limits(inside[0])
        numbers = {int: "a list of whole numbers", float: "a list of numbers"}.get(each, "a list")
        return numbers if limits is None else f"{numbers}, each {limits.words}"
    return TYPE_NAMES.get(kind, "a section")
