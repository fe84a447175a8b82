"""One-line messages for two frequent errors: a misspelt name, and a package that is not installed."""

import difflib
from collections.abc import Collection, Iterable
from importlib.util import find_spec


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Return "unknown router 'smo': did you mean 'smoe'?", or a message with all names if none is similar."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}."
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
