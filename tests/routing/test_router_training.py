"""Every combination that the papers report exists and trains, with a shared expert and with 32 experts, top 4, too."""

from typing import Any

import pytest
import torch
from router_names import VOCABULARY
from tiers import quick_or_slow
from torch import Tensor

import holdfast
from holdfast import Context, Experts, FeedForward, MoE
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
VARIANTS: dict[str, dict[str, Any]] = {
    "8 experts": {},
    "shared expert": {"shared": True},
    "32 experts, top 4": {"experts": 32, "k": 4},
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


@pytest.mark.parametrize("variant", quick_or_slow(VARIANTS, ["shared expert"]))
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_combination_trains(combination: str, variant: str) -> None:
    """Thirty steps of Adam on a small regression more than halve the error, with all that a router brings switched on."""
    name, options = COMBINATIONS[combination]
    sizes = {"experts": 8, "k": 2, **VARIANTS[variant]}
    shared = FeedForward(16, 16) if sizes.pop("shared", False) else None
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=16, **sizes, **options, losses=holdfast.Losses(balance=0.01))
    layer = MoE(router, Experts(16, 16, sizes["experts"]), shared)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    tokens, errors = torch.randn(8, 32, 16), []
    target = torch.tanh(tokens @ torch.randn(16, 16) / 4)
    context = context_for(tokens, sizes["experts"])
    for step in range(30):
        router.progress(step / 30)
        out, routing = layer(tokens, context)
        error = (out - target).square().mean()
        optimizer.zero_grad()
        (error + routing.loss).backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < 0.5 * errors[0]
