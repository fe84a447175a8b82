"""The grammar of router names, and the types of the values of their options.

"similarity[tau=2]+smooth[budget=0.5]"      names joined by `+`, options in brackets
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# The grammar of router names.
_NAME = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<options>[^\[\]]*)\])?")  # a name, and its options in brackets
# A comma outside brackets and braces, not before another index of a layer.
_COMMA = re.compile(r",(?![^\[]*\])(?![^{]*\})(?!\s*\d+\s*(?:[,|{]|$))")
_BRACES = re.compile(r"\{(?![^\[]*\]).*", re.DOTALL)  # from an opening brace outside brackets on
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

    Commas outside brackets and braces separate them; a comma before a number continues a list of layers, so `ac@1,3` is one
    router. Braces hold how a router is trained (`train.recipe`).
    """
    return [part.strip() for part in _COMMA.split(written) if part.strip()]


def split_braces(written: str) -> tuple[str, str]:
    """Return a router's name without the braces after it, and these with what is in them; "" if there are none."""
    found = _BRACES.search(written) if isinstance(written, str) else None  # `split_options` refuses other types
    return (written, "") if found is None else (written[: found.start()], found.group())


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
    """Return the value that `text` stands for: a bool, a number, None, a list of numbers joined by `:`, or a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if ":" in text and all(map(_NUMBER.fullmatch, text.split(":"))):
        return [float(number) for number in text.split(":")]
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


def written_option(value: Any) -> str:
    """Return the text of an option's value in the brackets of a router's name."""
    return ":".join(map(written_value, value)) if isinstance(value, list) else written_value(value)


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
