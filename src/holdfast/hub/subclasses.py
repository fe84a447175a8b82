"""A class that an object can change to without ceasing to be what it was."""

from typing import Any

_made: dict[tuple[Any, Any], Any] = {}


def with_mixin(kind: Any, mixin: Any) -> Any:
    """`kind` with `mixin` in front, under its own name and in its own module; always the same one."""
    if (kind, mixin) not in _made:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _made[kind, mixin] = type(kind.__name__, (mixin, kind), names)
    return _made[kind, mixin]


def without_mixin(kind: Any) -> Any:
    """The class that `with_mixin` was given."""
    return kind.__mro__[2]
