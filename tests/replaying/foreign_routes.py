"""Models, batches and routes for the tests of replay, and a model that runs given experts in loops."""

import base64
import io
from typing import Any

import numpy as np
import torch
from tiny import tiny
from torch import Tensor

import holdfast

IDS = torch.tensor([[5, 9, 13, 7, 3, 22], [0, 0, 4, 8, 15, 16]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
EXPERTS = 8


def random_routes(layers: int, k: int = 2, shape: tuple[int, int] = (2, 6), seed: int = 0) -> Tensor:
    """Return (B,N,L,K): random experts for every token, different in each layer."""
    order = torch.rand(*shape, layers, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :k].contiguous()


def own_routes(model: Any) -> tuple[Tensor, holdfast.Routes]:
    """Return the logits of a live forward and its routes."""
    with holdfast.trace(model) as traced, torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=MASK).logits
    return logits, holdfast.Routes.from_trace(traced, model)


def gradients(model: Any) -> dict[str, Tensor]:
    """Return all gradients by name."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def step(model: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one training step and all gradients."""
    model.zero_grad()
    loss = model(**{**BATCH, **options}).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_step(first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Assert that losses and all gradients of two steps are close."""
    torch.testing.assert_close(first[0], second[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second[1], first[1], atol=2e-5, rtol=1e-3)


def looped(model_type: str, routes: Tensor, **changes: Any) -> Any:
    """Return an untouched tiny model whose gates and experts are loops over tokens and the experts in `routes (B,N,L,K)`."""
    model = tiny(model_type, **changes)
    blocks = [block for block in model.modules() if hasattr(block, "experts") and hasattr(block, "gate")]
    for layer, block in enumerate(blocks):
        block.gate.forward = _looped_gate(block.gate, routes[:, :, layer].flatten(0, 1), model_type)
        block.experts.forward = _looped_experts(block.experts)
    return model


def _looped_gate(gate: Any, routes: Tensor, model_type: str) -> Any:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights = hidden.reshape(-1, hidden.shape[-1]).float() @ gate.weight.float().t(), []
        for row, chosen in zip(logits, routes, strict=True):
            if not getattr(gate, "norm_topk_prob", True):  # the raw gates
                weights.append(torch.stack([row.softmax(-1)[expert] for expert in chosen]))
            elif model_type == "deepseek_v3":
                found = torch.stack([row[expert].sigmoid() for expert in chosen])
                weights.append(found / found.sum() * gate.routed_scaling_factor)
            else:
                found = torch.stack([row[expert].exp() for expert in chosen])
                weights.append(found / found.sum())
        return logits, torch.stack(weights), routes

    return forward


def _looped_experts(experts: Any) -> Any:
    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = []
        for token, chosen, amounts in zip(hidden, indices, weights, strict=True):
            total = torch.zeros_like(token)
            for expert, amount in zip(chosen.tolist(), amounts, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
                total = total + amount * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            out.append(total)
        return torch.stack(out)

    return forward


def as_npy(record: Any) -> str:
    """Return a record as base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, record)
    return base64.b64encode(file.getvalue()).decode()
