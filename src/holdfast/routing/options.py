"""Router names as people write them, `similarity[tau=2]+smooth[budget=0.5]`, and the values of their options.

This grammar holds everywhere: in `create_router`, `reroute` and `sparsify`, in commands and in comparisons.
"""

import contextlib
import math
import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_NAME = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<options>[^\[\]]*)\])?")  # a name, and its options in brackets
_COMMA = re.compile(r",(?![^\[]*\])")  # a comma outside brackets
_PLUS = re.compile(r"\+(?![^\[]*\])")  # a plus sign outside brackets
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_TEXT = re.compile(r"[\w./~-]([\w ./:+~-]*[\w./+~-])?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("", "null", "none", "~"), None),
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "empty"}


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value of a number, for `Annotated[int, Limits(...)]`, and how an error names them."""

    low: float
    high: float
    words: str


def split_routers(written: str) -> list[str]:
    """Return the routers of `smoe,similarity[causal=false,tau=2]`, which commas outside brackets separate."""
    return [part.strip() for part in _COMMA.split(written) if part.strip()]


def split_options(written: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names that `+` joins, without brackets, and the options of all brackets, their types not checked yet.

    An option may stand in the brackets of any name: it goes to the part that has it.
    """
    if not isinstance(written, str):
        raise ValueError(
            f"a router is named by a string, such as 'smooth' or 'ac+symphony', not by a {type(written).__name__}."
        )
    names: list[str] = []
    options: dict[str, Any] = {}
    for part in _PLUS.split(written):
        found = _NAME.fullmatch(part.strip())
        if found is None and part.strip():
            raise ValueError(
                f"{written!r} is not a router: write a name, or a name with its options in brackets, as in "
                "similarity[causal=false]."
            )
        names.append("" if found is None else found["name"].strip())
        for pair in filter(None, map(str.strip, ((found and found["options"]) or "").split(","))):
            key, sign, value = pair.partition("=")
            key = key.strip()
            if not sign or not key:
                raise ValueError(f"{pair!r} in {written!r} is not an option: write option=value.")
            if key in options:
                raise ValueError(f"{written!r} gives the option {key} twice.")
            options[key] = _read_value(value.strip(), pair, written)
    return names, options


def _read_value(text: str, pair: str, written: str) -> Any:
    """Return a truth value, a number, None or a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    if not _TEXT.fullmatch(text) or ": " in text:
        raise ValueError(f"{pair!r} in {written!r} has a value that cannot be read: write a number, true, false or a word.")
    return text


def check_value(kind: Any, value: Any, what: str) -> Any:
    """Return `value` as the type `kind`; where it does not fit, raise a ValueError that says what `what` must be."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, str) and str not in kinds and any(_plain(each) is float for each in kinds):
        with contextlib.suppress(ValueError):  # YAML reads 1e-3 as a text
            value = float(value)
    if not any(_fits(each, value) for each in kinds):
        raise ValueError(f"{what} is {value!r}, not {' or '.join(map(_words, kinds))}.")
    return float(value) if _plain(kind) is float else value


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(kind: Any) -> Limits | None:
    found = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return next((entry for entry in found if isinstance(entry, Limits)), None)


def _fits(kind: Any, value: Any) -> bool:
    limits = _limits(kind)
    if limits is not None:
        return _fits(_plain(kind), value) and limits.low <= value <= limits.high
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(_fits(inside[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind not in TYPE_NAMES:
        return True  # a part may declare any other type, which is not checked here
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _words(kind: Any) -> str:
    limits = _limits(kind)
    if limits is not None:
        return limits.words
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(option) for option in inside)
    if origin is list:
        return "a list of whole numbers" if _plain(inside[0]) is int else "a list"
    return TYPE_NAMES.get(kind, "a section")
