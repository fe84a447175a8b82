"""The conformance suite: `check_router` runs every check that a router must pass before it is used in a model.

Each check is a function of a `RouterUnderTest`. It raises AssertionError if the router fails, or `NotApplicable`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import unknown_name
from holdfast.routing import Router, create_router
from holdfast.testing import checks, declaration_checks
from holdfast.testing.router_under_test import NotApplicable, Reference, RouterUnderTest

CHECKS: dict[str, Callable[[RouterUnderTest], str | None]] = {
    "contract": checks.contract,
    "empty batch": checks.empty_batch,
    "bad input": checks.bad_input,
    "naive reference": checks.naive_reference,
    "determinism": checks.determinism,
    "ties": checks.ties,
    "causality": checks.causality,
    "sequence awareness": checks.sequence_awareness,
    "padding": checks.padding,
    "batch invariance": checks.batch_invariance,
    "cached decoding": checks.cached_decoding,
    "declared cost": declaration_checks.cost,
    "declared fixed sets": declaration_checks.fixed_sets,
    "declared number of experts": declaration_checks.active_experts,
    "held weights": declaration_checks.held_weights,
    "replay": declaration_checks.replay,
    "declared certificate": declaration_checks.certificate,
    "save and load": checks.save_and_load,
    "evaluation keeps state": checks.evaluation_keeps_state,
    "float32 routing": checks.float32_routing,
    "no inert coefficient": checks.no_inert_coefficient,
    "no inert parameter": checks.no_inert_parameter,
    "second derivatives": checks.second_derivatives,
    "activation checkpointing": checks.activation_checkpointing,
    "compile": checks.compile_whole,
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
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(router, str):
            name, prototype = router, create_router(router, dim=dim, experts=experts, k=k, **options)
        else:
            prototype = router if isinstance(router, Router) else router()
            name = type(prototype.score).__name__
        titles = list(CHECKS) if only is None else list(only)
        passed: list[str] = []
        skipped: dict[str, str] = {}
        notes: dict[str, str] = {}
        for title in titles:
            if title not in CHECKS:
                raise ValueError(unknown_name("check", title, CHECKS))
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
