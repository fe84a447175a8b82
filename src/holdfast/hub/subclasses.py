"""A class that an object can change to without ceasing to be what it was."""

from typing import Any

_made: dict[tuple[Any, Any], Any] = {}


def with_mixin(kind: Any, mixin: Any) -> Any:
    """`kind` with `mixin` in front, under its own name and in its own module; always the same one."""
    if (kind, mixin) not in _made:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
        _made[kind, mixin] = type(kind.__name__, (mixin, kind), names)
    return _made[kind, mixin]


def without_mixin(kind: Any) -> Any:
    """The class that `with_mixin` was given."""
    return kind.__bases__[1]


def _reduce(thing: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: the class cannot be found by its name, which is another's, but made again."""
    made = type(thing)
    _, _, *state = super(made, thing).__reduce_ex__(max(protocol, 2))
    return _blank, (without_mixin(made), made.__bases__[0]), *state


def _blank(kind: Any, mixin: Any) -> Any:
    made = with_mixin(kind, mixin)
    return made.__new__(made)
