"""How precisely a batch estimates Symphony's expert graph, and how far noise on the tokens moves it.

Algorithm 1 of SymphonySMoE normalises the counts C = Z^T Z of a batch by rows. Each token of expert j is in k pairs, so

    a_jl = C_jl / (k n_j),     n_j = C_jj the tokens of expert j

is 1/k times the mean of n_j numbers that are 0 or 1, and Hoeffding's inequality gives, for independent tokens,

    P(|a_jl - its expectation| > sqrt(ln(2 / alpha) / (2 n_j)) / k) <= alpha

Theorem 1 of the paper takes a_jl as a joint frequency of all N tokens, sqrt(ln(2 / alpha) / (2 N)), and adds L eps for noise
of size eps on the tokens with an unknown constant L. Here the effect of noise is measured instead.

T tokens, E experts

The theory of ACMoE beside measurement: separation of clusters, mis-assignment and condition numbers, before and after M.

Cluster a has the mean mu_a, the covariance Sigma_a and the factors m_a, the inverse spreads of its features with mean 1.
delta is the difference of two means, M = diag(m_a), and M = 1 is the plain space.

    separation          delta^T M delta                                                                      (lemma 1)
    mis-assignment      1 - Phi(delta^T M delta / (2 sqrt(delta^T M (Sigma_a + Sigma_noise) M delta)))        (lemma 2)
    condition number    that of M Sigma_a M                                                         (proposition 2)

Lemma 1 needs means that differ most where clusters are tight; proposition 2 exchanges M and the eigenvectors of Sigma, which
is right only if they are the axes. So both are measured, not assumed.

T tokens, d width, C clusters

Proposition 1 of Mutual-Inform: a bound of the entropy of informed gates, beside the entropy itself.

A token that shares gates has p_i = sum_j W_ij e_j, with weights W_i over the tokens of its sequence, e_j their gates. Then

    H(p_i) <= sum_j W_ij H(e_j) + H(W_i)                                       (eqn 18), and H(p_i) >= sum_j W_ij H(e_j)

If only tokens inform that are not less certain, the first term is at most H(e_i); as tau -> 0 the second one goes to 0.

N tokens of a sequence, E experts; entropies in nats
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.routing.clustering import feature_scales


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


FEWEST = 8  # tokens of a cluster that is measured
RIDGE = 1e-6  # of the mean variance, added to all: covariances of few tokens are singular


@final
@dataclass(frozen=True)
class Separation:
    """The numbers of one space, for each measured cluster and the cluster whose mean is nearest to its own."""

    distance: Tensor  # (C,): delta^T M delta
    predicted: Tensor  # (C,): the mis-assignment that lemma 2 predicts for Gaussian clusters
    measured: Tensor  # (C,): the share of the cluster's tokens, with noise, that are nearer to the other mean
    condition: Tensor  # (C,): the condition number of M Sigma M


@final
@dataclass(frozen=True)
class ClusterSeparation:
    """The clusters of some tokens in the plain space and in that of AC."""

    clusters: Tensor  # (C,): numbers of the measured clusters
    nearest: Tensor  # (C,): the cluster with the nearest other mean, in the plain space
    plain: Separation
    scaled: Separation


@torch.no_grad()
def cluster_separation(tokens: Tensor, clusters: Tensor, *, noise: float = 0.0, seed: int = 0) -> ClusterSeparation:
    """Measure the clusters `clusters (T,)`, for AC the first expert at the previous layer, of the tokens `(T,d)`.

    noise   standard deviation, in every feature, of the noise that is added to tokens before they are assigned
    """
    tokens, clusters = tokens.detach().cpu().double(), clusters.cpu().reshape(-1)
    if tokens.dim() != 2 or len(clusters) != len(tokens):
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and clusters {tuple(clusters.shape)}; expected (T, d), (T,)."
        )
    numbers, counts = clusters.unique(return_counts=True)
    numbers = numbers[counts >= FEWEST]
    if len(numbers) < 2:
        raise ValueError(f"separation needs at least two clusters of {FEWEST} tokens each.")
    drawn = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    groups = [tokens[clusters == number] for number in numbers]
    noisy = [(tokens + noise * drawn)[clusters == number] for number in numbers]
    means = torch.stack([group.mean(0) for group in groups])
    spreads = torch.stack([(group - group.mean(0)).abs().mean(0) for group in groups])
    apart = torch.cdist(means, means)
    nearest = apart.fill_diagonal_(torch.inf).argmin(1)
    found = []
    for factors in (torch.ones_like(spreads), feature_scales(spreads)):
        rows = [
            _separation(groups[number], noisy[number], means[number], means[other], factors[number], noise)
            for number, other in enumerate(nearest.tolist())
        ]
        found.append(Separation(*torch.stack(rows).unbind(1)))
    return ClusterSeparation(numbers, numbers[nearest], *found)


def _separation(group: Tensor, noisy: Tensor, own: Tensor, other: Tensor, factors: Tensor, noise: float) -> Tensor:
    delta = other - own
    covariance = torch.cov(group.t()) + RIDGE * group.var(0).mean() * torch.eye(len(own), dtype=own.dtype)
    distance = (delta.square() * factors).sum()
    weighted = delta * factors
    variance = weighted @ covariance @ weighted + noise**2 * weighted.square().sum()
    predicted = 1 - torch.special.ndtr(distance / (2 * variance.sqrt()))
    nearer = ((noisy - other).square() * factors).sum(1) < ((noisy - own).square() * factors).sum(1)
    values = torch.linalg.eigvalsh(factors.unsqueeze(1) * covariance * factors)
    return torch.stack([distance, predicted, nearer.double().mean(), values[-1] / values[0]])


def tsne_coordinates(tokens: Tensor, *, most: int = 2000, perplexity: float = 30.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return t-SNE coordinates (n,2) of at most `most` random tokens of `(T,d)`, and their indices (n,), in order."""
    require_extra("t-SNE of router inputs", "sklearn")
    from sklearn.manifold import TSNE

    rows = tokens.detach().cpu().float().reshape(-1, tokens.shape[-1])
    kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    if len(kept) < 4:
        raise ValueError(f"t-SNE needs at least 4 tokens, and there are {len(kept)}.")
    near = min(perplexity, (len(kept) - 1) / 3)
    drawn = TSNE(2, perplexity=near, init="pca", random_state=seed).fit_transform(rows[kept].numpy())
    return torch.from_numpy(drawn), kept


@final
@dataclass(frozen=True)
class MixedEntropies:
    """Entropies of the gates of the tokens of a sequence, each (N,)."""

    own: Tensor  # H(e_i), before tokens inform each other
    informed: Tensor  # H(p_i)
    bound: Tensor  # sum_j W_ij H(e_j) + H(W_i)
    mixing: Tensor  # H(W_i), the part of the bound that the temperature controls


def entropy(shares: Tensor) -> Tensor:
    """Return -sum p log p over the last dimension."""
    return torch.special.entr(shares).sum(-1)


def mixed_entropies(gates: Tensor, weights: Tensor) -> MixedEntropies:
    """Return the entropies for `gates (N,E)` with rows that sum to 1, and `weights (N,N)` with rows that sum to 1."""
    gates, weights = gates.double(), weights.double()
    for name, rows in (("gates", gates), ("weights", weights)):
        if not (rows >= 0).all() or not torch.allclose(rows.sum(-1), torch.ones_like(rows[:, 0]), atol=1e-4):
            raise ValueError(f"rows of the {name} must not be negative and must sum to 1.")
    own, mixing = entropy(gates), entropy(weights)
    return MixedEntropies(own, entropy(weights @ gates), weights @ own + mixing, mixing)


def similarity_weights(
    tokens: Tensor, *, tau: float | None = None, causal: bool = True, certainty: Tensor | None = None
) -> Tensor:
    """Return W (N,N) = softmax_j(u_i . u_j / tau) over the tokens that may inform token i, of a sequence `tokens (N,d)`.

    tau         None: the root of the width
    causal      only earlier tokens and the token itself inform it
    certainty   (N,): entropies of the gates; only tokens whose entropy is not larger inform (J_i of the paper)
    """
    rows = tokens.double()
    scores = rows @ rows.t() / (math.sqrt(rows.shape[1]) if tau is None else tau)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if certainty is not None:
        allowed &= certainty.unsqueeze(0) <= certainty.unsqueeze(1)
    return torch.softmax(scores.where(allowed, -torch.inf), dim=-1)
