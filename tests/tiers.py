"""Which cases `make test` runs; the rest carry the marker `slow` and run with `make test-slow`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def quick_or_slow(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, with those outside `quick` marked as slow. A tuple holds the values of one case."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
