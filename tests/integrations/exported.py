"""Layers and models that are exported, and what they are given."""

from typing import Any

import torch
from router_names import VOCABULARY, needed
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor, nn

import holdfast
from holdfast import Context
from holdfast.layers import LAYERS
from holdfast.routing import Attention, Previous

DIM, HEADS, EXPERTS = 16, 4, 6
RAGGED = {"smooth", "top-p", "remoe", "smoe-dropout", "sparsemax"}  # presets that leave slots unused


class Layer(nn.Module):
    """An MoE layer with all that a router may look at: padding, an attention and an earlier MoE layer's routes."""

    def __init__(self, router: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = needed(router, heads=HEADS)
        built = holdfast.create_router(router, dim=DIM, experts=EXPERTS, k=None if router == "switch" else 2, **options)
        self.moe = LAYERS[built.select.layer_kind](built, holdfast.Experts(DIM, 24, EXPERTS, bias=True))
        self.before = holdfast.create_router("smoe", dim=DIM, experts=EXPERTS)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.projection = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real = mask != 0
        rows = [each(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        attention = Attention(rows[0], rows[1], rows[2], self.projection, self.projection(tokens))
        previous = Previous(tokens, self.before(tokens))
        ids = (tokens[..., 0] * 10).long().abs() % VOCABULARY
        context = Context(
            causal=True, token_mask=real, attention=attention, previous=previous, token_ids=ids, modality=ids % 2
        )
        out, routing = self.moe(tokens, context)
        return out, routing.experts, routing.weights


def trained_layer(router: str) -> Layer:
    """One whose router has learned its state from a few batches; in evaluation."""
    layer = Layer(router).train()
    for _ in range(3):
        layer(torch.randn(4, 20, DIM), torch.ones(4, 20))
    return layer.eval()


def layer_inputs(sequences: int, length: int) -> dict[str, Tensor]:
    padded = torch.arange(length) < length - torch.arange(sequences).unsqueeze(1) % 3
    return {"tokens": torch.randn(sequences, length, DIM), "mask": padded.float()}


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 2},
}


def build(kind: str, router: str) -> Any:
    """A tiny model with a router in two layers, in training; mixtral with a backend that transformers can export."""
    if kind == "mixtral":
        model = tiny(kind, **SMALL[kind])
        model.set_experts_implementation("batched_mm")
        return holdfast.reroute(model, router).train()
    return holdfast.sparsify(tiny_dense(kind, **SMALL[kind]), experts=4, router=router, noise=0.5).train()


def model_inputs(sequences: int, length: int) -> dict[str, Tensor]:
    padded = torch.arange(length) < length - torch.arange(sequences).unsqueeze(1) % 3
    return {"input_ids": torch.randint(3, 64, (sequences, length)), "attention_mask": padded.long()}


def real_logits(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return logits[inputs["attention_mask"] == 1]
