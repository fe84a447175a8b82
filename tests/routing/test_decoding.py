"""Decoding as a model does it: left padding, sequences of different lengths, beams that swap places half-way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import Context, Routing
from holdfast.routing import Attention, RouterCache
from holdfast.testing.router_under_test import STEEP, differing

DIM, HEADS, KEY_HEADS, EXPERTS = 16, 4, 2, 8
ROUTERS: dict[str, dict[str, Any]] = {
    "similarity": {},
    "attention": {"heads": HEADS},
    "symphony+similarity": {},
    "symphony+attention": {"heads": HEADS},
    "attention+smooth": {"heads": HEADS, "eps": 0.3},
    "xmoe+similarity+top-p": {},
    "similarity[of=attention,tau=1]": {},
    "similarity[rank=5,form=bilinear,strength=learned]": {},
    "similarity[from=confident]": {},
    "symphony+similarity[from=confident,form=bilinear,rank=4]": {},
    "attention[heads=all]": {},
    "attention[heads=all,from=confident]": {},
    "attention[from=confident,strength=learned]": {"heads": HEADS},
}


class Surroundings:
    """A fixed causal attention with grouped keys and an output bias around the router."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        width = DIM // HEADS
        self.into = [torch.nn.Linear(DIM, heads * width).requires_grad_(False) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        self.out = torch.nn.Linear(DIM, DIM).requires_grad_(False)

    def context(self, tokens: Tensor, real: Tensor | None = None) -> Context:
        """Of all tokens; `decoding` cuts out what a step sees."""
        sequences, length, _ = tokens.shape
        query, key, value = (layer(tokens).view(sequences, length, -1, DIM // HEADS).transpose(1, 2) for layer in self.into)
        allowed = torch.ones(length, length).tril().bool().expand(sequences, 1, length, length)
        allowed = allowed if real is None else allowed & real[:, None, None, :]
        mask = allowed | torch.eye(length).bool()
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        output = self.out(mixed.transpose(1, 2).reshape(tokens.shape))
        return Context(causal=True, token_mask=real, attention=Attention(query, key, value, self.out, output, mask))


def decoding(context: Context, start: int, end: int, cache: RouterCache) -> Context:
    """What one step sees: new queries, and the keys and values of everything so far."""
    attention = context.attention
    assert attention is not None and attention.mask is not None
    step = replace(
        attention,
        query=attention.query[:, :, start:end],
        key=attention.key[:, :, :end],
        value=attention.value[:, :, :end],
        output=attention.output[:, start:end],
        mask=attention.mask[:, :, start:end, :end],
    )
    token_mask = None if context.token_mask is None else context.token_mask[:, start:end]
    return replace(context, attention=step, token_mask=token_mask, cache=cache)


def trained(name: str) -> holdfast.Router:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=DIM, experts=EXPERTS, **ROUTERS[name])
    around = Surroundings()
    for _ in range(3):
        tokens = torch.randn(4, 30, DIM)
        router(tokens, around.context(tokens))
    return router.eval()


def rows(routing: Routing, sequences: int, sequence: int, positions: slice) -> Routing:
    values = (routing.logits, routing.gates, routing.experts, routing.weights)
    return Routing(*(x.unflatten(0, (sequences, -1))[sequence, positions] for x in values))


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_left_padded_decoding_routes_each_sequence_as_if_alone(name: str) -> None:
    router, around = trained(name), Surroundings()
    total, lengths, prompt = 40, (40, 33, 25), 20
    torch.manual_seed(3)
    tokens = torch.randn(3, total, DIM)
    real = torch.stack([torch.arange(total) >= total - length for length in lengths])
    context, cache = around.context(tokens, real), RouterCache()
    for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, total))]:
        routing = router(tokens[:, start:end], decoding(context, start, end, cache))
        for sequence, length in enumerate(lengths):
            own = tokens[sequence : sequence + 1, total - length : end]
            alone = router(own, around.context(own))
            new = min(end - start, own.shape[1])
            got = rows(routing, 3, sequence, slice(end - start - new, None))
            assert not differing(got, rows(alone, 1, 0, slice(-new, None)), weights_within=STEEP).any()


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_beams_may_swap_places_and_the_cache_may_be_cropped(name: str) -> None:
    """After 12 tokens both beams continue the second; three tokens later the last three are taken back and decoded anew."""
    router, around = trained(name), Surroundings()
    torch.manual_seed(3)
    first, rest = torch.randn(2, 12, DIM), torch.randn(2, 10, DIM)
    cache = RouterCache()
    router(first, decoding(around.context(first), 0, 12, cache))
    cache.reorder(torch.tensor([1, 1]))
    tokens = torch.cat([first[[1, 1]], rest], dim=1)
    context = around.context(tokens)
    full = router(tokens, context)
    for t in (12, 13, 14):
        router(torch.randn(2, 1, DIM), decoding(context, t, t + 1, cache))
    cache.crop(12)
    for t in range(12, 22):
        routing = router(tokens[:, t : t + 1], decoding(context, t, t + 1, cache))
        for beam in range(2):
            expected = rows(full, 2, beam, slice(t, t + 1))
            assert not differing(rows(routing, 2, beam, slice(None)), expected, weights_within=STEEP).any()
