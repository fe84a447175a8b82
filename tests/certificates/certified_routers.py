"""Routers to certify, each trained on a few batches, so that graphs, spreads and strips are not at their initial values."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.certificates import Gate
from holdfast.hub.families import GROUPED_SIGMOID
from holdfast.routing import Attention, Context, Linear, Previous, Router, Routing, create_router
from holdfast.routing.selection import Rule

# name of the subject -> (name of the router, its options, experts, k)
ROUTERS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "linear": ("smoe", {}, 8, 2),
    "bias": ("smoe", {"bias": True}, 13, 3),
    "xmoe": ("xmoe", {}, 8, 2),
    "ac": ("ac", {}, 8, 2),
    "ac mixed": ("ac", {"mix": 4}, 8, 2),
    "xmoe+ac": ("xmoe+ac", {}, 8, 2),
    "remoe": ("remoe", {}, 8, 2),
    "xmoe+remoe": ("xmoe+remoe", {}, 8, 2),
    "smooth": ("smooth", {}, 8, 2),
    "symphony row": ("symphony", {}, 8, 2),
    "symphony conditional": ("symphony", {"normalize": "conditional"}, 8, 2),
    "symphony sinkhorn": ("symphony", {"normalize": "sinkhorn"}, 8, 2),
    "symphony identity": ("symphony", {"init": "identity"}, 8, 1),
    "symphony sparse": ("symphony", {"threshold": 0.08}, 8, 2),
    "symphony+ac": ("symphony+ac", {}, 8, 2),
    "symphony+ac mixed": ("symphony+ac", {"mix": 3}, 8, 2),
    "xmoe+symphony": ("xmoe+symphony", {}, 8, 2),
    "symphony+remoe": ("symphony+remoe", {"threshold": 0.1}, 8, 2),
    "top-p": ("top-p", {"p": 0.1}, 8, 2),
    "top-p alone": ("top-p", {"p": 0.6}, 8, 2),
    "symphony+top-p": ("symphony+top-p", {"p": 0.1}, 8, 2),
    "xmoe+top-p": ("xmoe+top-p", {"p": 0.1}, 8, 2),
    "symphony+smooth": ("symphony+smooth", {}, 8, 2),
    "similarity": ("similarity", {}, 8, 2),
    "similarity reduced": ("similarity", {"rank": 4, "tau": 2.0, "strength": 0.5}, 8, 2),
    "similarity tau 1": ("similarity", {"tau": 1.0}, 8, 2),
    "similarity bilinear": ("similarity", {"rank": 4, "form": "bilinear"}, 8, 2),
    "similarity learned strength": ("similarity", {"strength": "learned"}, 8, 2),
    "similarity attention": ("similarity", {"of": "attention", "tau": 1.0}, 8, 2),
    "attention": ("attention", {"heads": 2}, 8, 2),
    "attention all heads": ("attention", {"heads": "all", "strength": "learned"}, 8, 2),
    "xmoe+symphony+similarity": ("xmoe+symphony+similarity", {}, 8, 2),
    "similarity+top-p": ("similarity+top-p", {"p": 0.1}, 8, 2),
}
SEQUENCES = [name for name, row in ROUTERS.items() if "similarity" in row[0] or "attention" in row[0]]
EXACT = ["linear", "bias", "xmoe", "ac", "ac mixed", "xmoe+ac", "remoe", "xmoe+remoe", "smooth"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear_score(weight: list[list[float]] | Tensor, bias: list[float] | Tensor | None = None) -> Linear:
    """Return a score with these weights (experts, width)."""
    weight = torch.as_tensor(weight)
    score = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        score.weight.copy_(weight)
        if score.bias is not None:
            score.bias.copy_(torch.as_tensor(bias))
    return score


def previous(batch: int, length: int, dim: int, clusters: int, seed: int) -> Previous:
    """Return the tokens and the routing of another layer, with clusters that are tight in different features."""
    source = generator(seed)
    logits = 2 * torch.randn(batch * length, clusters, generator=source)
    gates = logits.softmax(-1)
    experts = gates.argsort(dim=-1, descending=True)[:, :2]
    widths = torch.rand(clusters, dim, generator=generator(5)) + 0.05
    tokens = torch.randn(batch * length, dim, generator=source) * widths[experts[:, 0]]
    routing = Routing(logits, gates, experts, gates.gather(1, experts))
    return Previous(tokens.view(batch, length, dim), routing)


def attention(batch: int, length: int, dim: int, seed: int) -> Attention:
    source = generator(seed)
    query, key, value = torch.randn(3, batch, 2, length, dim // 2, generator=source)
    projection = nn.Linear(dim, dim)
    with torch.no_grad():
        projection.weight.copy_(torch.randn(dim, dim, generator=generator(7)) / dim**0.5)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return Attention(query, key, value, projection, projection(mixed.transpose(1, 2).flatten(2)).detach())


def context(name: str, batch: int, length: int, dim: int, experts: int, seed: int) -> Context:
    parts: dict[str, Any] = {}
    if "ac" in name.replace("mixed", "").split()[0].split("+"):
        parts["previous"] = previous(batch, length, dim, experts, seed)
    if "attention" in name:
        parts["attention"] = attention(batch, length, dim, seed)
    return Context(**parts)


def build(
    name: str, *, dim: int = 12, batch: int = 4, length: int = 16, seed: int = 0, **sizes: int
) -> tuple[Router, Tensor, Context]:
    """Return the router, tokens (batch,length,dim) and their context."""
    kind, options, experts, k = ROUTERS[name]
    experts, k = sizes.get("experts", experts), sizes.get("k", k)
    torch.manual_seed(seed)
    made = create_router(kind, dim=dim, experts=experts, k=k, **options)
    with torch.no_grad():
        for name_of, parameter in made.score.named_parameters():
            if name_of.endswith("bias"):
                parameter.normal_()
    made.train()
    for step in range(6):
        made(2 * torch.randn(batch, length, dim), context(name, batch, length, dim, experts, 100 + step))
    tokens = 2 * torch.randn(batch, length, dim, generator=generator(1000 + seed))
    return made.eval(), tokens, context(name, batch, length, dim, experts, 2000 + seed)


def grouped_sigmoid(experts: int, groups: int, kept: int, seed: int = 0, spread: float = 0.2) -> Rule:
    """Return a gate with DeepSeek's rule and a bias."""
    bias = spread * torch.randn(experts, generator=generator(seed))
    owner = nn.Module()
    owner.register_buffer("e_score_correction_bias", bias)
    settings = SimpleNamespace(
        num_group=groups,
        topk_group=kept,
        norm_topk_prob=True,
        get_buffer=owner.get_buffer,
        e_score_correction_bias=bias,
    )
    return GROUPED_SIGMOID(settings)


def sigmoid_gate(
    experts: int = 16, k: int = 4, groups: int = 1, kept: int = 1, dim: int = 12, seed: int = 0, spread: float = 0.2
) -> Gate:
    weight = torch.randn(experts, dim, generator=generator(seed + 1)) / dim**0.5
    return Gate(weight, k, rule=grouped_sigmoid(experts, groups, kept, seed, spread))
