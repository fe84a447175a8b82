"""One-line messages: of any error, of a misspelt name, and of a package that is not installed."""

import difflib
import re
from collections.abc import Collection, Iterable
from importlib.util import find_spec

LONGEST_MESSAGE = 2000  # characters
_CPP_TRACE = re.compile(r"\n\s*(?:Exception raised from |C\+\+ CapturedTraceback|frame #0: )")


def one_line(problem: BaseException | str) -> str:
    """Return an error's message as one printable line, without the C++ trace that torch may add to it.

    It may quote a file, with line ends and control characters.
    """
    text = " ".join(_CPP_TRACE.split(str(problem), maxsplit=1)[0].split())
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return shown if len(shown) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]} ..."


def closest_name(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of the known names; None if the similarity of none, from 0 to 1, reaches the cutoff."""
    return next(iter(difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=cutoff)), None)


def unknown_name(kind: str, name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "unknown router 'smo': did you mean 'smoe'?", or a message with all names if none is similar."""
    names = sorted(known)
    near = closest_name(name, names, cutoff)
    hint = f"expected one of {', '.join(names)}." if near is None else f"did you mean {near!r}?"
    return f"unknown {kind} {name!r}: {hint}"


def require_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raise ValueError with that message unless `name` is in `known`."""
    if name not in known:
        raise ValueError(unknown_name(kind, name, known))


# How to install Holdfast with its extra `lab`, in errors and model cards. A release to a package index changes this line.
INSTALL = "`pip install '.[lab]'` in the folder of Holdfast's source code (it is not on a package index)"


class MissingExtra(ImportError, ValueError):
    """A package of the extra `lab` (optional dependencies) is not installed."""


def missing_extra_message(purpose: str, *modules: str) -> str | None:
    """Return what is missing and how to install it, without a full stop; None if all modules are installed."""
    missing = [module for module in modules if find_spec(module) is None]
    return f"{purpose} needs {' and '.join(missing)}; install the extra `lab`: run {INSTALL}" if missing else None


def require_extra(purpose: str, *modules: str) -> None:
    """Raise MissingExtra unless all `modules`, which belong to the extra `lab`, are installed."""
    message = missing_extra_message(purpose, *modules)
    if message is not None:
        raise MissingExtra(f"{message}.")
