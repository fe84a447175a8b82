"""The jump of a layer's output where a token flips: positive for top-k, 0 for smooth top-k.

Section 7.1 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".

T tokens, width d, E experts, k of them selected; logits = x W^T + b
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.routing import Routing

STEPS = (1e-2, 1e-3, 1e-4)  # relative to the token's norm: float32 logits cannot separate points that are much closer
LINEAR = 1e-3  # how far from linear a score may be, relative to its largest logit


@dataclass(frozen=True)
class FlipPoints:
    """For each token, its orthogonal projection onto the nearest decision boundary, where it flips."""

    points: Tensor  # (T,d) on the boundary, a plane
    normals: Tensor  # (T,d) of length 1, pointing out of the token's side
    distances: Tensor  # (T,) from the token to its point: within this radius the selected set is certain
    leaving: Tensor  # (T,) the expert that the token loses there
    entering: Tensor  # (T,) the expert that replaces it


@dataclass(frozen=True)
class Jumps:
    """|y(point + t normal) - y(point - t normal)| as t goes to 0."""

    steps: tuple[float, ...]  # t, relative to the norm of the token; decreasing
    differences: Tensor  # (steps, T)
    limit: Tensor  # (T,) at t = 0, by linear extrapolation of the last two differences of outputs


def nearest_flip(tokens: Tensor, weight: Tensor, k: int, bias: Tensor | None = None) -> FlipPoints:
    """Return the nearest boundary: min over i in S, j not in S of (logit_i - logit_j) / |w_i - w_j|, S the k best.

    `tokens (T,d)`, `weight (E,d)`, `bias (E,)`; computed in float64, in O(T k E) memory and time. At the nearest boundary
    all other pairs keep their order, so the token flips there.
    """
    if not 1 <= k < weight.shape[0]:
        raise ValueError(f"k is {k} of {weight.shape[0]} experts; a token can flip only for k from 1 to E - 1.")
    tokens, weight = tokens.detach().double(), weight.detach().double()
    logits = tokens @ weight.t() + (0 if bias is None else bias.detach().double())
    chosen = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]  # (T,k)
    spans = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    distances = (logits.gather(1, chosen).unsqueeze(2) - logits.unsqueeze(1)) / spans[chosen]  # (T,k,E)
    distances = distances.where(spans[chosen] > 0, torch.inf)  # experts with equal weights have no boundary between them
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True).unsqueeze(1)
    distances, pairs = distances.where(~inside, torch.inf).flatten(1).min(1)
    if not distances.isfinite().all():
        raise ValueError("the experts of some token all have equal weights, so that no boundary is between them.")
    leaving = chosen.gather(1, (pairs // weight.shape[0]).unsqueeze(1)).squeeze(1)
    entering = pairs % weight.shape[0]
    normals = torch.nn.functional.normalize(weight[entering] - weight[leaving], dim=-1)
    return FlipPoints(tokens + distances.unsqueeze(1) * normals, normals, distances, leaving, entering)


@torch.no_grad()
def jumps(
    layer: Callable[[Tensor], Tensor],
    switch: FlipPoints,
    *,
    steps: Sequence[float] = STEPS,
    dtype: torch.dtype = torch.float32,
) -> Jumps:
    """Measure the jump at each point along its normal; `layer` maps tokens (T,d) to outputs (T, ...).

    A continuous layer that changes within less than the last step, such as a very narrow strip, looks like one that jumps.
    """
    steps = tuple(steps)
    if len(steps) < 2 or any(later >= earlier for earlier, later in pairwise(steps)) or steps[-1] <= 0:
        raise ValueError(f"steps are {steps}; expected at least two, positive and decreasing.")
    length = (switch.points - switch.distances.unsqueeze(1) * switch.normals).norm(dim=-1, keepdim=True)
    outputs = []
    for step in steps:
        sides = [layer((switch.points + side * step * length * switch.normals).to(dtype)) for side in (1, -1)]
        outputs.append((sides[0].double() - sides[1].double()).flatten(1))
    coarse, fine = steps[-2:]
    limit = outputs[-1] + (outputs[-1] - outputs[-2]) * fine / (coarse - fine)
    return Jumps(steps, torch.stack([output.norm(dim=-1) for output in outputs]), limit.norm(dim=-1))


@torch.no_grad()
def jump(
    router: Callable[[Tensor], Routing],
    layer: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    k: int | None = None,
    steps: Sequence[float] = STEPS,
) -> tuple[FlipPoints, Jumps]:
    """Return the nearest flip of each of `tokens (T,d)`, and the jump of `layer` there.

    `router` must score each token linearly and select the largest logits; its weights are computed from its logits. `k` is
    optional if every token has the same number of experts; smooth top-k needs it.
    """
    if tokens.dim() != 2 or not len(tokens):
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected (T, d) with at least one token.")
    routing = router(tokens)
    weight, bias = linear_score(router, tokens)
    if k is None:
        used = routing.used.sum(-1)
        if used.min() != used.max():
            raise ValueError(
                f"tokens use {int(used.min())} to {int(used.max())} experts; pass k=..., how many are before the boundary."
            )
        k = int(used[0])
    if not routing.chosen.gather(1, top(routing.logits, k)).all():
        raise ValueError(
            f"the router does not select its {k} largest logits; its decision boundaries are not planes between logits."
        )
    switch = nearest_flip(tokens, weight, k, bias)
    return switch, jumps(layer, switch, steps=steps, dtype=tokens.dtype)


def linear_score(router: Callable[[Tensor], Routing], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (E,d) and b (E,) of a linear router in float64, from its logits at 0 and at the unit vectors."""
    probes = torch.cat([torch.zeros_like(tokens[:1]), torch.eye(tokens.shape[1], dtype=tokens.dtype, device=tokens.device)])
    logits = router(probes).logits.double()
    bias, weight = logits[0], (logits[1:] - logits[0]).t()
    actual = router(tokens).logits.double()
    error = (tokens.double() @ weight.t() + bias - actual).abs().max() / actual.abs().max().clamp_min(1e-6)
    if not error <= LINEAR:
        raise ValueError(
            f"the router's scores are not linear in its tokens (off by {float(error):.0%} of the largest logit): its "
            "weights cannot be computed from its logits. If you know them, pass them to `nearest_flip`."
        )
    return weight, bias
