"""How precisely a batch estimates Symphony's expert graph, and how far noise on the tokens moves it.

Algorithm 1 of SymphonySMoE normalises the counts C = Z^T Z of a batch by rows. Each token of expert j is in k pairs, so

    a_jl = C_jl / (k n_j),     n_j = C_jj the tokens of expert j

is 1/k times the mean of n_j numbers that are 0 or 1, and Hoeffding's inequality gives, for independent tokens,

    P(|a_jl - its expectation| > sqrt(ln(2 / alpha) / (2 n_j)) / k) <= alpha

Theorem 1 of the paper takes a_jl as a joint frequency C_jl / N of all N tokens, sqrt(ln(2 / alpha) / (2 N)), and adds L eps
for noise of size eps on the tokens. The effect of noise is measured (`graph_under_noise`), and bounded by the constants of
the paper's appendix B.2, whose regions of two experts are polyhedra (`region_constants`, `region_regularity`):

    L = max over j, l of (mu(C_jl + ball of eps) - mu(C_jl)) / eps,  C_jl the region in which j and l are selected   (eqn 23)
    rho: every region contains a ball of rho times its diameter

Eqn 23 is this quotient for the volume mu, written by Steiner's formula (without a factor d in its first term, and without
the last term of the formula). Here mu is the distribution of the tokens, so that L eps bounds the change of C_jl / N itself:
a token leaves or enters a region only if a tie of two experts is within eps of it. For k > 2 the regions of two experts are
not convex, and the bound holds too.

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

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.geometry.flats import affine_keys
from holdfast.geometry.ties import pair_distances, ranks_of
from holdfast.routing.clustering import feature_scales
from holdfast.routing.declarations import Order


@final
@dataclass(frozen=True)
class CoSelectionWidths:
    """The expert graph of one batch, with the precision of its rows."""

    graph: Tensor  # (E,E): a_jl; rows of dead experts are 0
    joint: Tensor  # (E,E): C_jl / T, the paper's a_jl
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
    joint_half = math.sqrt(math.log(2 / alpha) / (2 * len(chosen)))
    return CoSelectionWidths(graph, together / len(chosen), counts, half, joint_half, alpha)


@final
@dataclass(frozen=True)
class GraphUnderNoise:
    """How far the graph of a batch moves when its tokens are perturbed."""

    noise: Tensor  # (n,): length of the perturbation, relative to the token
    largest: Tensor  # (n,): the largest change of an entry of the graph
    mean: Tensor  # (n,): the mean change over the rows of experts in use
    beyond: Tensor  # (n,): the share of entries that change by more than their half-width
    joint: Tensor  # (n,): the largest change of a joint frequency
    clean: CoSelectionWidths


@torch.no_grad()
def graph_under_noise(
    chosen: Callable[[Tensor], Tensor], tokens: Tensor, noise: Sequence[float], *, seed: int = 0
) -> GraphUnderNoise:
    """Return how far the graph of `tokens (T,d)` moves under perturbations in random directions.

    chosen  from tokens (T,d) to their sets (T,E) bool, for example `lambda x: router(x).chosen`
    """
    clean = co_selection_widths(chosen(tokens))
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens.shape, generator=source, dtype=torch.float64).to(tokens.device)
    direction = drawn / drawn.norm(dim=1, keepdim=True) * tokens.double().norm(dim=1, keepdim=True)
    used = clean.counts > 0
    changes = []
    for level in noise:
        moved = (tokens.double() + level * direction).to(tokens.dtype)
        noisy = co_selection_widths(chosen(moved))
        change = (noisy.graph - clean.graph).abs()[used]
        beyond = (change > clean.half_widths[used].unsqueeze(1)).double().mean()
        changes.append(torch.stack([change.max(), change.mean(), beyond, (noisy.joint - clean.joint).abs().max()]))
    largest, mean, share, joint = torch.stack(changes).unbind(1)
    return GraphUnderNoise(torch.tensor(list(noise), dtype=torch.float64), largest, mean, share, joint, clean)


@final
@dataclass(frozen=True)
class RegionConstants:
    """How far noise of any direction can change the joint frequencies of a batch's experts."""

    noise: Tensor  # (n,): largest length of the perturbations, relative to the token
    lower: Tensor  # (n,E,E): no perturbation makes C_jl / T smaller
    upper: Tensor  # (n,E,E): nor larger
    change: Tensor  # (n,): L eps, the largest change of an entry
    constant: Tensor  # (n,): L


@torch.no_grad()
def region_constants(order: Order, tokens: Tensor, k: int, noise: Sequence[float]) -> RegionConstants:
    """Return bounds of the joint frequencies of `tokens (..., d)` with top-k of the keys that `order` declares.

    A selected expert stays while no expert outside the set overtakes it. Another one enters only if it overtakes one of the
    set; beside j, which stays, one of the set without j. A pair leaves with the first of the two, and enters with the last.
    """
    keys = affine_keys(order, tokens, k)
    levels = torch.tensor(list(noise), dtype=torch.float64)
    if not len(keys.points) or not (levels > 0).all():
        raise ValueError("the constants of regions need tokens, and perturbations that are longer than 0.")
    products, lengths = keys.products(), tokens.detach().cpu().double().reshape(-1, keys.width).norm(dim=1)
    low, high = (torch.zeros(len(levels), keys.experts, keys.experts, dtype=torch.float64) for _ in range(2))
    counts = torch.zeros_like(low[0])
    for rows, part in keys.parts():
        chosen = ranks_of(part.logits) < k
        distances = pair_distances(products, part.index, part.logits)
        overtaken = distances.where(chosen.unsqueeze(2) & ~chosen.unsqueeze(1), torch.inf).amin(2)
        behind = distances.where(~chosen.unsqueeze(2) & chosen.unsqueeze(1), torch.inf)
        ahead = behind.topk(min(2, keys.experts), dim=2, largest=False)  # the two of the set that are overtaken first
        only = torch.nn.functional.one_hot(ahead.indices[..., 0], keys.experts).double()
        counts += chosen.double().t() @ chosen.double()
        for level, reach in enumerate(levels.view(-1, 1, 1) * lengths[rows].unsqueeze(1)):
            enters, instead = ahead.values[..., 0] <= reach, ahead.values[..., -1] > reach
            stay, may = (chosen & (overtaken > reach)).double(), (chosen | enters).double()
            low[level] += stay.t() @ stay
            replaces = torch.einsum("tl,tlj->lj", (enters & instead).double(), only)  # l can enter, but not beside j
            high[level] += may.t() @ may - replaces - replaces.t()
    change = torch.maximum(high - counts, counts - low).flatten(1).amax(1) / len(keys.points)
    return RegionConstants(levels, low / len(keys.points), high / len(keys.points), change, change / levels)


@torch.no_grad()
def region_regularity(order: Order, sets: Tensor) -> Tensor:
    """Return rho (N,) of the regions in which the experts `sets (N,k)` are selected, for a large ball of tokens.

    Without offsets (directions at infinity) a region is a cone. The largest ball inside it and a ball of radius R has the
    radius R s / (1 + s), with s the sine of the largest angle of a round cone inside it: the distance of 0 from the convex
    hull of the normals of its faces. Its diameter is 2 R if d >= E, and less otherwise, when rho is a lower bound. rho is 0
    for a region without interior.
    """
    require_extra("the regularity of regions", "scipy")
    from scipy.optimize import nnls

    keys = affine_keys(order, order.matrix.new_zeros(1, order.matrix.shape[1]))
    values, vectors = torch.linalg.eigh(keys.products()[0])
    rows = vectors * values.clamp_min(0).sqrt()  # (E,E): the same products as the weights
    found = []
    for members in sets.long():
        outside = torch.ones(keys.experts, dtype=torch.bool).scatter(0, members, False)
        normals = (rows[members].unsqueeze(1) - rows[outside]).flatten(0, 1)
        normals = normals[normals.norm(dim=1) > 1e-7 * rows.norm(dim=1).max()]  # experts with equal weights have no face
        if not len(normals):
            found.append(0.5)  # the whole ball
            continue
        units = normals / normals.norm(dim=1, keepdim=True)
        # min |units^T c|^2 + (1 - sum c)^2 over c >= 0 is reached at a multiple of the shortest convex combination.
        system = torch.cat([units.t(), torch.ones(1, len(units), dtype=units.dtype)])
        weights = torch.from_numpy(nnls(system.numpy(), np.eye(len(system))[-1])[0])
        sine = float((weights @ units).norm() / weights.sum())
        found.append(sine / (2 + 2 * sine))
    return torch.tensor(found, dtype=torch.float64)


FEWEST = 8  # tokens of a cluster that is measured
PERPLEXITY = 30.0  # of t-SNE
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
        got = f"tokens have shape {tuple(tokens.shape)} and clusters {tuple(clusters.shape)}"
        raise ValueError(f"{got}; expected (T, d) and (T,).")
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
        clusters_of = zip(groups, noisy, means, means[nearest], factors, strict=True)
        rows = [_separation(*cluster, noise) for cluster in clusters_of]
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


def tsne_coordinates(tokens: Tensor, *, most: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return t-SNE coordinates (n,2) of at most `most` random tokens of `(T,d)`, and their indices (n,), in order."""
    require_extra("t-SNE of router inputs", "sklearn")
    from sklearn.manifold import TSNE

    rows = tokens.detach().cpu().float().reshape(-1, tokens.shape[-1])
    kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    if len(kept) < 4:
        raise ValueError(f"t-SNE needs at least 4 tokens, and there are {len(kept)}.")
    model = TSNE(2, perplexity=min(PERPLEXITY, (len(kept) - 1) / 3), init="pca", random_state=seed)
    return torch.from_numpy(model.fit_transform(rows[kept].numpy())), kept


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


def similarity_weights(tokens: Tensor, *, tau: float | None = None, certainty: Tensor | None = None) -> Tensor:
    """Return W (N,N) = softmax_j(u_i . u_j / tau) over the tokens that may inform token i, of a sequence `tokens (N,d)`.

    Only earlier tokens and the token itself inform it.

    tau         None: the root of the width
    certainty   (N,): entropies of the gates; only tokens whose entropy is not larger inform (J_i of the paper)
    """
    rows = tokens.double()
    scores = rows @ rows.t() / (math.sqrt(rows.shape[1]) if tau is None else tau)
    allowed = torch.ones_like(scores, dtype=torch.bool).tril()
    if certainty is not None:
        allowed &= certainty.unsqueeze(0) <= certainty.unsqueeze(1)
    return torch.softmax(scores.where(allowed, -torch.inf), dim=-1)
