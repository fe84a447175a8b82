"""Every router, token by token and expert by expert, in the shape of the papers' equations. Tests only."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.ops.naive import top
from holdfast.routing import Context, Cosine, Frozen, Linear, ReLU, Router, Routing, Selector, TopK, TopP
from holdfast.routing.noise import GaussianNoise, GumbelNoise

Chosen = tuple[list[int], list[Tensor]]  # the experts of one token and their weights


def linear(score: Linear | Frozen, x: Tensor) -> Tensor:
    logits = torch.stack([(x.double() * row.double()).sum() for row in score.weight])
    bias = getattr(score, "bias", None)
    return logits if bias is None else logits + bias


def cosine(score: Cosine, x: Tensor) -> Tensor:
    z = torch.stack([(x.double() * row.double()).sum() for row in score.projection])
    temperature = score.log_temperature.double().exp()
    return torch.stack([(z @ e.double()) / (z.norm() * e.double().norm()) / temperature[0] for e in score.embeddings])


SCORES: dict[type, Any] = {Linear: linear, Frozen: linear, Cosine: cosine}


def softmax(logits: list[Tensor]) -> list[Tensor]:
    highest = max(float(value.detach()) for value in logits)
    powers = [torch.exp(value - highest) for value in logits]
    return [power / sum(powers) for power in powers]


def top_k(select: TopK, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    k = select.k if select.k_final is None else int(select.active)
    experts = top(key, k).tolist()
    if select.weights == "switch":
        return experts, [gates[e] for e in experts]
    if informed:
        total = sum(gates[e] for e in experts)
        return experts, [gates[e] / max(total, torch.tensor(1e-38)) for e in experts]
    return experts, softmax([logits[e] for e in experts])


def top_p(select: TopP, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    p = torch.as_tensor(select.threshold())
    order = top(key, key.shape[-1]).tolist()
    kept, total = {}, torch.zeros(())
    for place, expert in enumerate(order):
        hard = 1.0 if place == 0 or gates[expert] > p else 0.0
        soft = 1 / (1 + torch.exp(-(gates[expert] - p) / select.softness))
        mask = hard + (soft - soft.detach() if select.learned_p is not None else 0.0)
        total = total + gates[expert] * mask
        if hard:
            kept[expert] = gates[expert] * mask
    return list(kept), [value.squeeze() / total.squeeze() for value in kept.values()]


def relu(select: ReLU, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    experts = [e for e in top(key, key.shape[-1]).tolist() if gates[e] > 0]
    return experts, [gates[e] for e in experts]


SELECTORS: dict[type, Any] = {TopK: top_k, TopP: top_p, ReLU: relu}


def gate(select: Selector, logits: Tensor) -> Tensor:
    return torch.relu(logits) if isinstance(select, ReLU) else torch.stack(softmax(list(logits)))


def noise(module: nn.Module | None, tokens: Tensor, experts: int) -> list[Tensor] | None:
    """The same random numbers as the fast path draws, one tensor for all tokens; scaled token by token below."""
    shape = (*tokens.shape[:2], experts)
    if isinstance(module, GaussianNoise):
        return list(torch.randn(shape).flatten(0, 1))
    if isinstance(module, GumbelNoise):
        return list(-torch.empty(shape).exponential_().log().flatten(0, 1))
    return None


def noisy(module: nn.Module, logits: Tensor, x: Tensor, drawn: Tensor) -> Tensor:
    if isinstance(module, GumbelNoise):
        return (logits + drawn) / module.temperature
    assert isinstance(module, GaussianNoise)
    if module.weight is None:
        return logits + drawn * float(module.std or 0)
    scale = torch.stack([torch.log1p(torch.exp((x.double() * row.double()).sum())) for row in module.weight])
    return logits + drawn * scale


def reference(router: Router, tokens: Tensor, context: Context) -> Routing:
    """A router without informers, one token at a time."""
    assert not router.informers
    score, select = router.score, router.select
    logits = torch.stack([SCORES[type(score)](score, x).float() for x in tokens.flatten(0, 1)])
    module = getattr(select, "noise", None) if router.training else None
    drawn = noise(module, tokens, router.experts)
    gates, chosen = [], []
    for index, (x, row) in enumerate(zip(tokens.flatten(0, 1), logits, strict=True)):
        read = row if module is None or drawn is None else noisy(module, row, x, drawn[index])
        gates.append(gate(select, read).float())
        chosen.append(SELECTORS[type(select)](select, read, gates[-1], read, False))
    slots = max(1, *(len(experts) for experts, _ in chosen))
    padded = [torch.tensor(experts + [router.experts] * (slots - len(experts))) for experts, _ in chosen]
    zero = torch.zeros(())
    weights = [torch.stack([w.float() for w in ws] + [zero] * (slots - len(ws))) for _, ws in chosen]
    losses = {}
    if isinstance(select, ReLU) and router.training:
        real = torch.ones(len(gates)).bool() if context.padding is None else context.padding.flatten()
        total = sum((row.sum() for row, is_real in zip(gates, real, strict=True) if is_real), torch.zeros(()))
        losses["l1"] = select.l1 * total / int(real.sum())
    return Routing(logits, torch.stack(gates), torch.stack(padded), torch.stack(weights), losses)
