"""Naive certificates: the formulas token by token and pair by pair, in float64 loops."""

import math

import torch
from torch import Tensor

from holdfast.certificates import Norm
from holdfast.routing import Clustered, Context, Cosine, LinearScore, Router, Similarity
from holdfast.routing.clustering import feature_scales


def dual_length(row: Tensor, norm: Norm) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in row)) if norm == "l2" else sum(abs(float(v)) for v in row)


def effective_weights(router: Router, context: Context) -> list[Tensor]:
    """Return for each token the matrix (E,d); differences of its rows are the normals of the token's decision boundaries."""
    score = router.score
    base = score.base if isinstance(score, Clustered) else score
    assert isinstance(base, LinearScore)
    weight = base.matrix.detach().double()
    if isinstance(base, Cosine):
        units = torch.stack([row / row.norm() for row in base.embeddings.detach().double()])
        weight = units @ weight
    if not isinstance(score, Clustered) or context.previous is None:
        return [weight]
    routing, matrices = context.previous.routing, []
    scales = feature_scales(score.spreads).double()
    for experts, gates in zip(routing.experts.tolist(), routing.gates.double(), strict=True):
        if score.mix == 1:
            m = scales[experts[0]]
        else:
            best = gates.argsort(descending=True)[: score.mix].tolist()
            m = sum((gates[c] * scales[c] for c in best), torch.zeros_like(scales[0])) / sum(gates[c] for c in best)
        matrices.append(weight * m)
    return matrices


def plane_radii(weights: list[Tensor], bias: Tensor, tokens: Tensor, k: int, norm: Norm) -> tuple[list[float], list[Tensor]]:
    """Return min over i in S, j not in S of (l_i - l_j) / |w_i - w_j|, and the normals of the nearest planes."""
    radii, normals = [], []
    for index, x in enumerate(tokens.double()):
        weight = weights[index % len(weights)]
        logits = [float((x * w).sum() + b) for w, b in zip(weight, bias.double(), strict=True)]
        order = sorted(range(len(logits)), key=lambda e: (-logits[e], e))
        best, normal = math.inf, torch.zeros_like(x)
        for i in order[:k]:
            for j in order[k:]:
                length = dual_length(weight[i] - weight[j], norm)
                radius = (logits[i] - logits[j]) / length if length else math.inf
                if radius < best:
                    best, normal = radius, weight[j] - weight[i]
        radii.append(best)
        normals.append(normal)
    return radii, normals


def relu_radii(weight: Tensor, tokens: Tensor, norm: Norm) -> list[float]:
    return [min(abs(float(x @ w)) / dual_length(w, norm) for w in weight) for x in tokens.double()]


def symphony_radii(graph: Tensor, weight: Tensor, tokens: Tensor, k: int) -> tuple[list[float], list[float]]:
    """Return the two Lipschitz bounds in l2: of each pair, and proposition 1."""
    experts = len(graph)
    centre = torch.eye(experts, dtype=torch.float64) - torch.full((experts, experts), 1 / experts, dtype=torch.float64)
    lipschitz = float(torch.linalg.matrix_norm(centre @ weight, ord=2)) / 2
    rho = float(torch.linalg.matrix_norm(graph @ centre, ord=2))
    pairwise, proposition = [], []
    for x in tokens.double():
        gates = graph @ torch.softmax(weight @ x, dim=0)
        order = sorted(range(experts), key=lambda e: (-float(gates[e]), e))
        pairs = [(i, j) for i in order[:k] for j in order[k:]]
        steep = {(i, j): float(((graph[i] - graph[j]) @ centre).norm()) * lipschitz for i, j in pairs}
        pairwise.append(min(float(gates[i] - gates[j]) / steep[i, j] for i, j in pairs))
        proposition.append(min(float(gates[i] - gates[j]) for i, j in pairs) / (2 * rho * lipschitz))
    return pairwise, proposition


def mixed_radii(
    weight: Tensor, sequence: Tensor, gates: Tensor, k: int, informer: Similarity, strength: float = 1.0
) -> list[float]:
    """Return the radius of similarity in l2: the largest r with range (tanh(r D / 4) + s tanh(change(r) / 2)) < margin.

    change(r) = max_j (|R| r |v_j| + |Q| r |u_i| + |R| |Q| r^2) / tau for u = R x and v = Q x; |R| is the spectral norm of R
    with the absolute values of its entries, at least that of R.
    """
    apart = max(float((one - other).norm()) for one in weight for other in weight)
    identity = torch.eye(sequence.shape[1], dtype=torch.float64)
    reduce = identity if informer.reduce is None else informer.reduce.detach().double()
    reduce_keys = reduce if informer.reduce_keys is None else informer.reduce_keys.detach().double()
    speed, key_speed = (float(torch.linalg.svdvals(matrix.abs())[0]) for matrix in (reduce, reduce_keys))
    lengths, key_lengths = ([float((m @ x).norm()) for x in sequence.double()] for m in (reduce, reduce_keys))
    radii = []
    for length, row in zip(lengths, gates.double().tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))
        margin = row[order[k - 1]] - row[order[k]]
        low, high = 0.0, 10.0
        for _ in range(100):
            r = (low + high) / 2
            change = max(speed * r * v + key_speed * r * length + speed * key_speed * r * r for v in key_lengths)
            good = 2 * (math.tanh(r * apart / 4) + strength * math.tanh(change / informer.tau / 2)) < margin
            low, high = (r, high) if good else (low, r)
        radii.append(low)
    return radii
