"""Naive references of the selectors that look at the whole batch: loops over tokens and experts, and scipy for BASE."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from holdfast.kernels.select import top_reference as top
from holdfast.routing import ReLU, Selector, TopK
from holdfast.routing.balanced import BaseAssignment, ExpertChoice, Sinkhorn
from holdfast.routing.capacity import Capacity

Chosen = tuple[list[int], list[Tensor]]  # the experts of one token and their weights


def ceil_share(slots: int, factor: float, experts: int) -> int:
    return math.ceil(Fraction(str(factor)) * slots / experts)


def best_assignment(scores: Tensor, k: int) -> Tensor:
    """Return (T,E) bool: the assignment with the largest sum; k experts a token, at most ceil(T k / E) tokens an expert."""
    tokens, experts = scores.shape
    places = math.ceil(tokens * k / experts)
    if k == 1:
        rows, columns = linear_sum_assignment(scores.double().numpy().repeat(places, axis=1), maximize=True)
        return torch.zeros(tokens, experts, dtype=torch.bool).index_put(
            (torch.as_tensor(rows), torch.as_tensor(columns // places)), torch.tensor(True)
        )
    found = linprog(
        -scores.double().numpy().ravel(),
        A_ub=np.kron(np.ones(tokens), np.eye(experts)),
        b_ub=np.full(experts, places),
        A_eq=np.kron(np.eye(tokens), np.ones(experts)),
        b_eq=np.full(tokens, k),
        bounds=(0, 1),
    )
    return torch.as_tensor(found.x).view(tokens, experts) > 0.5


def expert_choice(select: ExpertChoice, keys: Tensor, gates: Tensor, read: Tensor, real: list[bool]) -> list[list[int]]:
    """Expert e takes the c real tokens with the largest share of their gates."""
    shares = gates.detach() / gates.detach().sum(-1, keepdim=True).clamp_min(1e-38)
    tokens = [t for t, is_real in enumerate(real) if is_real]
    count = min(len(tokens), ceil_share(len(tokens) * select.k, select.factor, select.experts))
    taken: list[list[int]] = [[] for _ in real]
    for expert in range(select.experts):
        for t in sorted(tokens, key=lambda t: (-float(shares[t, expert]), t))[:count]:
            taken[t].append(expert)
    return taken


def potentials(read: Tensor, real: list[bool]) -> Tensor:
    rows = [row.detach().double() for row, is_real in zip(read, real, strict=True) if is_real]
    experts = read.shape[1]
    v = torch.zeros(experts).double()
    if len(rows) < experts:
        return v
    for _ in range(50):
        plan = [torch.softmax(row + v, -1) for row in rows]
        columns = torch.stack([torch.stack([p[e] for p in plan]).sum() for e in range(experts)])
        if max(abs(float(c) * experts / len(rows) - 1) for c in columns) <= 1e-3:
            break
        v = v + math.log(len(rows) / experts) - columns.log()
    return v


def project(logits: Tensor) -> Tensor:
    """Sparsemax by an active set: subtract the threshold of all, drop those that become negative, and repeat."""
    active = list(range(len(logits)))
    while True:
        threshold = (sum((logits[e].double() for e in active), torch.zeros(()).double()) - 1) / len(active)
        kept = [e for e in active if logits[e].double() > threshold]
        if kept == active:
            zero = torch.zeros(()).double()
            return torch.stack([logits[e] - threshold if e in active else zero for e in range(len(logits))])
        active = kept


def sparse_row(row: Tensor, sparsity: int, gamma: float) -> Tensor:
    """The projection of the largest entries of row / gamma onto the simplex."""
    best = top(row.detach().float(), sparsity).tolist()
    entries = project(torch.stack([row[e] / gamma for e in best]))
    zero = torch.zeros(()).double()
    return torch.stack([entries[best.index(e)] if e in best else zero for e in range(len(row))])


def sparse_transport(read: Tensor, real: list[bool], sparsity: int, gamma: float, iterations: int = 50) -> Tensor:
    """The potentials of sparse transport: steps along the relative excess of each column, which become smaller."""
    rows = [row.detach().double() for row, is_real in zip(read, real, strict=True) if is_real]
    experts = read.shape[1]
    v = torch.zeros(experts).double()
    if len(rows) < experts:
        return v
    size = sum(float(row.max() - row.min()) for row in rows) / len(rows) / 2
    for step in range(iterations):
        plan = [sparse_row(row + v, sparsity, gamma) for row in rows]
        for e in range(experts):
            excess = sum(float(x[e]) for x in plan) * experts / len(rows) - 1
            v[e] -= size * iterations ** (-2 * step / iterations) * max(-1.0, min(1.0, excess))
    return v - v.mean()


def balanced(select: Selector, logits: Tensor, real: list[bool], informed: bool) -> Tensor:
    """The logits that gates are computed from: with the potentials, if Sinkhorn is sparse or comes before an informer."""
    if not isinstance(select, Sinkhorn) or not (informed or select.sparsity):
        return logits
    if not select.training:
        return logits + select.running if select.has_bias else logits
    v = sparse_transport(logits, real, select.sparsity, select.gamma) if select.sparsity else potentials(logits, real)
    return logits + v.float()


def sets_of(
    select: Selector, keys: Tensor, gates: Tensor, read: Tensor, real: list[bool], informed: bool
) -> list[list[int]]:
    """Return the experts of each token."""
    assert isinstance(select, ExpertChoice | Sinkhorn | BaseAssignment)
    own: list[list[int]] = top(keys, select.k).tolist()
    if isinstance(select, ExpertChoice) and (select.training or select.evaluate == "same"):
        taken = expert_choice(select, keys, gates, read, real)
    elif isinstance(select, Sinkhorn) and select.sparsity and not informed:
        return [[e for e in mine if row[e] > 0] for mine, row in zip(own, gates, strict=True)]
    elif isinstance(select, Sinkhorn) and not informed and (select.training or select.has_bias):
        v = potentials(read, real) if select.training else select.running
        return top(read + v, select.k).tolist()  # type: ignore[no-any-return]
    elif isinstance(select, BaseAssignment) and select.training:
        tokens = [t for t, is_real in enumerate(real) if is_real]
        assigned = best_assignment(read.detach()[tokens], select.k)
        taken = [list[int]() for _ in real]
        for t, row in zip(tokens, assigned, strict=True):
            taken[t] = row.nonzero().flatten().tolist()
    else:
        return own
    return [mine if is_real else plain for mine, plain, is_real in zip(taken, own, real, strict=True)]


def weights_of(select: Any, experts: list[int], gates: Tensor, logits: Tensor, informed: bool) -> list[Tensor]:
    """Return the weights of any set of experts of one token."""
    one = isinstance(select, Sinkhorn) and select.k == 1 and not (informed or select.sparsity)
    if isinstance(select, BaseAssignment) or one:
        return [1 / (1 + torch.exp(-logits[e])) for e in experts]
    if isinstance(select, ExpertChoice):
        return [gates[e] / gates.sum().clamp_min(1e-38) for e in experts]
    raw = isinstance(select, Sinkhorn | ReLU) or (isinstance(select, TopK) and select.weights == "switch")
    total = 1.0 if raw else sum((gates[e] for e in experts), torch.zeros(())).clamp_min(1e-38)
    return [gates[e] / total for e in experts]


def batch_wide(
    select: Selector, keys: Tensor, gates: Tensor, read: Tensor, real: list[bool], informed: bool
) -> list[Chosen]:
    """Return the experts of each token and their weights, best first."""
    found = []
    for experts, key, g, row in zip(sets_of(select, keys, gates, read, real, informed), keys, gates, read, strict=True):
        ordered = sorted(experts, key=lambda e: (-float(key[e].detach()), e))
        found.append((ordered, weights_of(select, ordered, g, row, informed)))
    return found


def limited(
    capacity: Capacity, chosen: list[Chosen], keys: Tensor, gates: Tensor, read: Tensor, real: list[bool], informed: bool
) -> list[Chosen]:
    """Return the experts of each token, and their weights, after the limit."""
    sets = limit_sets([experts for experts, _ in chosen], keys.detach(), gates.detach(), real, capacity)
    return [
        (experts, weights) if set(kept) == set(experts) else (kept, weights_of(capacity.base, kept, g, row, informed))
        for (experts, weights), kept, g, row in zip(chosen, sets, gates, read, strict=True)
    ]


def limit_sets(
    requested: list[list[int]], keys: Tensor, gates: Tensor, real: list[bool], capacity: Capacity
) -> list[list[int]]:
    """Return the experts that each token gets; one token, one expert and one place at a time."""
    experts = gates.shape[1]
    tokens = [t for t, is_real in enumerate(real) if is_real]
    slots = sum(len(requested[t]) for t in tokens)
    factors = capacity.factor if isinstance(capacity.factor, list) else [capacity.factor] * experts
    places = [ceil_share(slots, factor, experts) for factor in factors]  # of each expert
    lists = [
        mine + [e for e in top(key, experts).tolist() if e not in mine and g[e] > 0]
        for mine, key, g in zip(requested, keys, gates, strict=True)
    ]

    def preferred(expert: int, t: int) -> tuple[float, int]:
        first = lists[t].index(expert) if capacity.order == "position" else -float(gates[t, expert])
        return first, t

    def best(expert: int, asking: list[int], count: int) -> list[int]:
        return sorted(asking, key=lambda t: preferred(expert, t))[:count]

    held: list[list[int]] = [[] for _ in range(experts)]  # tokens of each expert
    if capacity.policy == "reroute":
        asked = [0] * len(requested)
        queue = list(tokens)
        while queue:
            t = queue.pop()
            lacking = len(requested[t]) - sum(t in members for members in held)
            while lacking and asked[t] < len(lists[t]):
                expert = lists[t][asked[t]]
                asked[t] += 1
                kept = best(expert, [*held[expert], t], places[expert])
                bumped = [other for other in [*held[expert], t] if other not in kept]
                held[expert] = kept
                lacking -= t in kept
                queue += [other for other in bumped if other != t]
    else:
        for expert in range(experts):
            held[expert] = best(expert, [t for t in tokens if expert in requested[t]], places[expert])
        tried = [set(mine) for mine in requested]
        asking: dict[int, list[int]] = {0: []}
        while asking and capacity.policy == "next":
            asking = {}
            for t in tokens:
                lacking = len(requested[t]) - sum(t in members for members in held)
                free = [e for e in lists[t] if e not in tried[t] and len(held[e]) < places[e]][:lacking]
                tried[t] |= set(free)
                for expert in free:
                    asking.setdefault(expert, []).append(t)
            for expert, mine in asking.items():
                held[expert] = held[expert] + best(expert, mine, places[expert] - len(held[expert]))
    got = [[e for e in wanted if t in held[e]] for t, wanted in enumerate(lists)]
    return [mine if is_real else asked_for for mine, asked_for, is_real in zip(got, requested, real, strict=True)]
