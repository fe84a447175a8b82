"""Which tests `make test` runs; the others have the marker `slow` and run with `make test-all`.

Of a test with several cases, `make test` runs the first; the others are slow. The marker `every_combination` keeps all of
them, as for the conformance of every router. Other slow tests are marked where they are.
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def quick_or_slow(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, with those outside `quick` marked as slow. A tuple holds the values of one case."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cases of a test but the first quick one."""
    seen: set[str] = set()
    for item in items:
        if "[" in item.nodeid and not item.get_closest_marker("slow") and not item.get_closest_marker("every_combination"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)
