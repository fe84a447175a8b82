"""Statements of the papers beside what is measured on a layer's own tokens: of the first batch, for layers with pictures.

co_selection    how precisely the batch estimates Symphony's expert graph, and how far noise moves it (theorem 1)
entropy         of gates that tokens of a sequence share by similarity, and its bound (Mutual-Inform, proposition 1)
clusters        separation, mis-assignment and condition numbers before and after AC scales features (ACMoE)
slopes          how fast gate weights change with the logits: softmax, top-k, smooth (survey, section 6.1)
tsne            t-SNE of router inputs, with the first expert of each (ACMoE, figure 4)
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.auditing.token_geometry import LayerTokens
from holdfast.errors import missing_extra_message
from holdfast.geometry import (
    cluster_separation,
    gate_slopes,
    graph_under_noise,
    mixed_entropies,
    similarity_weights,
    smooth_weights,
    softmax_weights,
    top_k_weights,
    tsne_coordinates,
)

NOISE = (0.01, 0.05, 0.1)  # of the graph, in shares of a token's norm
STRIP = 0.1  # width of the strip of `smooth`, if the what-if has none
MOST_SLOPES = 64  # tokens
MOST_DRAWN = 600  # tokens of a t-SNE


def measure_theory(
    tokens: LayerTokens, length: int, before: Tensor | None, strip: float | None, seed: int
) -> dict[str, Any]:
    """Return the statements that apply; one that does not has the reason under "skipped".

    length  tokens of a sequence of the batch
    before  (T,): the first expert of each token at the previous MoE layer, its cluster; None: there is no such layer
    strip   the width of the strip of the what-if, in logits; None: it has none
    """
    parts: dict[str, Any] = {
        "co_selection": lambda: _co_selection(tokens, seed),
        "entropy": lambda: _entropy(tokens, length),
        "clusters": lambda: _clusters(tokens, before, seed),
        "slopes": lambda: _slopes(tokens, strip or STRIP),
        "tsne": lambda: _tsne(tokens, seed),
    }
    found: dict[str, Any] = {}
    for name, measure in parts.items():
        try:
            found[name] = measure()
        except ValueError as reason:
            found[name] = {"skipped": str(reason)}
    return found


def _co_selection(tokens: LayerTokens, seed: int) -> dict[str, Any]:
    weight, bias = tokens.key_weights(int(tokens.keys.index.bincount().argmax())), tokens.keys.bias

    def chosen(points: Tensor) -> Tensor:
        best = (points.double() @ weight.t() + bias).argsort(dim=1, descending=True, stable=True)[:, : tokens.k]
        return torch.zeros(len(points), tokens.experts, dtype=torch.bool).scatter(1, best, True)

    found = graph_under_noise(chosen, tokens.tokens.cpu(), NOISE, seed=seed)
    used = found.clean.counts > 0
    return {
        "half_width": float(found.clean.half_widths[used].median()),
        "alpha": found.clean.alpha,
        "noise": list(NOISE),
        "mean": found.mean.tolist(),
        "largest": found.largest.tolist(),
        "beyond": found.beyond.tolist(),
    }


def _entropy(tokens: LayerTokens, length: int) -> dict[str, Any]:
    """Entropies of the first sequence, with similarity of router inputs at its default temperature."""
    first = tokens.tokens[tokens.rows < length].cpu()
    if len(first) < 2:
        raise ValueError("the first sequence has fewer than two tokens.")
    gates = torch.softmax(tokens.keys.logits[: len(first)].cpu(), dim=-1)
    found = mixed_entropies(gates, similarity_weights(first))
    return {name: float(values.mean()) for name, values in vars(found).items()}


def _clusters(tokens: LayerTokens, before: Tensor | None, seed: int) -> dict[str, Any]:
    if before is None:
        raise ValueError("there is no previous MoE layer, whose first experts are the clusters.")
    noise = 0.05 * float(tokens.lengths.mean()) / tokens.tokens.shape[1] ** 0.5
    found = cluster_separation(tokens.tokens.cpu(), before.cpu(), noise=noise, seed=seed)
    spaces = {"plain": found.plain, "scaled": found.scaled}
    rows = {name: {key: float(values.median()) for key, values in vars(space).items()} for name, space in spaces.items()}
    return {"clusters": len(found.clusters), "noise": 0.05, **rows}


def _slopes(tokens: LayerTokens, strip: float) -> dict[str, Any]:
    logits, k = tokens.keys.logits[:MOST_SLOPES].cpu(), tokens.k
    gates = {
        "softmax": softmax_weights,
        "top-k": lambda values: top_k_weights(values, k),
        "smooth": lambda values: smooth_weights(values, k, strip),
    }
    found = {}
    for name, weights in gates.items():
        slopes = gate_slopes(weights, logits, k)
        found[name] = {"at_token": float(slopes.at_token.median()), "jump": float(slopes.jump.median())}
        found[name]["largest"] = float(slopes.largest.median())  # infinite, stored as None, if the weights jump
    return {"strip": strip, **found}


def _tsne(tokens: LayerTokens, seed: int) -> dict[str, Any]:
    if message := missing_extra_message("t-SNE of router inputs", "sklearn"):
        raise ValueError(f"{message}.")
    places, kept = tsne_coordinates(tokens.tokens.cpu(), most=MOST_DRAWN, seed=seed)
    first = tokens.keys.logits.cpu().argmax(1)[kept]
    size = float(places.abs().max()) or 1.0
    return {"x": [round(x / size, 4) for x, _ in places.tolist()], "y": [round(y / size, 4) for _, y in places.tolist()],
            "experts": first.tolist()}  # fmt: skip
