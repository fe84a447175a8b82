"""One sentence for a package that is not installed: which one, what needs it, and which extra brings it."""

from importlib.util import find_spec

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
