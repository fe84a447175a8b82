"""The theory of ACMoE beside measurement: separation of clusters, mis-assignment and condition numbers, before and after M.

Cluster a has the mean mu_a, the covariance Sigma_a and the factors m_a, the inverse spreads of its features with mean 1.
delta is the difference of two means, M = diag(m_a), and M = 1 is the plain space.

    separation          delta^T M delta                                                                      (lemma 1)
    mis-assignment      1 - Phi(delta^T M delta / (2 sqrt(delta^T M (Sigma_a + Sigma_noise) M delta)))        (lemma 2)
    condition number    that of M Sigma_a M                                                         (proposition 2)

Lemma 1 needs means that differ most where clusters are tight; proposition 2 exchanges M and the eigenvectors of Sigma, which
is right only if they are the axes. So both are measured, not assumed.

T tokens, d width, C clusters
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.errors import require_extra
from holdfast.routing.clustering import feature_scales

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
