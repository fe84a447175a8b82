"""The grammar of router names, and the types of the values of their options.

"similarity[tau=2]+smooth[budget=0.5]"      names joined by `+`, options in brackets
"""

import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

# The grammar of router names.
_NAME = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<options>[^\[\]]*)\])?")  # a name, and its options in brackets
_COMMA = re.compile(r",(?![^\[]*\])(?!\s*\d+\s*(?:[,|]|$))")  # a comma outside brackets, not before another index of a layer
NAMES_LAYERS = re.compile(r"[@|](?![^\[]*\])")  # outside brackets
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


def split_routers(written: str) -> list[str]:
    """Return the routers of a list such as `smoe,ac@1,3,similarity[causal=false,tau=2]`.

    Commas outside brackets separate them; a comma before a number continues a list of layers, so `ac@1,3` is one router.
    """
    return [part.strip() for part in _COMMA.split(written) if part.strip()]


def split_options(written: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names that `+` joins, and the options of all brackets, with values whose types are not checked yet.

    An option may be in the brackets of any name: it goes to the part that has it.
    """
    if not isinstance(written, str):
        raise ValueError(
            f"the name of a router is a string such as 'smooth' or 'ac+symphony', but got a {type(written).__name__}."
        )
    if NAMES_LAYERS.search(written):
        raise ValueError(
            f"{written!r} names layers of a model, but one router is needed here: leave out @, its layers and | "
            "(reroute, sparsify, plan, compare, train and audit --what-if take names with layers)."
        )
    names: list[str] = []
    options: dict[str, Any] = {}
    for part in _PLUS.split(written):
        found = _NAME.fullmatch(part.strip())
        if found is None and part.strip():
            raise ValueError(
                f"{written!r} is not a router: write a name, or a name with options in brackets, as in "
                "similarity[causal=false]."
            )
        names.append("" if found is None else found["name"].strip())
        for pair in filter(None, map(str.strip, ((found and found["options"]) or "").split(","))):
            key, sign, value = pair.partition("=")
            key = option_name(key.strip())
            if not sign or not key:
                raise ValueError(f"{pair!r} in {written!r} is not an option: write option=value.")
            if key in options:
                raise ValueError(f"{written!r} gives the option {key} twice.")
            try:
                options[key] = read_value(value.strip())
            except ValueError as problem:
                raise ValueError(f"{pair!r} in {written!r} has {problem}") from None
    return names, options


def read_value(text: str) -> Any:
    """Return the value that `text` stands for: a bool, a number, None or a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    if not _TEXT.fullmatch(text) or ": " in text:
        raise ValueError("a value that cannot be read: write a number, true, false or a word.")
    return text


def written_value(value: Any) -> str:
    """Return the text that `read_value` reads as this value; a list in brackets."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(written_value, value))}]"
    text = str(value)
    if not isinstance(value, str):
        return text
    try:
        return text if read_value(text) == value else f"'{text}'"
    except ValueError:
        return f"'{text}'"


def written_pairs(values: Mapping[str, Any]) -> str:
    """Return names and values as text: "sparse.k=1, training.learning_rate=0.001"."""
    return ", ".join(f"{name}={written_value(value)}" for name, value in values.items())


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key, `k` of `sparse.k`; the whole keys if two have the same last part."""
    short = [key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else list(keys)


def option_name(parameter: str) -> str:
    """Return the option that a constructor's parameter is for. The parameter of `from`, a Python keyword, is `from_`.

    So the option is written `similarity[from=confident]`, and in Python `create_router("similarity", from_="confident")`.
    """
    return parameter.removesuffix("_")


# The types of option values.
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "empty"}


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value of a number, for `Annotated[int, Limits(...)]`, and the words for an error."""

    low: float
    high: float
    words: str


def check_value(kind: Any, value: Any, what: str) -> Any:
    """Return `value` as the type `kind`; raise ValueError if it has another type. `what` names the value in the error."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, str) and str not in kinds and any(_without_limits(each) is float for each in kinds):
        value = _as_number(value)
    if isinstance(value, list) and any(
        get_origin(each) is list and _without_limits(get_args(each)[0]) is float for each in kinds
    ):
        value = [_as_number(entry) if isinstance(entry, str) else entry for entry in value]
    if not any(_fits(each, value) for each in kinds):
        raise ValueError(f"{what} is {value!r}, not {' or '.join(map(_type_name, kinds))}.")
    plain = [_without_limits(each) for each in kinds]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_whole and float in plain and int not in plain else value


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


def _without_limits(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(kind: Any) -> Limits | None:
    found = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return next((entry for entry in found if isinstance(entry, Limits)), None)


def _fits(kind: Any, value: Any) -> bool:
    limits = _limits(kind)
    if limits is not None:
        return _fits(_without_limits(kind), value) and limits.low <= value <= limits.high
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
