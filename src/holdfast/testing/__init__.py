"""The conformance suite: `check_router` runs every check that a router must pass before it is used in a model.

Each check is a function of a `RouterUnderTest`. It raises AssertionError if the router fails, or `NotApplicable`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import require_known
from holdfast.routing import Router, create_router
from holdfast.testing import checks, declaration_checks
from holdfast.testing.router_under_test import NotApplicable, Reference, RouterUnderTest

CHECKS: dict[str, Callable[[RouterUnderTest], str | None]] = {
    name.removeprefix("check_").replace("_", " "): function
    for module in (checks, declaration_checks)
    for name, function in vars(module).items()
    if name.startswith("check_")
}


@dataclass(frozen=True)
class Report:
    """Which checks passed, which did not apply and why, and the remarks of checks."""

    passed: tuple[str, ...]
    skipped: dict[str, str]
    notes: dict[str, str]


def check_router(
    router: str | Router | Callable[[], Router],
    *,
    dim: int = 24,
    experts: int = 7,
    k: int | None = None,
    reference: Reference | None = None,
    only: Iterable[str] | None = None,
    **options: Any,
) -> Report:
    """Run the conformance suite on a registered name, a `Router`, or a function that builds one.

    `dim`, `experts`, `k` and `options` are used to build a router from a name. `reference(router, tokens, context)` returns
    the same `Routing`, computed naively; without it that check is skipped. Raise AssertionError if a check fails.

    only    run these checks: keys of `holdfast.testing.CHECKS`, such as "declared cost", which failures and reports name too
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(router, str):
            name, prototype = router, create_router(router, dim=dim, experts=experts, k=k, **options)
        else:
            prototype = router if isinstance(router, Router) else router()
            name = "+".join(type(part).__name__ for part in prototype.parts)
        passed: list[str] = []
        skipped: dict[str, str] = {}
        notes: dict[str, str] = {}
        for title in CHECKS if only is None else only:
            require_known("check", title, CHECKS)
            torch.manual_seed(0)
            try:
                note = CHECKS[title](RouterUnderTest(prototype, reference).warm_up())
            except NotApplicable as reason:
                skipped[title] = str(reason)
            except Exception as failure:
                kind = "" if isinstance(failure, AssertionError) else f"{type(failure).__name__}: "
                raise AssertionError(f"router {name!r} fails {title!r}: {kind}{failure}") from failure
            else:
                passed.append(title)
                notes |= {} if note is None else {title: note}
    return Report(tuple(passed), skipped, notes)
