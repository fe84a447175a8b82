"""Everything registered, and combinations and options of it, through the whole conformance suite."""

from typing import Any

import pytest
from references import reference
from tiers import quick_or_slow

import holdfast
from holdfast.testing import CHECKS, check_router
from holdfast.testing.router_under_test import VOCABULARY

# Options without a default.
NEEDED: dict[str, dict[str, Any]] = {
    "attention": {"heads": 2},
    "hash": {"vocabulary": VOCABULARY},
    "stablemoe": {"vocabulary": VOCABULARY},
}

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
    "symphony, Gumbel noise": ("symphony", {"noise": "gumbel", "noise_temperature": 0.6}),
    "xmoe+top-p, Gumbel noise": ("xmoe+top-p", {"noise": "gumbel", "noise_temperature": 3.0}),
    "ac+smooth, Gumbel noise": ("ac+smooth", {"eps": 0.5, "noise": "gumbel", "noise_temperature": 0.7}),
    "symphony+similarity": ("symphony+similarity", {}),
    "symphony+attention": ("symphony+attention", {"heads": 2}),
    "symphony+smooth": ("symphony+smooth", {"eps": 0.3, "budget": 1.0}),
    "symphony+top-p": ("symphony+top-p", {}),
    "symphony+remoe": ("symphony+remoe", {"init": "identity"}),
    "similarity, low rank": ("similarity", {"rank": 3, "tau": 0.5}),
    "similarity, half strength": ("similarity", {"strength": 0.5}),
    "similarity of attention, tau 1": ("similarity", {"of": "attention", "tau": 1.0}),
    "similarity, bilinear": ("similarity", {"rank": 5, "form": "bilinear"}),
    "similarity, learned strength": ("similarity", {"strength": "learned", "rank": 4}),
    "similarity, from confident": ("similarity[from=confident]", {}),
    "similarity, everything": ("similarity[from=confident,form=bilinear,rank=3,strength=learned,of=attention]", {}),
    "symphony+similarity, from confident": ("symphony+similarity", {"from_": "confident"}),
    "attention, all heads": ("attention", {"heads": "all"}),
    "attention, batch statistics": ("attention", {"heads": 2, "stats": "batch"}),
    "symphony+attention, batch statistics": ("symphony+attention", {"heads": 2, "stats": "batch", "sigma": 2.0}),
    "attention, from confident": ("attention", {"heads": 2, "from_": "confident", "strength": "learned"}),
    "attention, all heads, from confident": ("attention", {"heads": "all", "from_": "confident", "sigma": 2.0}),
    "similarity, all tokens": ("similarity", {"causal": False}),
    "xmoe+similarity": ("xmoe+similarity", {}),
    "smoe-dropout+similarity": ("smoe-dropout+similarity", {}),
    # A wide strip: in a narrow one, rounding of 3e-8 in the gates is 1e-5 in the weights.
    "similarity+smooth": ("similarity+smooth", {"eps": 0.3, "budget": 2.0}),
    "xmoe+attention": ("xmoe+attention", {"heads": 2}),
    "smoe-dropout+attention": ("smoe-dropout+attention", {"heads": 2}),
    "attention, sigma 1": ("attention", {"heads": 2, "sigma": 1.0}),
    "ac, variance, mixed": ("ac", {"spread": "variance", "mix": 3}),
    "ac, batch statistics": ("ac", {"stats": "batch"}),
    "ac, interquartile ranges": ("ac", {"spread": "iqr"}),
    "ac, interquartile ranges of the batch": ("ac", {"spread": "iqr", "stats": "batch"}),
    "ac, exact": ("ac", {"scales": "exact"}),
    "ac, exact, mixed, batch statistics": ("ac", {"scales": "exact", "mix": 2, "stats": "batch"}),
    "xmoe+ac, random features": ("xmoe+ac", {"features": "random"}),
    "ac+symphony+smooth, exact ranges": ("ac+symphony+smooth", {"scales": "exact", "spread": "iqr", "budget": 3.0}),
    "xmoe+ac": ("xmoe+ac", {}),
    "ac+top-p": ("ac+top-p", {}),
    "ac+top-p, learned": ("ac+top-p", {"learned": True, "p": 0.1, "softness": 0.1}),
    "ac+symphony+similarity+smooth": ("ac+symphony+similarity+smooth", {"budget": 3.0}),
    "xmoe+smooth": ("xmoe+smooth", {}),
    "smooth, by its loss": ("smooth", {"control": "loss", "eps": 0.5}),
    "smooth, by its loss, all rows": ("smooth", {"control": "loss", "eps": 1.0, "rows": "all"}),
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
    "mlp, bias, hidden 9": ("mlp", {"bias": True, "hidden": 9}),
    "mlp+symphony": ("mlp+symphony", {}),
    "mlp+similarity": ("mlp+similarity", {}),
    "mlp+ac": ("mlp+ac", {}),
    "mlp+smooth": ("mlp+smooth", {"eps": 0.3, "budget": 2.0}),
    "mlp+top-p, hidden 5": ("mlp+top-p", {"hidden": 5}),
    "mlp+remoe": ("mlp+remoe", {}),
    "mlp+expert-choice": ("mlp+expert-choice", {}),
    "mlp+capacity": ("mlp+capacity", {"factor": 0.9, "policy": "next"}),
    "smoe, learned Gaussian noise": ("smoe", {"noise": "gaussian"}),
    "smoe, fixed Gaussian noise": ("smoe", {"noise": "gaussian", "noise_std": 0.5}),
    "switch, Gumbel noise": ("switch", {"noise": "gumbel", "noise_temperature": 2.0, "k": 2}),
    "smoe, learned uniform noise": ("smoe", {"noise": "uniform"}),
    "top-p, uniform noise": ("top-p", {"noise": "uniform", "noise_std": 0.3}),
    "remoe, learned Gaussian noise": ("remoe", {"noise": "gaussian"}),
    "symphony+remoe, Gumbel noise": ("symphony+remoe", {"init": "identity", "threshold": 0.03, "noise": "gumbel"}),
    "smooth, Gaussian noise": ("smooth", {"eps": 0.5, "noise": "gaussian", "noise_std": 0.3}),
    "symphony+similarity+smooth, Gumbel noise": ("symphony+similarity+smooth", {"eps": 0.5, "noise": "gumbel"}),
    "remoe, load-weighted penalty": ("remoe", {"penalty": "load"}),
    "remoe, one coefficient": ("remoe", {"coefficient": "model", "penalty": "load"}),
    "random+symphony": ("random+symphony", {}),
    "smooth, other exponents": ("smooth", {"eps": 0.5, "a": 2.5, "b": 7.0}),
    "symphony+smooth, other exponents": ("symphony+smooth", {"eps": 0.5, "a": 3.0, "b": 2.0}),
    "smooth, by its loss, other exponents": ("smooth", {"control": "loss", "eta": 0.2, "a": 2.0, "b": 10.0}),
    "top-p, learned": ("top-p", {"learned": True, "p": 0.1, "softness": 0.1}),
    "hash, k = 3, balanced": ("hash", {"vocabulary": VOCABULARY, "k": 3, "balanced": True}),
    "stablemoe, k = 2": ("stablemoe", {"vocabulary": VOCABULARY, "k": 2, "width": 8}),
    "xmoe+stablemoe": ("xmoe+stablemoe", {"vocabulary": VOCABULARY}),
    "modality+stablemoe": ("modality+stablemoe", {"vocabulary": VOCABULARY}),
    "xmoe+sparsemax": ("xmoe+sparsemax", {"temperature": 1.0}),
    "symphony+sparsemax": ("symphony+sparsemax", {"init": "identity"}),
    "similarity+sparsemax": ("similarity+sparsemax", {}),
    "grouped, one of 2 groups, switch": ("grouped", {"groups": 2, "top_groups": 1, "weights": "switch"}),
    "grouped, one group": ("grouped", {"groups": 1}),
    "grouped, Gaussian noise": ("grouped", {"noise": "gaussian", "noise_std": 0.5}),
    "symphony+grouped": ("symphony+grouped", {}),
    "xmoe+grouped": ("xmoe+grouped", {}),
    "hierarchical, one of 3 groups, bias": ("hierarchical", {"groups": 3, "top_groups": 1, "bias": True}),
    "hierarchical, renormalised, Gumbel noise": (
        "hierarchical",
        {"groups": 4, "top_groups": 2, "weights": "softmax", "noise": "gumbel", "noise_temperature": 2.0},
    ),
    "hierarchical, by modality": ("hierarchical", {"groups": 5, "top_groups": 1, "by": "modality", "k": 1}),
    "symphony+hierarchical": ("symphony+hierarchical", {}),
    "ac+hierarchical": ("ac+hierarchical", {}),
    "modality, k = 3": ("modality", {"k": 3}),
    "modality+symphony": ("modality+symphony", {}),
    "modality+smooth, by its loss": ("modality+smooth", {"control": "loss", "eps": 0.5}),
    "modality+grouped": ("modality+grouped", {}),
    "smoe, k grows": ("smoe", {"k_final": 5}),
    "smoe, k shrinks": ("smoe", {"k": 5, "k_final": 2}),
    "expert-choice, same in evaluation": ("expert-choice", {"evaluate": "same", "factor": 1.5}),
    "xmoe+expert-choice": ("xmoe+expert-choice", {}),
    "symphony+expert-choice": ("symphony+expert-choice", {"init": "identity"}),
    "sinkhorn, k = 1": ("sinkhorn", {"k": 1}),
    "sinkhorn, running": ("sinkhorn", {"bias": "running"}),
    "symphony+sinkhorn": ("symphony+sinkhorn", {"init": "kaiming"}),
    "symphony+sinkhorn, k = 1, running": ("symphony+sinkhorn", {"init": "kaiming", "k": 1, "bias": "running"}),
    "sinkhorn, sparse": ("sinkhorn", {"sparsity": 3, "gamma": 0.5}),
    "sinkhorn, sparse, running": ("sinkhorn", {"sparsity": 2, "bias": "running", "noise": "gaussian"}),
    "symphony+sinkhorn, sparse": ("symphony+sinkhorn", {"init": "kaiming", "sparsity": 2}),
    "similarity+sinkhorn, running": ("similarity+sinkhorn", {"bias": "running"}),
    "base, k = 2": ("base", {"k": 2}),
    "xmoe+base": ("xmoe+base", {}),
    "capacity, next": ("capacity", {"factor": 1.0, "policy": "next"}),
    "capacity, reroute": ("capacity", {"factor": 1.0, "policy": "reroute"}),
    "capacity, factors of experts": ("capacity", {"factor": [0.3, 0.6, 0.9, 1.2, 1.5, 0.2, 2.0]}),
    "capacity, factors of experts, reroute": ("capacity[factor=0.3:0.6:0.9:1.2:1.5:0.2:2,policy=reroute]", {}),
    "capacity, by position": ("capacity", {"factor": 1.0, "order": "position"}),
    "capacity, reroute by position": ("capacity", {"factor": 0.8, "policy": "reroute", "order": "position"}),
    "switch+capacity": ("switch+capacity", {"order": "position"}),
    "symphony+capacity": ("symphony+capacity", {"policy": "next", "init": "kaiming"}),
    "top-p+capacity": ("top-p+capacity", {"factor": 0.7, "p": 0.15}),
    "remoe+capacity": ("remoe+capacity", {"factor": 0.7}),
    "sinkhorn+capacity, running": ("sinkhorn+capacity", {"factor": 0.9, "bias": "running", "policy": "next"}),
    "base+capacity": ("base+capacity", {"factor": 0.9, "k": 2}),
    "smoe, expert dropout": ("smoe", {"drop": 0.3}),
    "smoe, expert dropout per token": ("smoe", {"drop": 0.4, "per": "token"}),
    "symphony+similarity+smooth, expert dropout": ("symphony+similarity+smooth", {"eps": 0.5, "drop": 0.3}),
    "smooth, noise and expert dropout": ("smooth", {"eps": 0.5, "drop": 0.3, "noise": "gaussian", "noise_std": 0.3}),
    "sparsemax, expert dropout per token": ("sparsemax", {"drop": 0.5, "per": "token"}),
    "top-p, expert dropout": ("top-p", {"drop": 0.5}),
    "hierarchical, expert dropout": ("hierarchical", {"drop": 0.4}),
    "capacity, expert dropout": ("capacity", {"factor": 1.0, "policy": "next", "drop": 0.4}),
    "BERT setting of the geometry paper": ("smoe+capacity", {"noise": "gaussian", "noise_std": 1.0, "factor": 0.9}),
}


QUICK = [*holdfast.list_routers(), "ac+symphony+similarity+smooth"]
# One compilation takes 20 seconds: every name, and the variants whose code differs most from that of their name.
COMPILED = [
    *QUICK,
    "symphony, sinkhorn, sparse",
    "similarity, everything",
    "attention, all heads, from confident",
    "smoe, learned Gaussian noise",
    "remoe, one coefficient",
    "smooth, by its loss, other exponents",
    "top-p, learned",
    "smoe, k grows",
    "smoe, expert dropout",
    "sinkhorn, running",
    "capacity, reroute",
    "hash, k = 3, balanced",
]
CASES = [(variant, check) for variant in VARIANTS for check in CHECKS if check != "compile" or variant in COMPILED]


@pytest.mark.parametrize(
    ("variant", "check"), quick_or_slow(CASES, [case for case in CASES if case[0] in QUICK and case[1] != "compile"])
)
@pytest.mark.every_combination
def test_router_conforms(variant: str, check: str) -> None:
    name, options = VARIANTS[variant]
    if variant == "smoe, k = E" and check == "no inert coefficient":
        # Every token takes every expert, so the shares are equal whatever the router does: nothing is left to balance.
        with pytest.raises(AssertionError, match="'balance'"):
            check_router(name, only=[check], **options)
        return
    report = check_router(name, reference=reference, only=[check], **options)
    may_be_left_out = {"no inert parameter"} if {"smoe-dropout", "random"} & {*name.split("+")} else set()
    may_be_left_out |= {"sequence awareness"} if options.get("stats") == "batch" else set()
    # A token's experts depend on the other tokens of the batch in evaluation.
    batch_wide = "capacity" in name or options.get("evaluate") == "same"
    may_be_left_out |= {"sequence awareness", "declared certificate"} if batch_wide else set()
    # All experts are used, the sources depend on entropies, a bias is added to logits, the score is not affine, or gates
    # are projections.
    uncertified = ("softmoe", "smear", "from confident", "everything", "running", "sparsemax", "mlp", "hierarchical")
    if any(word in variant for word in (*uncertified, "sinkhorn, sparse")):
        may_be_left_out |= {"declared certificate"}
    # Without a certificate of sets no bound of weights is known, nor where tokens share gates or weights are undeclared.
    unbounded = ("similarity", "attention", "posterior", "stablemoe", "most", "symphony+remoe", "sinkhorn, k = 1")
    if "declared certificate" in may_be_left_out or any(word in variant or word in name for word in unbounded):
        may_be_left_out |= {"declared weights"}
    may_be_left_out |= {"no inert parameter", "no inert coefficient"} if "hash" in name else set()  # it has no gradient
    may_be_left_out |= {"ties"} if "stablemoe" in name else set()  # it chooses by ids, not by gates
    assert set(report.skipped) <= may_be_left_out, report.skipped
