"""How precisely a batch estimates Symphony's expert graph, and how far noise on the tokens moves it.

Algorithm 1 of SymphonySMoE normalises the counts C = Z^T Z of a batch by rows. Each token of expert j is in k pairs, so

    a_jl = C_jl / (k n_j),     n_j = C_jj the tokens of expert j

is 1/k times the mean of n_j numbers that are 0 or 1, and Hoeffding's inequality gives, for independent tokens,

    P(|a_jl - its expectation| > sqrt(ln(2 / alpha) / (2 n_j)) / k) <= alpha

Theorem 1 of the paper takes a_jl as a joint frequency of all N tokens, sqrt(ln(2 / alpha) / (2 N)), and adds L eps for noise
of size eps on the tokens with an unknown constant L. Here the effect of noise is measured instead.

T tokens, E experts
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class CoSelectionWidths:
    """The expert graph of one batch, with the precision of its rows."""

    graph: Tensor  # (E,E): a_jl; rows of dead experts are 0
    counts: Tensor  # (E,): n_j
    half_widths: Tensor  # (E,): of each entry of a row; infinite for a dead expert
    joint_half_width: float  # of a joint frequency C_jl / T, the paper's reading
    alpha: float


def co_selection_widths(chosen: Tensor, alpha: float = 0.05) -> CoSelectionWidths:
    """Return the row-normalised graph of the sets `chosen (T,E)` bool, each of k experts, and Hoeffding's widths."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; expected a probability between 0 and 1.")
    sizes = chosen.sum(1)
    if not len(chosen) or int(sizes.min()) != int(sizes.max()) or not int(sizes[0]):
        raise ValueError("the graph of a batch needs tokens that all select the same number of experts, at least one.")
    together = chosen.double().t() @ chosen.double()
    counts = together.diagonal().clone()
    k = int(sizes[0])
    graph = together / (k * counts).clamp_min(1).unsqueeze(1)
    half = (math.log(2 / alpha) / (2 * counts)).sqrt() / k
    return CoSelectionWidths(graph, counts, half, math.sqrt(math.log(2 / alpha) / (2 * len(chosen))), alpha)


@final
@dataclass(frozen=True)
class GraphUnderNoise:
    """How far the graph of a batch moves when its tokens are perturbed."""

    noise: Tensor  # (n,): length of the perturbation, relative to the token
    largest: Tensor  # (n,): the largest change of an entry of the graph
    mean: Tensor  # (n,): the mean change over the rows of experts in use
    beyond: Tensor  # (n,): the share of entries that change by more than their half-width
    clean: CoSelectionWidths


@torch.no_grad()
def graph_under_noise(
    chosen: Callable[[Tensor], Tensor], tokens: Tensor, noise: Sequence[float], *, alpha: float = 0.05, seed: int = 0
) -> GraphUnderNoise:
    """Return how far the graph of `tokens (T,d)` moves under perturbations in random directions.

    chosen  from tokens (T,d) to their sets (T,E) bool, for example `lambda x: router(x).chosen`
    """
    clean = co_selection_widths(chosen(tokens), alpha)
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens.shape, generator=source, dtype=torch.float64).to(tokens.device)
    direction = drawn / drawn.norm(dim=1, keepdim=True) * tokens.double().norm(dim=1, keepdim=True)
    used = clean.counts > 0
    changes = []
    for level in noise:
        moved = (tokens.double() + level * direction).to(tokens.dtype)
        change = (co_selection_widths(chosen(moved), alpha).graph - clean.graph).abs()[used]
        beyond = (change > clean.half_widths[used].unsqueeze(1)).double().mean()
        changes.append(torch.stack([change.max(), change.mean(), beyond]))
    largest, mean, share = torch.stack(changes).unbind(1)
    return GraphUnderNoise(torch.tensor(list(noise), dtype=torch.float64), largest, mean, share, clean)
