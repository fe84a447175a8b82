"""One sentence for an unknown name: what it was, the nearest one that exists, where to look.

One sentence for a package that is not installed: which one, what needs it, and which extra brings it.
"""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown router 'smo': did you mean 'smoe'?`, or the whole list when nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}."
    return f"unknown {kind} {name!r}: {hint}"


INSTALL = "pip install 'holdfast[lab]'"


class MissingExtra(ImportError, ValueError):
    """A package of the extra `lab` is not installed."""


def lacking(purpose: str, *modules: str) -> str | None:
    """Return the sentence that says which of the modules are not installed; None where all are."""
    missing = [module for module in modules if find_spec(module) is None]
    return f"{purpose} needs {' and '.join(missing)}, which the extra `lab` brings: {INSTALL}" if missing else None


def require_extra(purpose: str, *modules: str) -> None:
    """Raise a MissingExtra unless the modules, all of the extra `lab`, are installed."""
    sentence = lacking(purpose, *modules)
    if sentence is not None:
        raise MissingExtra(sentence)
