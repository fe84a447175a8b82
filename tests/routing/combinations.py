"""The combinations that the papers report, and a model around their layer."""

from typing import Any

import torch
from router_names import VOCABULARY
from torch import Tensor

import holdfast
from holdfast import Context
from holdfast.routing import Attention, Previous

HEADS = 2

COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "symphony on smoe": ("symphony", {}),
    "symphony on xmoe": ("xmoe+symphony", {}),
    "symphony with similarity": ("symphony+similarity", {}),
    "similarity on smoe": ("similarity", {}),
    "similarity on xmoe": ("xmoe+similarity", {}),
    "similarity on smoe-dropout": ("smoe-dropout+similarity", {}),
    "attention on smoe": ("attention", {"heads": HEADS}),
    "attention on xmoe": ("xmoe+attention", {"heads": HEADS}),
    "attention on smoe-dropout": ("smoe-dropout+attention", {"heads": HEADS}),
    "ac on smoe": ("ac", {}),
    "ac with top-p": ("ac+top-p", {}),
    "ac with learned top-p": ("ac+top-p", {"learned": True}),
    "smooth on smoe": ("smooth", {}),
    "smooth on xmoe": ("xmoe+smooth", {}),
}


def context_for(tokens: Tensor, experts: int, token_mask: Tensor | None = None) -> Context:
    """A causal model around the layer: fixed attention, and a previous layer that routes by its own fixed matrix."""
    generator = torch.Generator().manual_seed(3)
    sequences, length, dim = tokens.shape

    def heads() -> Tensor:
        matrix = torch.randn(dim, dim, generator=generator) / dim**0.5
        return (tokens @ matrix).view(sequences, length, HEADS, -1).transpose(1, 2)

    query, key, value = heads(), heads(), heads()
    projection = torch.nn.Linear(dim, dim).requires_grad_(False)
    projection.weight.copy_(torch.randn(dim, dim, generator=generator) / dim**0.5)
    projection.bias.zero_()
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = projection(mixed.transpose(1, 2).reshape(tokens.shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        routing = holdfast.create_router("smoe", dim=dim, experts=experts).eval()(tokens)
    attention = Attention(query, key, value, projection, output)
    place = torch.arange(sequences * length).view(sequences, length)
    return Context(
        causal=True,
        token_mask=token_mask,
        attention=attention,
        previous=Previous(tokens, routing),
        token_ids=7 * place % VOCABULARY,
        modality=place % 2,
    )
