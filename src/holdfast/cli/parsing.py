"""Read the arguments of a command with tyro: help in which every argument has a name, and each mistake as one sentence.

Nothing here imports torch: help and mistakes are answered at once.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import DisallowNone, Positional, PositionalMetavarFromFieldName, arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from holdfast.errors import closest_name, unknown_name

WIDEST = 100  # columns of a description
# What an option takes, by the name that tyro shows for it.
EXPECTED = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "PATH": "a path",
    "STR": "a value",
    "FLOAT FLOAT": "two numbers",
    "PATH PATH": "two paths",
    "[FLOAT [FLOAT ...]]": "numbers",
}
_EXAMPLE = re.compile(r"`([^`]+)`(?:\s*\(([^()]+)\))?")  # an example of a docstring, and what it is for
_NUMBER = re.compile(r"-[\d.]")


def parse(kind: type[Any], prog: str, arguments: list[str]) -> Any:
    """Return the command `kind`, a dataclass, with these arguments; print the help and exit if they ask for it.

    Raise ValueError with one sentence if they are wrong.
    """
    _check_options(kind, prog, arguments)
    if {"-h", "--help"} & {*arguments}:
        print(_description(kind), end="\n\n")
        arguments = ["--help"]
    errors = getattr(tyro, "_errors", None)  # not public: a release of tyro without it prints mistakes in its own way
    with nullcontext() if errors is None else errors.on_parse_error(lambda event: _refuse(event, arguments)):
        return tyro.cli(
            kind,
            prog=prog,
            args=arguments,
            description="",  # printed above: tyro would join its lines
            config=(DisallowNone, PositionalMetavarFromFieldName),
            registry=_help_texts(),
        )


def _check_options(kind: type[Any], prog: str, arguments: list[str]) -> None:
    """Raise ValueError for an option that the command does not have, and for a value of an option that takes none."""
    known = {"help": "switch", **dict(_names(kind))}
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if argument == "--":
            return
        if not argument.startswith("-") or _NUMBER.match(argument) or argument == "-h":
            continue
        option = name.lstrip("-").replace("_", "-")
        if name.startswith("--") and known.get(option, "positional") != "positional":
            if sign and known[option] == "switch":
                raise ValueError(f"{name} takes no value; write {name} or --{_inverse(option)}.")
            continue
        near = closest_name(option, known, cutoff=0.7)  # less is chance among so many short names
        if near is None:
            raise ValueError(f"unknown option {name!r}; {prog} --help lists the options.")
        if known[near] == "positional":
            raise ValueError(f"unknown option {name!r}: {near.upper()} is written without the name of an option.")
        raise ValueError(f"unknown option {name!r}: did you mean '--{near}'?")


def _names(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of a command's arguments, and what each is: "option", "switch" (no value) or "positional"."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, *details = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (hints[field.name],)
        if is_dataclass(hint):
            yield from _names(hint)  # type: ignore[arg-type]
            continue
        given: list[Any] = [detail for detail in details if isinstance(detail, type(arg()))]
        if Positional in details:
            yield next((detail.metavar for detail in given if detail.metavar), field.name).lower(), "positional"
            continue
        names = [next((detail.name for detail in given if detail.name), field.name).replace("_", "-")]
        names += [alias.lstrip("-") for detail in given for alias in detail.aliases or ()]
        is_switch = hint in (bool, bool | None)
        for name in names:
            yield from ((each, "switch") for each in (name, _inverse(name))) if is_switch else [(name, "option")]


def _inverse(switch: str) -> str:
    return switch[3:] if switch.startswith("no-") else f"no-{switch}"


def _refuse(event: Any, arguments: list[str]) -> None:
    """Raise ValueError with one sentence for a mistake that tyro has found; say nothing if it is of an unknown kind."""
    kind, argument = type(event).__name__, getattr(event, "argument", None)
    if kind == "UnrecognizedArgs":
        raise ValueError(f"unexpected argument {event.tokens[0]!r}; {event.prog} --help shows what the command takes.")
    if kind == "MissingArgs":
        missing = event.missing_arguments[0].arg
        about = missing.field.helptext()
        raise ValueError(
            f"{event.prog.removeprefix('holdfast ')} needs {missing.lowered.metavar}: {about[0].lower()}{about[1:]}"
        )
    if argument is None:
        return
    name = argument.lowered.metavar if argument.is_positional() else argument.lowered.name_or_flags[-1]
    expected = EXPECTED.get(argument.lowered.metavar, argument.lowered.metavar)
    if kind == "InvalidChoice":
        known = [choice for choice in event.choices if choice != "None"]
        raise ValueError(unknown_name(name, event.value, known, cutoff=0.5))  # fp32 is float32
    if kind == "BadValue":
        raise ValueError(f"{name} needs {expected} after it.")
    if kind == "InstantiationFailure":
        raise ValueError(f"{name} is {_given(name, arguments)!r}; expected {expected}.")


def _given(option: str, arguments: list[str]) -> str:
    """Return the value of the last such option, as it was written."""
    values: list[str] = []
    is_here = False
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if argument.startswith("--"):
            is_here = name.replace("_", "-") == option
            values = ([value] if sign else []) if is_here else values
        elif is_here:
            values.append(argument)
    return " ".join(values)


def _description(kind: type[Any]) -> str:
    """Return the docstring of a command for its help: paragraphs, then one example a line."""
    about, _, examples = (kind.__doc__ or "").partition("Examples:")
    width = min(shutil.get_terminal_size().columns, WIDEST)
    texts = [" ".join(paragraph.split()) for paragraph in about.split("\n\n")]
    paragraphs = [textwrap.fill(text, width, break_on_hyphens=False) for text in texts if text]
    lines = ["Examples:"]
    for line, purpose in _EXAMPLE.findall(examples):
        lines.append(f"  {' '.join(line.split())}{f'  # {purpose}' if purpose else ''}")
    return "\n\n".join([*paragraphs, "\n".join(lines)])


def _help_texts() -> ConstructorRegistry:
    """Return tyro's rules for commands, with the texts of the help changed: no line breaks, and no default of None."""
    registry = ConstructorRegistry()
    is_asking = False

    @registry.struct_rule
    def describe(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_asking
        if is_asking or not is_dataclass(info.type):
            return None
        is_asking = True  # tyro's own rule is asked for, which comes after this one
        found = ConstructorRegistry.get_struct_spec(info)
        is_asking = False
        assert isinstance(found, StructConstructorSpec)
        return replace(found, fields=tuple(map(_described, found.fields)))

    return registry


def _described(field: StructFieldSpec) -> StructFieldSpec:
    def text() -> str:  # reading docstrings takes time: only for a help
        given = field.helptext() if callable(field.helptext) else field.helptext
        return " ".join((given or "").split())

    kind: Any = Annotated[field.type, arg(help_behavior_hint=_default)]
    return replace(field, type=kind, helptext=text)


def _default(label: str) -> str:
    """Return what the help says about a default value."""
    return {"None": "", "": "", "False": "", "True": "(the default)"}.get(label, f"(default: {label})")
