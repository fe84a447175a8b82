"""Everything registered, and combinations and options of it, through the whole conformance suite."""

from typing import Any

import pytest
from references import reference

import holdfast
from holdfast.testing import CHECKS, check_router

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in holdfast.routers()} | {
    "xmoe+top-p": ("xmoe+top-p", {}),
    "xmoe+switch": ("xmoe+switch", {}),
    "xmoe+remoe": ("xmoe+remoe", {}),
    "smoe, k = E": ("smoe", {"k": 7}),
    "smoe, bias": ("smoe", {"bias": True}),
    "smoe, learned Gaussian noise": ("smoe", {"noise": "gaussian"}),
    "smoe, fixed Gaussian noise": ("smoe", {"noise": "gaussian", "noise_std": 0.5}),
    "switch, Gumbel noise": ("switch", {"noise": "gumbel", "noise_temperature": 2.0, "k": 2}),
    "top-p, learned": ("top-p", {"learned": True, "p": 0.1, "softness": 0.1}),
    "smoe, k grows": ("smoe", {"k_final": 5}),
    "smoe, k shrinks": ("smoe", {"k": 5, "k_final": 2}),
}


def test_every_registered_router_is_here() -> None:
    assert set(holdfast.routers()) <= set(VARIANTS)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_router_conforms(variant: str, check: str) -> None:
    name, options = VARIANTS[variant]
    if variant == "smoe, k = E" and check == "no inert coefficient":
        # Every token takes every expert, so the shares are equal whatever the router does: nothing is left to balance.
        with pytest.raises(AssertionError, match="'balance' changes no gradient"):
            check_router(name, only=[check], **options)
        return
    report = check_router(name, reference=reference, only=[check], **options)
    may_be_left_out = {"no inert parameter"} if name == "smoe-dropout" else set()
    assert set(report.left_out) <= may_be_left_out, report.left_out
