"""Everything registered, and combinations and options of it, through the whole conformance suite."""

from typing import Any

import pytest
from references import reference
from tiers import quick_or_slow

import holdfast
from holdfast.testing import CHECKS, check_router

NEEDED = {"attention": {"heads": 2}}  # options without a default

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, NEEDED.get(name, {})) for name in holdfast.list_routers()
} | {
    "xmoe+symphony": ("xmoe+symphony", {}),
    "symphony, renormalised": ("symphony", {"weights": "softmax"}),
    "symphony, conditional": ("symphony", {"normalize": "conditional"}),
    "symphony, sinkhorn, sparse": ("symphony", {"normalize": "sinkhorn", "threshold": 0.05}),
    "symphony, kaiming, decaying": ("symphony", {"init": "kaiming", "decay_unused": True}),
    "symphony, Gaussian noise": ("symphony", {"noise": "gaussian", "noise_std": 0.3}),
    "similarity, Gumbel noise": ("similarity", {"noise": "gumbel", "noise_temperature": 2.0}),
    "symphony+similarity": ("symphony+similarity", {}),
    "symphony+attention": ("symphony+attention", {"heads": 2}),
    "symphony+smooth": ("symphony+smooth", {"eps": 0.3}),
    "symphony+top-p": ("symphony+top-p", {}),
    "symphony+remoe": ("symphony+remoe", {"init": "identity"}),
    "similarity, low rank": ("similarity", {"rank": 3, "tau": 0.5}),
    "similarity, half strength": ("similarity", {"strength": 0.5}),
    "similarity, all tokens": ("similarity", {"causal": False}),
    "xmoe+similarity": ("xmoe+similarity", {}),
    "smoe-dropout+similarity": ("smoe-dropout+similarity", {}),
    "similarity+smooth": ("similarity+smooth", {"eps": 0.3}),
    "xmoe+attention": ("xmoe+attention", {"heads": 2}),
    "smoe-dropout+attention": ("smoe-dropout+attention", {"heads": 2}),
    "attention, sigma 1": ("attention", {"heads": 2, "sigma": 1.0}),
    "ac, variance, mixed": ("ac", {"spread": "variance", "mix": 3}),
    "ac, batch statistics": ("ac", {"stats": "batch"}),
    "xmoe+ac": ("xmoe+ac", {}),
    "ac+top-p": ("ac+top-p", {}),
    "ac+top-p, learned": ("ac+top-p", {"learned": True, "p": 0.1, "softness": 0.1}),
    "ac+symphony+similarity+smooth": ("ac+symphony+similarity+smooth", {"budget": 3.0}),
    "xmoe+smooth": ("xmoe+smooth", {}),
    "smooth, by its loss": ("smooth", {"control": "loss", "eps": 0.5}),
    "smooth, at most 3": ("smooth", {"eps": 1.0, "most": 3}),
    "symphony+smooth, at most 3": ("symphony+smooth", {"eps": 1.0, "most": 3}),
    "smooth, annealed": ("smooth", {"anneal": True, "eps": 0.5}),
    "smooth, hard inference": ("smooth", {"inference": "hard", "eps": 0.5}),
    "xmoe+top-p": ("xmoe+top-p", {}),
    "xmoe+switch": ("xmoe+switch", {}),
    "xmoe+remoe": ("xmoe+remoe", {}),
    "softmoe, three slots": ("softmoe", {"slots": 3}),
    "softmoe+symphony": ("softmoe+symphony", {"slots": 2}),
    "softmoe+ac": ("softmoe+ac", {"slots": 2}),
    "softmoe+ac, one cluster": ("softmoe+ac", {"mix": 1}),
    "softmoe+similarity": ("softmoe+similarity", {}),
    "softmoe+ac+symphony": ("softmoe+ac+symphony", {"slots": 2, "mix": 3}),
    "smear, mean of gates": ("smear", {"average": "gates"}),
    "smear+symphony": ("smear+symphony", {}),
    "smoe, k = E": ("smoe", {"k": 7}),
    "smoe, bias": ("smoe", {"bias": True}),
    "smoe, learned Gaussian noise": ("smoe", {"noise": "gaussian"}),
    "smoe, fixed Gaussian noise": ("smoe", {"noise": "gaussian", "noise_std": 0.5}),
    "switch, Gumbel noise": ("switch", {"noise": "gumbel", "noise_temperature": 2.0, "k": 2}),
    "top-p, learned": ("top-p", {"learned": True, "p": 0.1, "softness": 0.1}),
    "smoe, k grows": ("smoe", {"k_final": 5}),
    "smoe, k shrinks": ("smoe", {"k": 5, "k_final": 2}),
}


@pytest.mark.parametrize("check", quick_or_slow(CHECKS, [check for check in CHECKS if check != "compile"]))
@pytest.mark.parametrize("variant", quick_or_slow(VARIANTS, [*holdfast.list_routers(), "ac+symphony+similarity+smooth"]))
@pytest.mark.every_combination
def test_router_conforms(variant: str, check: str) -> None:
    name, options = VARIANTS[variant]
    if variant == "smoe, k = E" and check == "no inert coefficient":
        # Every token takes every expert, so the shares are equal whatever the router does: nothing is left to balance.
        with pytest.raises(AssertionError, match="'balance'"):
            check_router(name, only=[check], **options)
        return
    report = check_router(name, reference=reference, only=[check], **options)
    may_be_left_out = {"no inert parameter"} if "smoe-dropout" in name else set()
    may_be_left_out |= {"declared certificate"} if name.startswith(("softmoe", "smear")) else set()
    may_be_left_out |= {"sequence awareness"} if options.get("stats") == "batch" else set()
    assert set(report.skipped) <= may_be_left_out, report.skipped
