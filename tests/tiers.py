"""Which tests `make test` runs; the others have the marker `slow` and run with `make test-all`.

Of a test with many cases, `make test` runs `QUICK` of them, with different values of each parameter where that is possible;
the others are slow. The marker `every_combination` keeps all of them, as for the conformance of every router. Other slow
tests are marked where they are.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

QUICK = 2  # cases of a test


def quick_or_slow(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, with those outside `quick` marked as slow. A tuple holds the values of one case."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cases of a test but `QUICK` of them."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "[" in item.nodeid and not item.get_closest_marker("slow") and not item.get_closest_marker("every_combination"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        # pytest has one name for each `parametrize`, also where it gives several arguments together.
        keep = sorted(covering([case.callspec._idlist for case in cases]))[:QUICK]  # type: ignore[attr-defined]
        for number, case in enumerate(cases):
            if number not in keep:
                case.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Sequence[str]]) -> set[int]:
    """Return the indices of a few cases that contain every value of every parameter: first those with only new values."""
    seen: set[tuple[int, str]] = set()
    keep: set[int] = set()
    for wanted in (all, any):
        for number, case in enumerate(cases):
            if wanted(value not in seen for value in enumerate(case)):
                keep.add(number)
                seen.update(enumerate(case))
    return keep
