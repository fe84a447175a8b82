"""Naive references of all routers: loops over tokens and experts, in the shape of the papers' equations."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.select import top_reference as top
from holdfast.routing import (
    Attention,
    AttentionPosterior,
    Clustered,
    Context,
    Cosine,
    ExpertGraph,
    Frozen,
    Linear,
    Previous,
    ReLU,
    Router,
    Routing,
    Selector,
    Similarity,
    SmoothTopK,
    TopK,
    TopP,
)
from holdfast.routing.selection import GaussianNoise, GumbelNoise

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


def clustered(score: Clustered, tokens: Tensor, context: Context) -> list[Tensor]:
    """ACMoE: each token's features times m of the expert it took first at the previous layer."""
    previous = context.previous
    assert previous is not None
    spreads = batch_spreads(score, previous, context) if score.stats == "batch" else score.spreads.double()
    logits = []
    for index, x in enumerate(tokens.flatten(0, 1)):
        gates = previous.routing.gates[index].double()
        best = top(gates, score.mix).tolist() if score.mix > 1 else [int(previous.routing.experts[index, 0])]
        total = sum(gates[c] for c in best)
        m = sum((gates[c] / total) * inverse(spreads[c]) for c in best)
        logits.append(SCORES[type(score.base)](score.base, x.double() * m))
    return logits


def inverse(spread: Tensor) -> Tensor:
    spread = spread if spread.mean() > 0 else torch.ones_like(spread)
    m = torch.stack([1 / max(s, 0.1 * spread.mean()) for s in spread])
    return m / m.mean()


def batch_spreads(score: Clustered, previous: Previous, context: Context) -> Tensor:
    """The spread of each feature within each cluster of the batch, real tokens only."""
    inputs, first = previous.tokens.flatten(0, 1).double(), previous.routing.experts[:, 0]
    real = torch.ones(len(first)).bool() if context.token_mask is None else context.token_mask.flatten()
    spreads = torch.ones(score.clusters, score.dim).double()
    for c in range(score.clusters):
        members = inputs[(first == c) & real]
        if len(members):
            deviation = members - members.mean(0)
            spreads[c] = (deviation.abs() if score.spread == "mad" else deviation**2).mean(0)
    return spreads


def mix_experts(informer: ExpertGraph, gates: Tensor) -> Tensor:
    """g_j = sum_k a_jk p_k."""
    graph = [[a if a >= informer.threshold else 0.0 for a in row] for row in informer.graph.tolist()]
    mixed = [
        torch.stack([sum(a * p for a, p in zip(row, token, strict=True)) for row in graph]) for token in gates.flatten(0, 1)
    ]
    return torch.stack(mixed).view(gates.shape)


def allowed(context: Context, sequence: int, i: int, j: int, causal: bool) -> bool:
    real = context.token_mask is None or bool(context.token_mask[sequence, j])
    return real and (j <= i or not causal)


def token_weights(log_weights: Tensor, context: Context, sequence: int, causal: bool) -> Tensor:
    """The N x N matrix: softmax over the allowed j of each row, 0 where nothing is allowed."""
    length = log_weights.shape[0]
    rows = []
    for i in range(length):
        ok = torch.tensor([allowed(context, sequence, i, j, causal) for j in range(length)])
        row = log_weights[i].masked_fill(~ok, -torch.inf)
        rows.append(torch.softmax(row, -1) if ok.any() else torch.zeros_like(row))
    return torch.stack(rows)


def similar(informer: Similarity, gates: Tensor, tokens: Tensor, context: Context) -> Tensor:
    """W_ij = softmax_j(u_i W_s u_j / tau), G = W P, one sequence at a time."""
    assert context.attention is not None
    mixed = []
    for sequence, u in enumerate(context.attention.output.double()):
        metric = (
            torch.eye(u.shape[-1]).double()
            if informer.reduce is None
            else informer.reduce.double().t() @ informer.reduce.double()
        )
        log_weights = u @ metric @ u.t() / informer.tau
        weights = token_weights(log_weights, context, sequence, informer.causal and context.causal)
        mixed.append(weights @ gates[sequence].double())
    return (1 - informer.strength) * gates + informer.strength * torch.stack(mixed).float()


def posterior(informer: AttentionPosterior, gates: Tensor, tokens: Tensor, context: Context) -> Tensor:
    """A_h[i,j] exp(-|u_i - o_jh|^2 / 2 sigma^2), of the head with the lowest running entropy."""
    attention = context.attention
    assert attention is not None and attention.projection is not None
    head = min(range(informer.heads), key=lambda h: (float(informer.entropy[h]), h))
    mixed = []
    for sequence in range(gates.shape[0]):
        q, k, v, weight, bias = head_of(attention, sequence, head, informer.heads)
        u = attention.output[sequence].double()
        o = informer.heads * v @ weight.t() + bias
        distances = torch.stack([torch.stack([(ui - oj).square().sum() for oj in o]) for ui in u])
        scores = q @ k.t() / q.shape[-1] ** 0.5
        attended = token_weights(scores, context, sequence, context.causal)
        log_weights = attended.clamp_min(1e-300).log() - distances / (2 * informer.sigma**2)
        mixed.append(token_weights(log_weights, context, sequence, context.causal) @ gates[sequence].double())
    return (1 - informer.strength) * gates + informer.strength * torch.stack(mixed).float()


def head_of(
    attention: Attention, sequence: int, head: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    shared = head * attention.key.shape[1] // heads
    projection = attention.projection
    assert projection is not None
    weight = projection.weight.double().view(projection.weight.shape[0], heads, -1)[:, head]
    bias = 0.0 if projection.bias is None else projection.bias.double()
    q, k, v = attention.query[sequence, head], attention.key[sequence, shared], attention.value[sequence, shared]
    return q.double(), k.double(), v.double(), weight, bias


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


def smooth(select: SmoothTopK, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    """weights = softmax(logit_i + S(u_i)) over the experts with u_i > 0; the k best always, with S = 0.

    If a token may use at most `slots` experts, the strip ends at the next one.
    """
    order = top(key, key.shape[-1]).tolist()
    eps, c = select.eps(), logits[order[select.k - 1]].detach()
    if select.slots < len(order):
        eps = torch.minimum(eps, c - logits[order[select.slots]].detach())
    kept: dict[int, Tensor] = {}
    for place, expert in enumerate(order):
        if place < select.k:
            kept[expert] = logits[expert]
        elif eps > 0:
            u = (logits[expert].detach() - c + eps) / eps
            if u >= 1:
                kept[expert] = logits[expert]
            elif u > 0:
                kept[expert] = logits[expert] + torch.log(u / (u + (1 - u) ** 50))
    if informed and float(gates.detach().sum()) == 0:
        return list(kept), [torch.zeros(()) for _ in kept]
    return list(kept), softmax(list(kept.values()))


SELECTORS: dict[type, Any] = {TopK: top_k, TopP: top_p, ReLU: relu, SmoothTopK: smooth}


def gate(select: Selector, logits: Tensor) -> Tensor:
    return torch.relu(logits) if isinstance(select, ReLU) else torch.stack(softmax(list(logits)))


def noise(module: nn.Module | None, tokens: Tensor, experts: int) -> list[Tensor] | None:
    """Return the random numbers that the router draws, one tensor for all tokens."""
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
    """The whole pipeline, one token at a time, with the token graphs as explicit N x N matrices."""
    score, select = router.score, router.select
    if select.layer_kind != "moe":
        import soft_references  # which imports this module

        return soft_references.reference(router, tokens, context)
    if isinstance(score, Clustered):
        rows = clustered(score, tokens, context)
    else:
        rows = [SCORES[type(score)](score, x) for x in tokens.flatten(0, 1)]
    logits = torch.stack(rows).float()
    gates = torch.stack([gate(select, row).float() for row in logits])
    gates = inform(router, gates.view(*tokens.shape[:2], -1), tokens, context).flatten(0, 1)
    informed = bool(router.informers)
    read = gates.clamp_min(1.2e-38).log() if informed else logits
    module = getattr(select, "noise", None) if router.training else None
    drawn = noise(module, tokens, router.experts)
    if module is not None and drawn is not None:
        noised = [noisy(module, row, x, z) for row, x, z in zip(read, tokens.flatten(0, 1), drawn, strict=True)]
        read = torch.stack(noised).float()
        mass = gates.sum(-1, keepdim=True) if informed else torch.ones(len(gates), 1)
        gates = mass * torch.stack([gate(select, row).float() for row in read])
    keys = gates if informed else read
    choose = SELECTORS[type(select)]
    chosen = [choose(select, key, g, row, informed) for key, g, row in zip(keys, gates, read, strict=True)]
    slots = max(1, *(len(experts) for experts, _ in chosen))
    padded = [torch.tensor(experts + [router.experts] * (slots - len(experts))) for experts, _ in chosen]
    zero = torch.zeros(())
    weights = [torch.stack([w.float() for w in ws] + [zero] * (slots - len(ws))) for _, ws in chosen]
    losses = own_losses(router, gates, chosen, context) if router.training else {}
    return Routing(logits, gates, torch.stack(padded), torch.stack(weights), losses)


def inform(router: Router, gates: Tensor, tokens: Tensor, context: Context) -> Tensor:
    for informer in router.informers:
        if isinstance(informer, ExpertGraph):
            gates = mix_experts(informer, gates)
        elif isinstance(informer, Similarity):
            gates = similar(informer, gates, tokens, context)
        else:
            assert isinstance(informer, AttentionPosterior)
            gates = posterior(informer, gates, tokens, context)
    return gates


def own_losses(router: Router, gates: Tensor, chosen: list[Chosen], context: Context) -> dict[str, Tensor]:
    select = router.select
    real = torch.ones(len(gates)).bool() if context.token_mask is None else context.token_mask.flatten()
    if isinstance(select, ReLU):
        total = sum((row.sum() for row, is_real in zip(gates, real, strict=True) if is_real), torch.zeros(()))
        return {"l1": select.l1 * total / int(real.sum())}
    if isinstance(select, SmoothTopK) and select.control == "loss":
        active = sum(len(experts) for (experts, _), is_real in zip(chosen, real, strict=True) if is_real) / int(real.sum())
        return {"boundary": select.alpha * select.eps() * (active - select.k - select.budget)}
    return {}
