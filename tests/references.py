"""Naive references of all routers: loops over tokens and experts, in the shape of the papers' equations."""

import math
import zlib
from fractions import Fraction
from typing import Any

import torch
from balanced_references import balanced, batch_wide, limited, project, sparse_row
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
    TokenGraph,
    TopK,
    TopP,
)
from holdfast.routing.balanced import Sinkhorn
from holdfast.routing.capacity import Capacity
from holdfast.routing.dropout import StepDropout
from holdfast.routing.fixed import Distilled, EqualWeights, HashedIds
from holdfast.routing.hierarchy import Grouped, GroupedRule, Hierarchical, TwoLevelLinear
from holdfast.routing.noise import GaussianNoise, GumbelNoise, ScaledNoise, UniformNoise
from holdfast.routing.scores import ModalityLinear, TwoLayer
from holdfast.routing.thresholds import Sparsemax

Chosen = tuple[list[int], list[Tensor]]  # the experts of one token and their weights


def linear(score: Linear | Frozen, x: Tensor) -> Tensor:
    logits = torch.stack([(x.double() * row.double()).sum() for row in score.weight])
    bias = getattr(score, "bias", None)
    return logits if bias is None else logits + bias


def cosine(score: Cosine, x: Tensor) -> Tensor:
    z = torch.stack([(x.double() * row.double()).sum() for row in score.projection])
    temperature = score.log_temperature.double().exp()
    return torch.stack([(z @ e.double()) / (z.norm() * e.double().norm()) / temperature[0] for e in score.embeddings])


def two_levels(score: TwoLevelLinear, x: Tensor) -> Tensor:
    """log(q_group r_e), q a softmax over groups and r one within each group, plus a number that all experts share."""
    values = linear(score, x)  # type: ignore[arg-type]
    group = [e * score.groups // score.experts for e in range(score.experts)]
    logits = []
    for e in range(score.experts):
        same = [values[f].exp() for f in range(score.experts) if group[f] == group[e]]
        logits.append(values[score.experts + group[e]] + (values[e].exp() / sum(same)).log())
    return torch.stack(logits)


def two_layer(score: TwoLayer, x: Tensor) -> Tensor:
    rows = zip(score.hidden, score.hidden_bias, strict=True)
    hidden = torch.stack([((x.double() * row.double()).sum() + c).clamp_min(0) for row, c in rows])
    logits = torch.stack([(hidden * row.double()).sum() for row in score.weight])
    return logits if score.bias is None else logits + score.bias


SCORES: dict[type, Any] = {
    Linear: linear,
    Frozen: linear,
    Cosine: cosine,
    TwoLayer: two_layer,
    TwoLevelLinear: two_levels,
}


def hashed(score: HashedIds, token: int) -> Tensor:
    """0 for the experts in the id's row, -104 for others."""
    return torch.tensor([0.0 if e in score.table[token].tolist() else -104.0 for e in range(score.experts)])


def of_modality(score: ModalityLinear, x: Tensor, modality: int) -> Tensor:
    rows = score.weight[modality * score.experts : (modality + 1) * score.experts]
    return torch.stack([(x.double() * row.double()).sum() for row in rows])


def scored(score: Any, tokens: Tensor, context: Context) -> list[Tensor]:
    """The logits of each token."""
    flat = tokens.flatten(0, 1)
    if isinstance(score, Clustered):
        return clustered(score, tokens, context)
    if isinstance(score, HashedIds):
        return [hashed(score, token) for token in ids_of(context)]
    if isinstance(score, ModalityLinear):
        assert context.modality is not None
        return [of_modality(score, x, m) for x, m in zip(flat, context.modality.flatten().tolist(), strict=True)]
    return [SCORES[type(score)](score, x) for x in flat]


def ids_of(context: Context) -> list[int]:
    assert context.token_ids is not None
    ids: list[int] = context.token_ids.flatten().tolist()
    return ids


def clustered(score: Clustered, tokens: Tensor, context: Context) -> list[Tensor]:
    """ACMoE: each token's features times m of the expert it took first at the previous layer."""
    previous = context.previous
    assert previous is not None
    scales = cluster_scales(score, previous, context)
    logits = []
    for index, x in enumerate(tokens.flatten(0, 1)):
        gates = previous.routing.gates[index].double()
        best = top(gates, score.mix).tolist() if score.mix > 1 else [int(previous.routing.experts[index, 0])]
        total = sum(gates[c] for c in best)
        m = sum((gates[c] / total) * scales[c] for c in best)
        logits.append(SCORES[type(score.base)](score.base, x.double() * m))
    return logits


def cluster_scales(score: Clustered, previous: Previous, context: Context) -> list[Tensor]:
    if score.is_random:
        return list(score.random_scales.double())
    spreads = batch_spreads(score, previous, context) if score.stats == "batch" else score.spreads.double()
    return [optimal(spread) if score.scales == "exact" else inverse(spread) for spread in spreads]


def optimal(spread: Tensor) -> Tensor:
    """Theorem 1 of ACMoE, times d: lambda / (s + alpha), lambda the mean of s, alpha > -min s by bisection to mean 1."""
    spread = spread if spread.mean() > 0 else torch.ones_like(spread)
    level = float(spread.mean())
    low, high = -float(spread.min()) + 1e-300, level
    for _ in range(200):
        alpha = (low + high) / 2
        too_large = float((level / (spread + alpha)).mean()) > 1
        low, high = (alpha, high) if too_large else (low, alpha)
    return level / (spread + high)


def interquartile_range(values: Tensor) -> Tensor:
    """The ceil(n/4)-th largest less the ceil(n/4)-th smallest of each column of `values (n,d)`."""
    quarter = -(-len(values) // 4)
    columns = [sorted(column) for column in values.t().tolist()]
    return torch.tensor([column[-quarter] - column[quarter - 1] for column in columns], dtype=values.dtype)


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
        if len(members) and score.spread == "iqr":
            spreads[c] = interquartile_range(members)
        elif len(members):
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


def gate_entropy(logits: Tensor) -> float:
    """Nats, of the softmax of one token's logits."""
    p = torch.softmax(logits.detach().double(), -1)
    return float(-sum(value * value.log() for value in p if value > 0))


def allowed(context: Context, sequence: int, i: int, j: int, causal: bool) -> bool:
    real = context.token_mask is None or bool(context.token_mask[sequence, j])
    return real and (j <= i or not causal)


def token_weights(
    log_weights: Tensor, context: Context, sequence: int, causal: bool, entropies: list[float] | None = None
) -> Tensor:
    """The N x N matrix: softmax over the allowed j of each row, 0 where nothing is allowed.

    entropies   of all tokens: only tokens whose entropy is not larger inform a token
    """
    length = log_weights.shape[0]
    rows = []
    for i in range(length):
        ok = torch.tensor([allowed(context, sequence, i, j, causal) for j in range(length)])
        if entropies is not None:
            ok = ok & torch.tensor([entropies[j] <= entropies[i] + 1e-5 for j in range(length)])
        row = log_weights[i].masked_fill(~ok, -torch.inf)
        rows.append(torch.softmax(row, -1) if ok.any() else torch.zeros_like(row))
    return torch.stack(rows)


def entropies_of(informer: TokenGraph, logits: Tensor, sequence: int) -> list[float] | None:
    return [gate_entropy(row) for row in logits[sequence]] if informer.from_ == "confident" else None


def with_strength(informer: TokenGraph, gates: Tensor, mixed: list[Tensor], context: Context) -> Tensor:
    """(1 - s) P + s W P; a row of padding keeps its own gates."""
    logit = informer.strength_logit
    strength = informer.strength if logit is None else torch.sigmoid(logit)
    informed = (1 - strength) * gates + strength * torch.stack(mixed).float()
    rows = [
        [
            informed[b, n] if context.token_mask is None or context.token_mask[b, n] else gates[b, n]
            for n in range(gates.shape[1])
        ]
        for b in range(gates.shape[0])
    ]
    return torch.stack([torch.stack(row) for row in rows])


def similar(informer: Similarity, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
    """W_ij = softmax_j(u_i W_s u_j / tau), G = W P, one sequence at a time."""
    compared = tokens
    if informer.of == "attention":
        assert context.attention is not None
        compared = context.attention.output
    mixed = []
    for sequence, u in enumerate(compared.double()):
        metric = torch.eye(u.shape[-1]).double()
        if informer.reduce is not None:
            keys = informer.reduce if informer.reduce_keys is None else informer.reduce_keys
            metric = informer.reduce.double().t() @ keys.double()
        log_weights = u @ metric @ u.t() / informer.tau
        entropies = entropies_of(informer, logits, sequence)
        weights = token_weights(log_weights, context, sequence, informer.causal and context.causal, entropies)
        mixed.append(weights @ gates[sequence].double())
    return with_strength(informer, gates, mixed, context)


def posterior(informer: AttentionPosterior, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
    """A_h[i,j] exp(-|u_i - o_jh|^2 / 2 sigma^2), of the head with the lowest mean entropy, or of all heads together."""
    attention = context.attention
    assert attention is not None and attention.projection is not None
    count = attention.query.shape[1]
    heads = list(range(count))
    if informer.heads != "all":
        entropy = informer.entropy if informer.stats == "running" else head_entropies(attention, context)
        heads = [min(heads, key=lambda h: (float(entropy[h]), h))]
    mixed = []
    for sequence in range(gates.shape[0]):
        joint = []  # for each head, log A_h[i,j] - |u_i - o_jh|^2 / 2 sigma^2
        for head in heads:
            q, k, v, weight, bias = head_of(attention, sequence, head, count)
            u = attention.output[sequence].double()
            o = count * v @ weight.t() + bias
            distances = torch.stack([torch.stack([(ui - oj).square().sum() for oj in o]) for ui in u])
            attended = token_weights(q @ k.t() / q.shape[-1] ** 0.5, context, sequence, context.causal)
            joint.append(attended.clamp_min(1e-300).log() - distances / (2 * informer.sigma**2))
        entropies = entropies_of(informer, logits, sequence)
        weights = [
            token_weights(log_weights, context, sequence, context.causal, entropies) * share
            for log_weights, share in zip(joint, head_shares(joint, context, sequence, entropies), strict=True)
        ]
        mixed.append(torch.stack(weights).sum(0) @ gates[sequence].double())
    return with_strength(informer, gates, mixed, context)


def head_entropies(attention: Attention, context: Context) -> list[float]:
    """The sum of each head's attention entropies over the real tokens of the batch."""
    (sequences, count, length), sums = attention.query.shape[:3], []
    for head in range(count):
        total = 0.0
        for sequence in range(sequences):
            q, k, *_ = head_of(attention, sequence, head, count)
            weights = token_weights(q @ k.t() / q.shape[-1] ** 0.5, context, sequence, context.causal).detach()
            for i in range(length):
                if context.token_mask is None or context.token_mask[sequence, i]:
                    total -= sum(float(w) * math.log(float(w)) for w in weights[i] if w > 0)
        sums.append(total)
    return sums


def head_shares(joint: list[Tensor], context: Context, sequence: int, entropies: list[float] | None) -> list[Tensor]:
    """H'_ih, (N,1) for each head: proportional to the sum of exp(joint) over the tokens j that inform i."""
    length = joint[0].shape[0]
    shares = torch.zeros(len(joint), length, 1, dtype=torch.float64) + torch.zeros_like(joint[0][:, :1])
    for i in range(length):
        ok = [
            j
            for j in range(length)
            if allowed(context, sequence, i, j, context.causal)
            and (entropies is None or entropies[j] <= entropies[i] + 1e-5)
        ]
        if ok:
            evidence = torch.stack([torch.logsumexp(log_weights[i, ok], 0) for log_weights in joint])
            shares = shares.index_put(
                (torch.arange(len(joint)), torch.tensor(i), torch.tensor(0)), torch.softmax(evidence, 0)
            )
    return list(shares)


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


def strip_widths(select: SmoothTopK, keys: Tensor, logits: Tensor, real: list[bool]) -> list[Tensor]:
    """The width of each token's strip.

    In training there are rows for twice the budget of extra experts, for real tokens and with the rest for padding. The
    strips of each end where their next expert would need a row. With rows=all they end nowhere.
    """
    eps = select.eps()
    if not select.training or select.spare is None or 2 * select.budget >= select.slots - select.k:
        return [eps] * len(real)
    rows_of_real = math.ceil(2 * Fraction(str(select.budget)) * sum(real))
    rows = {True: rows_of_real, False: math.ceil(2 * Fraction(str(select.budget)) * len(real)) - rows_of_real}
    gaps: dict[bool, list[Tensor]] = {True: [], False: []}
    for key, row, is_real in zip(keys, logits.detach(), real, strict=True):
        order = top(key, key.shape[-1]).tolist()
        gaps[is_real] += [row[order[select.k - 1]] - row[expert] for expert in order[select.k : select.slots]]
    widths = {}
    for kind, found in gaps.items():
        ranked = sorted(gap for gap in found if gap < torch.inf)
        widths[kind] = torch.minimum(eps, ranked[rows[kind]]) if rows[kind] < len(ranked) else eps
    return [widths[is_real] for is_real in real]


def smooth(select: SmoothTopK, key: Tensor, gates: Tensor, logits: Tensor, informed: bool, eps: Tensor) -> Chosen:
    """weights = softmax(logit_i + S(u_i)) over the experts with u_i > 0; the k best always, with S = 0.

    If a token may use at most `slots` experts, the strip ends at the next one.
    """
    order = top(key, key.shape[-1]).tolist()
    c = logits[order[select.k - 1]].detach()
    if select.slots < len(order):
        eps = torch.minimum(eps, c - logits[order[select.slots]].detach())
    kept: dict[int, Tensor] = {}
    for place, expert in enumerate(order):
        if place < select.k:
            kept[expert] = logits[expert]
        elif eps > 0:
            u = 1 - (c - logits[expert].detach()) / eps
            if u >= 1:
                kept[expert] = logits[expert]
            elif u > 0:
                rising, falling = u**select.powers.a, (1 - u) ** select.powers.b
                kept[expert] = logits[expert] + torch.log(rising / (rising + falling))
    if informed and float(gates.detach().sum()) == 0:
        return list(kept), [torch.zeros(()) for _ in kept]
    return list(kept), softmax(list(kept.values()))


def sparsemax(select: Sparsemax, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    weights = project(logits)
    experts = [e for e in top(key, key.shape[-1]).tolist() if weights[e] > 0 and gates[e] > 0]
    return experts, [weights[e] for e in experts]


def in_groups(select: Grouped | Hierarchical, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    rule = select.rule
    if not isinstance(rule, GroupedRule):  # all groups are kept
        return top_k(select, key, gates, logits, informed)
    mass = [0.0] * rule.groups
    for expert, value in enumerate(gates.tolist()):
        mass[expert * rule.groups // select.experts] += value
    kept = top(torch.tensor(mass), rule.top_groups).tolist()
    allowed = [e for e in range(select.experts) if e * rule.groups // select.experts in kept]
    masked = torch.tensor([float(key[e]) if e in allowed else -torch.inf for e in range(select.experts)])
    return top_k(select, masked, gates, logits, informed)


def own_groups(select: Hierarchical, row: Tensor, modality: Tensor) -> Tensor:
    """Groups of other modalities have logits whose gates are 0."""
    assert select.modalities is not None
    of = [(e * select.groups // select.experts) * select.modalities // select.groups for e in range(select.experts)]
    lowest = min(float(row[e].detach()) for e in range(select.experts) if of[e] == modality)
    return torch.stack([row[e] if of[e] == modality else torch.tensor(lowest - 104) for e in range(select.experts)])


def equal_weights(select: EqualWeights, key: Tensor, gates: Tensor, logits: Tensor, informed: bool) -> Chosen:
    return top(key, select.k).tolist(), [torch.tensor(1 / select.k)] * select.k


def distilled(select: Distilled, token: int, key: Tensor, gates: Tensor) -> Chosen:
    """The experts of one token: by its score in stage 1 of training, else by its id; weights are sigmoids."""
    if select.frozen:
        experts = select.table[token].tolist()
    else:
        experts = top(key if select.training else predictions(select, token).detach(), select.k).tolist()
    experts = sorted(experts, key=lambda e: -float(gates[e]))
    return experts, [gates[e] for e in experts]


def predictions(select: Distilled, token: int) -> Tensor:
    return torch.stack([(select.embedding[token] * row).sum() for row in select.predictor])


SELECTORS: dict[type, Any] = {
    TopK: top_k,
    TopP: top_p,
    ReLU: relu,
    Sparsemax: sparsemax,
    Grouped: in_groups,
    Hierarchical: in_groups,
    EqualWeights: equal_weights,
}


def gate(select: Selector, logits: Tensor) -> Tensor:
    if isinstance(select, ReLU):
        return torch.relu(logits)
    if isinstance(select, Distilled):
        return 1 / (1 + torch.exp(-logits))
    if isinstance(select, Sinkhorn) and select.sparsity:
        return sparse_row(logits, select.sparsity, select.gamma)
    return project(logits) if isinstance(select, Sparsemax) else torch.stack(softmax(list(logits)))


def noise(module: nn.Module | None, tokens: Tensor, experts: int) -> list[Tensor] | None:
    """Return the random numbers that the router draws, one tensor for all tokens."""
    shape = (*tokens.shape[:2], experts)
    if isinstance(module, GaussianNoise):
        return list(torch.randn(shape).flatten(0, 1))
    if isinstance(module, GumbelNoise):
        return list(-torch.empty(shape).exponential_().log().flatten(0, 1))
    if isinstance(module, UniformNoise):
        return list(((2 * torch.rand(shape) - 1) * 3**0.5).flatten(0, 1))
    return None


def noisy(module: nn.Module, logits: Tensor, x: Tensor, drawn: Tensor) -> Tensor:
    if isinstance(module, GumbelNoise):
        return logits + drawn / module.temperature
    assert isinstance(module, ScaledNoise)
    if module.weight is None:
        return logits + drawn * float(module.std or 0)
    scale = torch.stack([torch.log1p(torch.exp((x.double() * row.double()).sum())) for row in module.weight])
    return logits + drawn * scale


def mixed(number: int) -> int:
    """Return 32 mixed bits of a number of 32 bits."""
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B % 2**32
    return (number >> 16) ^ number


def dropped(router: Router, tokens: Tensor) -> Tensor | None:
    """Return bool (T,E): the experts that expert dropout takes out; None if there is none."""
    module = router.dropout if router.training else None
    if module is None:
        return None
    if isinstance(module, StepDropout):
        start = mixed(mixed(int(module.forwards)) ^ zlib.crc32(router.layer.encode()))
        draws = [[mixed(start ^ mixed(expert + 1)) / 2**32 for expert in range(router.experts)]] * tokens[..., 0].numel()
    else:
        draws = torch.rand(*tokens.shape[:2], router.experts).flatten(0, 1).tolist()
    rows = []
    for drawn in draws:
        best = sorted(range(router.experts), key=lambda expert: -drawn[expert])[: module.k]
        rows.append([drawn[expert] < module.drop and expert not in best for expert in range(router.experts)])
    return torch.tensor(rows)


def reference(router: Router, tokens: Tensor, context: Context) -> Routing:
    """The whole pipeline, one token at a time, with the token graphs as explicit N x N matrices."""
    score, select = router.score, router.select
    if select.layer_kind != "moe":
        import soft_references  # which imports this module

        return soft_references.reference(router, tokens, context)
    capacity, select = (select, select.base) if isinstance(select, Capacity) else (None, select)
    logits = torch.stack(scored(score, tokens, context)).float()
    if isinstance(router.select.noise, GumbelNoise):
        logits = logits / router.select.noise.temperature
    informed = bool(router.informers)
    real = [True] * len(logits) if context.token_mask is None else context.token_mask.flatten().tolist()
    base = balanced(select, logits, real, informed)
    if isinstance(select, Hierarchical) and select.modalities is not None:
        assert context.modality is not None
        base = torch.stack([own_groups(select, *each) for each in zip(base, context.modality.flatten(), strict=True)])
    gates = torch.stack([gate(select, row).float() for row in base])
    shape = (*tokens.shape[:2], -1)
    gates = inform(router, gates.view(shape), base.view(shape), tokens, context).flatten(0, 1)
    read = gates.clamp_min(1.2e-38).log() if informed else base
    module = router.select.noise if router.training else None
    drawn = noise(module, tokens, router.experts)
    if module is not None and drawn is not None:
        noised = [noisy(module, row, x, z) for row, x, z in zip(read, tokens.flatten(0, 1), drawn, strict=True)]
        read = torch.stack(noised).float()
        if informed:  # a gate of 0 stays 0 where it decides what is selected
            shares = torch.stack([torch.stack(softmax(list(row))).float() for row in read])
            noised_gates = gates.sum(-1, keepdim=True) * shares
            gates = noised_gates.where(gates > 0, 0.0) if isinstance(select, ReLU) else noised_gates
        else:
            gates = torch.stack([gate(select, row).float() for row in read])
    lost = dropped(router, tokens)
    if lost is not None:
        gates = gates.where(~lost, 0.0)
        if informed:
            read = gates.clamp_min(1.2e-38).log()
        else:
            read = read.where(~lost, -1e38)
            gates = torch.stack([gate(select, row).float() for row in read]) if isinstance(select, Sparsemax) else gates
    keys = gates if informed else read
    choose = SELECTORS.get(type(select))
    if isinstance(select, Distilled):
        chosen = [distilled(select, *each) for each in zip(ids_of(context), keys, gates, strict=True)]
    elif isinstance(select, SmoothTopK):
        widths = strip_widths(select, keys, read, real)
        chosen = [smooth(select, *each[:3], informed, each[3]) for each in zip(keys, gates, read, widths, strict=True)]
    elif choose is None:
        chosen = batch_wide(select, keys, gates, read, real, informed)
    else:
        chosen = [choose(select, key, g, row, informed) for key, g, row in zip(keys, gates, read, strict=True)]
    if capacity is not None:
        chosen = limited(capacity, chosen, keys, gates, read, real, informed)
    slots = max(1, *(len(experts) for experts, _ in chosen))
    padded = [torch.tensor(experts + [router.experts] * (slots - len(experts))) for experts, _ in chosen]
    zero = torch.zeros(())
    weights = [torch.stack([w.float() for w in ws] + [zero] * (slots - len(ws))) for _, ws in chosen]
    losses = own_losses(router, gates, chosen, context) if router.training else {}
    return Routing(logits if informed else base, gates, torch.stack(padded), torch.stack(weights), losses)


def inform(router: Router, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
    for informer in router.informers:
        if isinstance(informer, ExpertGraph):
            gates = mix_experts(informer, gates)
        elif isinstance(informer, Similarity):
            gates = similar(informer, gates, logits, tokens, context)
        else:
            assert isinstance(informer, AttentionPosterior)
            gates = posterior(informer, gates, logits, tokens, context)
    return gates


def own_losses(router: Router, gates: Tensor, chosen: list[Chosen], context: Context) -> dict[str, Tensor]:
    select = router.select.base if isinstance(router.select, Capacity) else router.select
    real = torch.ones(len(gates)).bool() if context.token_mask is None else context.token_mask.flatten()
    if isinstance(select, ReLU):
        rows = [row for row, is_real in zip(gates, real, strict=True) if is_real]
        tokens = [sum(float(row[e] > 0) for row in rows) for e in range(select.experts)]
        load = [select.experts / (select.k * len(rows)) * count for count in tokens]
        load = [1.0] * len(load) if select.penalty == "uniform" else load
        total = sum((f * row[e] for row in rows for e, f in enumerate(load)), torch.zeros(()))
        return {"l1": select.l1 * total / int(real.sum())}
    if isinstance(select, Distilled) and not select.frozen:
        losses = []
        for token, (experts, _), is_real in zip(ids_of(context), chosen, real, strict=True):
            if is_real:
                shares = softmax(list(predictions(select, token)))
                losses.append(-torch.stack([torch.log(shares[e]) for e in experts]).mean())
        return {"distill": select.distill * torch.stack(losses).mean()}
    if isinstance(select, SmoothTopK) and select.control == "loss":
        active = sum(len(experts) for (experts, _), is_real in zip(chosen, real, strict=True) if is_real) / int(real.sum())
        return {"boundary": select.alpha * select.eps() * (active - select.k - select.budget)}
    return {}
