"""Measure how tight certificates are: radii against the smallest flips that an attack finds, and what rounding alone flips.

    python benchmarks/certify.py                    # about two minutes on two cores

The smallest flip found is an upper bound of the truth, so radii are at least as tight as this says.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from command import write
from torch import Tensor
from versions import versions

import holdfast
from holdfast.attacks import attack_routes
from holdfast.auditing import certify_model
from holdfast.certificates import Certificates, Norm, certify, undecided
from holdfast.hub import router_calls
from holdfast.routing import Attention, Context, Previous, Routing

DIM, EXPERTS, K, SEQUENCES, LENGTH = 12, 8, 2, 4, 16
SUBJECTS: dict[str, tuple[str, dict[str, Any], Norm]] = {
    "smoe": ("smoe", {}, "l2"),
    "smoe, linf": ("smoe", {}, "linf"),
    "xmoe": ("xmoe", {}, "l2"),
    "ac": ("ac", {}, "l2"),
    "remoe": ("remoe", {}, "l2"),
    "symphony, row": ("symphony", {"normalize": "row"}, "l2"),
    "symphony, conditional": ("symphony", {"normalize": "conditional"}, "l2"),
    "symphony, sinkhorn": ("symphony", {"normalize": "sinkhorn"}, "l2"),
    "top-p": ("top-p", {"p": 0.1}, "l2"),
    "xmoe+symphony": ("xmoe+symphony", {}, "l2"),
    "xmoe+symphony, linf": ("xmoe+symphony", {}, "linf"),
    "similarity, of attention": ("similarity", {"of": "attention", "tau": 1.0}, "l2"),
    "similarity, of tokens": ("similarity", {"tau": 1.0}, "l2"),
    "similarity, of tokens, tau sqrt": ("similarity", {}, "l2"),
}
ROUNDED = [(512, "worst"), (4096, "worst"), (4096, "likely")]


def synthetic_context(title: str) -> Context:
    """Return the context that `ac` and token graphs read."""
    previous = None
    if title == "ac":
        tokens = torch.randn(SEQUENCES, LENGTH, DIM) * (torch.rand(DIM) + 0.05)
        plain = holdfast.create_router("smoe", dim=DIM, experts=EXPERTS, k=K).eval()
        previous = Previous(tokens, plain(tokens))
    attention = None
    if "attention" in title:
        query, key, value = torch.randn(3, SEQUENCES, 2, LENGTH, DIM // 2)
        attention = Attention(query, key, value, torch.nn.Linear(DIM, DIM), torch.randn(SEQUENCES, LENGTH, DIM))
    return Context(attention=attention, previous=previous)


def tightness(title: str, name: str, options: dict[str, Any], norm: Norm) -> dict[str, Any]:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=DIM, experts=EXPERTS, k=K, **options).train()
    for _ in range(6):
        router(2 * torch.randn(SEQUENCES, LENGTH, DIM), synthetic_context(title))
    tokens, context = 2 * torch.randn(SEQUENCES, LENGTH, DIM), synthetic_context(title)
    router.eval()
    found = certify(router, tokens, context, norm=norm)
    joint = router.traits.sequence_aware
    radius = found.radius.amin(1, keepdim=True).expand_as(found.radius) if joint else found.radius
    return summary(found, radius, smallest_flips(router, tokens, radius, norm, context=context), joint)


def family() -> dict[str, dict[str, Any]]:
    """Measure sigmoid gates with a bias, with and without groups: deepseek_v3 as transformers computes it."""
    results = {}
    for title, groups in (("sigmoid with bias", 1), ("sigmoid with bias, in groups", 4)):
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(
            vocab_size=64, hidden_size=DIM, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
            first_k_dense_replace=0, num_attention_heads=2, n_routed_experts=16, num_experts_per_tok=4, n_group=groups,
            topk_group=max(1, groups // 2), q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=8, pad_token_id=0,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.normal_(std=0.3)
        inputs = {"input_ids": torch.randint(1, 64, (SEQUENCES, LENGTH))}
        found = certify_model(model, [inputs]).layers[0].certificates
        with torch.no_grad(), router_calls(model) as captured:
            model(**inputs)
        assert found is not None
        tokens = captured[0].tokens.reshape(-1, DIM).float()
        flips = smallest_flips(captured[0].route, tokens, found.radius, "l2", joint=False)
        results[title] = summary(found, found.radius, flips, joint=False)
    return results


def smallest_flips(
    route: Callable[..., Routing], tokens: Tensor, radius: Tensor, norm: Norm, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the smallest flip of each token, infinite if none was found, and the share of flips inside the radius."""
    options |= {"norm": norm, "steps": 20, "pairs": 2, "candidates": 4, "rounds": 1, "check": False}
    inside = attack_routes(route, tokens, budget=radius.clamp_max(1e3), bisections=0, **options)
    distances = torch.full((radius.numel(),), torch.inf, dtype=torch.float64)
    for times in (1.2, 3.0, 10.0, 100.0, 1000.0):  # an attack with a large budget does not search for small perturbations
        found = attack_routes(route, tokens, budget=radius.clamp_max(1e3) * times + 1e-6, bisections=20, **options)
        distances = distances.minimum(found.distances.reshape(-1).double())
    return distances, torch.tensor(inside.rate)


def summary(found: Certificates, radius: Tensor, flips: tuple[Tensor, Tensor], joint: bool) -> dict[str, Any]:
    distances, inside = flips
    radius, reached = radius.reshape(-1), distances.isfinite()
    ratios = (radius / distances)[reached]
    bounds = {
        name: float((values.reshape(-1) / distances)[reached].median()) if not joint else None
        for name, values in found.bounds.items()
    }
    return {
        "kind": found.kind,
        "tokens": len(radius),
        "flipped inside": float(inside),
        "reached": float(reached.double().mean()),
        "median": float(ratios.median()),
        "least": float(ratios.min()),
        "other bounds": bounds,
    }


def rounded(width: int, rounding: Any) -> dict[str, float]:
    """32 experts, top 4: which tokens are undecided in bfloat16, and which of all tokens then flip."""
    torch.manual_seed(0)
    router = holdfast.create_router("smoe", dim=width, experts=32, k=4).eval()
    tokens = torch.randn(8192, width)
    alarm = undecided(router, tokens, torch.bfloat16, rounding=rounding)
    plain = router(tokens).chosen
    logits = tokens.bfloat16() @ router.score.matrix.bfloat16().t()  # type: ignore[attr-defined, operator]
    short = torch.zeros_like(plain).scatter(1, logits.float().topk(4).indices, True)
    flips = (plain != short).any(1)
    return {
        "undecided": float(alarm.double().mean()),
        "of these flip": float(flips[alarm].double().mean()),
        "decided that flip": int(flips[~alarm].sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    tight = {title: tightness(title, *subject) for title, subject in SUBJECTS.items()} | family()
    print(f"Radius over the smallest flip found: {EXPERTS} experts, top {K}, width {DIM}; PGD, 20 steps, bisection")
    for title, row in tight.items():
        bounds = ", ".join(f"{name} {value:.2f}" for name, value in row["other bounds"].items() if value is not None)
        print(
            f"  {title:30} {row['kind']:12} median {row['median']:.3f}  least {row['least']:.3f}  "
            f"reached {row['reached']:.0%}  flipped inside {row['flipped inside']:.0%}  {bounds}"
        )
    flips = {f"width {width}, {rounding}": rounded(width, rounding) for width, rounding in ROUNDED}
    print("bfloat16, 32 experts, top 4")
    for title, row in flips.items():
        print(
            f"  {title:22} undecided {row['undecided']:.1%}, of these flip {row['of these flip']:.1%}, "
            f"decided that flip {row['decided that flip']}"
        )
    if arguments.out:
        write(arguments.out, {"versions": versions(), "tightness": tight, "bfloat16": flips})


if __name__ == "__main__":
    main()
