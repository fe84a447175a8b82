"""Attack certificates: no token may flip inside its radius, and no output may change by more than its bound.

    python benchmarks/attacked_certificates.py --out FILE    # about ten minutes on two cores

Every router that declares conditions, with random weights after a few training batches. Routes are attacked with
`attack_routes` at exactly the certified radius, outputs with `attack_outputs` at three radii. Printed for each router: how
many (token, router) pairs were attacked, how many of them are unsound, and how tight the certificates are: the radius over
the smallest flip found within four radii, and the largest change found over its bound.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from command import write
from torch import Tensor
from versions import versions

import holdfast
from holdfast.attacks import attack_outputs, attack_routes
from holdfast.certificates import NoCertificate, certify, certify_output
from holdfast.hub.families import GROUPED_SIGMOID
from holdfast.routing import Context, Linear, Router, Routing, TopK
from holdfast.testing.router_under_test import HEADS, VOCABULARY, RouterUnderTest

DIM, HIDDEN, EXPERTS, K, LENGTH = 16, 32, 8, 2, 32
RADII = (0.003, 0.03, 0.3)  # of the outputs, as shares of a token's length
ROUNDED = 1e-5  # relative error of an output that is computed in float32
ROUTERS: dict[str, dict[str, Any]] = {
    "smoe": {},
    "switch": {},
    "smoe-dropout": {},
    "xmoe": {},
    "ac": {},
    "ac[mix=4]": {},
    "xmoe+ac": {},
    "modality": {},
    "smooth": {},
    "smooth[a=2,b=10,eps=0.5]": {},
    "xmoe+smooth": {},
    "remoe": {},
    "xmoe+remoe": {},
    "top-p[p=0.1]": {},
    "grouped": {},
    "expert-choice": {},
    "sinkhorn": {},
    "base": {},
    "symphony": {},
    "symphony[normalize=conditional]": {},
    "symphony[normalize=sinkhorn]": {},
    "symphony+ac": {},
    "xmoe+symphony": {},
    "symphony+smooth": {},
    "symphony+remoe[threshold=0.1]": {},
    "symphony+top-p[p=0.1]": {},
    "hash": {"vocabulary": VOCABULARY},
    "stablemoe": {"vocabulary": VOCABULARY},
    "similarity": {},
    "attention": {"heads": HEADS},
}


SIGMOIDS = {"sigmoids with a bias": (1, 1), "sigmoids in groups": (4, 2)}  # groups of experts, and how many are kept


def subject_of(name: str, seed: int) -> RouterUnderTest:
    torch.manual_seed(seed)
    if name not in SIGMOIDS:
        router = holdfast.create_router(name, dim=DIM, experts=EXPERTS, k=K, **ROUTERS.get(name, {}))
        return RouterUnderTest(router).warm_up(6)
    groups, kept = SIGMOIDS[name]
    bias = 0.2 * torch.randn(EXPERTS)
    gate = SimpleNamespace(num_group=groups, topk_group=kept, norm_topk_prob=True, e_score_correction_bias=bias)
    return RouterUnderTest(Router(Linear(DIM, EXPERTS), TopK(EXPERTS, K, rule=GROUPED_SIGMOID(gate))).eval())


def attacked_routes(subject: RouterUnderTest, tokens: Tensor, context: Context, seed: int) -> dict[str, Any]:
    """Attack every token at its radius, or all tokens of a sequence at the radius of one of them."""
    router = subject.prototype
    found = certify(router, tokens, context)
    radius = found.radius.clamp_max(1e3)
    if router.traits.sequence_aware:
        radius = radius.amin(1, keepdim=True).expand_as(radius).contiguous()
    how: dict[str, Any] = {"context": context, "k": router.select.declares.core, "seed": seed, "check": False}
    how |= {"steps": 15, "pairs": 3, "candidates": 4, "restarts": 1, "rounds": 0}
    inside = attack_routes(router, tokens, budget=radius, bisections=0, **how)
    near = attack_routes(router, tokens, budget=4 * radius + 1e-6, bisections=12, **how)
    tight = (radius / near.distances)[near.distances.isfinite()]
    return {
        "kind": found.kind,
        "pairs": radius.numel(),
        "unsound": int(inside.flipped.sum()),
        "certified": float((found.radius > 0).double().mean()),
        "tightness": float(tight.median()) if tight.numel() else None,
    }


def attacked_outputs(subject: RouterUnderTest, tokens: Tensor, context: Context, seed: int) -> dict[str, Any]:
    """Attack the output of a layer with this router at each of `RADII`."""
    torch.manual_seed(seed)
    layer = holdfast.MoE(subject.prototype, holdfast.Experts(DIM, HIDDEN, EXPERTS)).eval().requires_grad_(False)
    found = certify_output(layer, tokens, RADII, context, relative=True)

    def run(rows: Tensor) -> tuple[Tensor, Routing]:
        output, routing = layer(rows.view(tokens.shape), context)
        return output.reshape(rows.shape), routing

    rows, unsound, ratios = tokens.flatten(0, 1), torch.zeros(tokens.shape[0] * tokens.shape[1], dtype=torch.bool), []
    lengths = found.lengths.flatten()
    for place in range(len(RADII)):
        bound = found.bound[..., place].flatten()
        attack = attack_outputs(run, rows, budget=found.radii[..., place].flatten(), steps=10, seed=seed)
        unsound |= attack.change > bound + ROUNDED * lengths
        ratios.append((attack.change / bound)[bound > 0])
    return {
        "pairs": len(rows),
        "unsound": int(unsound.sum()),
        "tightness": [float(each.median()) for each in ratios],
        "tightest": float(torch.cat(ratios).max()),
        "weights": [float(found.change[..., place].median()) for place in range(len(RADII))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--routers", nargs="*", default=[*ROUTERS, *SIGMOIDS])
    parser.add_argument("--tokens", type=int, nargs=2, default=(4096, 512), help="per router: for routes, for outputs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.routers:
        subject, results[name] = subject_of(name, arguments.seed), {}
        for what, count, attacked in zip(
            ("routes", "outputs"), arguments.tokens, (attacked_routes, attacked_outputs), strict=True
        ):
            tokens = subject.tokens(count // LENGTH, LENGTH, seed=arguments.seed + 1)
            try:
                row = attacked(subject, tokens, subject.context(tokens), arguments.seed)
            except NoCertificate as reason:
                row = {"refused": str(reason)}
            results[name][what] = row
            print(f"{name:32} {what:8} {row}", flush=True)
    totals = {
        what: {of: sum(row[what].get(of, 0) for row in results.values()) for of in ("pairs", "unsound")}
        for what in ("routes", "outputs")
    }
    print(totals)
    if arguments.out:
        write(arguments.out, {"versions": versions(), "totals": totals, "routers": results})


if __name__ == "__main__":
    main()
