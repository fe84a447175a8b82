"""What belongs to one thread or asyncio task: its running forward, and the contexts that it has entered."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class PerThread(threading.local):
    """Attributes with separate values in every thread. A copy, and an object loaded from a pickle, has initial values."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


_entered: ContextVar[tuple[object, ...]] = ContextVar("holdfast_entered", default=())


@contextmanager
def entered(key: object) -> Iterator[None]:
    """Inside the `with`, `key` is in `entered_keys()` of this thread or asyncio task, and where its context is copied to."""
    _entered.set((*_entered.get(), key))
    try:
        yield
    finally:  # not by the token of `set`: a generator may be closed in another context
        _entered.set(tuple(other for other in _entered.get() if other is not key))


def entered_keys() -> tuple[object, ...]:
    """Return the keys of every `entered` around the running code, the innermost last. A compiler cannot trace this."""
    return _entered.get()


class _CalledAlone(PerThread):
    gate: Any = None


_called_alone = _CalledAlone()


@contextmanager
def calling_alone(gate: Any) -> Iterator[None]:
    """Inside the `with`, this thread calls a gate outside of a forward of its layer, with tokens of its own."""
    _called_alone.gate = gate
    try:
        yield
    finally:
        _called_alone.gate = None


def is_called_alone(gate: Any) -> bool:
    """Whether this thread calls `gate` in `calling_alone`."""
    return _called_alone.gate is gate


@contextmanager
def one_more(entries: list[None]) -> Iterator[None]:
    """Inside the `with`, the list has one more entry: a count that several threads may change."""
    entries.append(None)
    try:
        yield
    finally:
        entries.pop()
