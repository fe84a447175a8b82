"""The jump of a layer's output where a token flips, and its output along the line through the token's nearest tie.

At the tie of two experts at the threshold a top-k layer jumps and a smooth one does not (section 7.1, figures 1 and 3 of
"Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts"). The line is normal to the boundary:

    y(t) = layer(point + t normal),     t relative to the length of the token

T tokens, P points of a line, d width of a token, E experts, k of them selected

How fast the weights of experts can change with the logits: local Lipschitz constants of gates.

    softmax     the largest eigenvalue of diag(p) - p p^T, at most 1/2
    sparsemax   1 where two or more experts are in the support, 0 with one
    top-k       finite inside a cell; infinite at a tie, where the weights jump by sqrt(2) times the weight of the expert
                that leaves
    smooth      finite everywhere: the jump of top-k is spread over a strip of width eps

T tokens, E experts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from holdfast.geometry.flats import AffineKeys, affine_keys
from holdfast.kernels.select import strip_fade
from holdfast.routing.declarations import Order
from holdfast.routing.selection import check_k

Layer = Callable[[Tensor], Tensor]  # from tokens (T,d) to outputs (T, ...)
JUMP_STEPS = (1e-2, 1e-3, 1e-4)  # relative to the token's norm: float32 logits cannot separate points that are much closer
STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)  # of the differences beside a line


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


@final
@dataclass(frozen=True)
class NormalLines:
    """The outputs of some layers on the lines through the nearest ties of some tokens."""

    at: FlipPoints  # the ties: points, normals, distances, and the two experts
    offsets: Tensor  # (P,): t, relative to the length of the token; 0 is the tie, negative is the token's side
    outputs: Mapping[str, Tensor]  # by layer: (T,P,width of the output)
    jumps: Mapping[str, Jumps]  # by layer: the difference of the outputs on both sides of the tie, by step


@torch.no_grad()
def nearest_boundaries(order: Order, tokens: Tensor, k: int) -> FlipPoints:
    """Return the nearest ties of `tokens (..., d)` of order 1, with the normals of their boundaries.

        min over i in S, j not in S of (l_i - l_j) / |w_i - w_j|,  S the k best

    computed in float64, in O(T k E) memory and time. There all other pairs keep their order, so the token flips.
    """
    return nearest_flips(affine_keys(order, tokens), tokens, k)


def nearest_flips(keys: AffineKeys, tokens: Tensor, k: int) -> FlipPoints:
    """Return the nearest boundary of every token that has these keys."""
    experts, index, logits = keys.experts, keys.index.unsqueeze(1), keys.logits
    if not 1 <= k < experts:
        raise ValueError(f"k is {k} of {experts} experts; a token can flip only for k from 1 to E - 1.")
    weights = [keys.order_of(number).matrix for number in range(len(keys.factors))]
    spans = torch.stack([torch.cdist(each, each, compute_mode="donot_use_mm_for_euclid_dist") for each in weights])
    chosen = logits.argsort(dim=1, descending=True, stable=True)[:, :k]
    lengths = spans[index, chosen]  # (T,k,E)
    distances = (logits.gather(1, chosen).unsqueeze(2) - logits.unsqueeze(1)) / lengths
    distances = distances.where(lengths > 0, torch.inf)  # experts with equal weights have no boundary between them
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True).unsqueeze(1)
    distances, pairs = distances.where(~inside, torch.inf).flatten(1).min(1)
    if not distances.isfinite().all():
        raise ValueError("the experts of some token all have equal weights, so that no boundary is between them.")
    leaving, entering = chosen.gather(1, (pairs // experts).unsqueeze(1)).squeeze(1), pairs % experts
    apart = (keys.weight[entering] - keys.weight[leaving]) * keys.factors[keys.index]
    normals = torch.nn.functional.normalize(apart.unflatten(1, (-1, keys.width)).sum(1), dim=-1)
    points = tokens.detach().cpu().double().reshape(-1, keys.width) + distances.unsqueeze(1) * normals
    return FlipPoints(*(each.to(tokens.device) for each in (points, normals, distances, leaving, entering)))


@torch.no_grad()
def jumps(
    layer: Layer, flips: FlipPoints, *, steps: Sequence[float] = JUMP_STEPS, dtype: torch.dtype = torch.float32
) -> Jumps:
    """Measure the jump of `layer` at each point along its normal.

    A continuous layer that changes within less than the last step, such as a very narrow strip, looks like one that jumps.
    """
    steps = tuple(steps)
    if len(steps) < 2 or any(later >= earlier for earlier, later in pairwise(steps)) or steps[-1] <= 0:
        raise ValueError(f"steps are {steps}; expected at least two, positive and decreasing.")
    length = (flips.points - flips.distances.unsqueeze(1) * flips.normals).norm(dim=-1, keepdim=True)
    outputs = []
    for step in steps:
        sides = [layer((flips.points + side * step * length * flips.normals).to(dtype)) for side in (1, -1)]
        outputs.append((sides[0].double() - sides[1].double()).flatten(1))
    coarse, fine = steps[-2:]
    limit = outputs[-1] + (outputs[-1] - outputs[-2]) * fine / (coarse - fine)
    return Jumps(steps, torch.stack([output.norm(dim=-1) for output in outputs]), limit.norm(dim=-1))


@torch.no_grad()
def along_normals(
    layers: Mapping[str, Layer], order: Order, tokens: Tensor, k: int, *, reach: float = 0.1, points: int = 201
) -> NormalLines:
    """Return the outputs of `layers` along the normal through the nearest tie of each of `tokens (T,d)`.

    layers  by name, for example the same MoE layer with two routers; `order` and `k` are those of the first
    reach   how far from the tie the lines go on both sides, relative to the length of the token
    """
    if not reach > 0 or points < 3:
        raise ValueError(f"reach is {reach} and points {points}; expected a positive length and at least 3 points.")
    at = nearest_boundaries(order, tokens, k)
    lengths = tokens.detach().double().norm(dim=1).view(-1, 1, 1)
    offsets = torch.linspace(-reach, reach, points, dtype=torch.float64, device=tokens.device)
    if points % 2:  # the tie itself belongs to no side: stay just before it
        offsets[points // 2] = -1e-3 * reach / points
    lines = at.points.unsqueeze(1) + offsets.view(1, -1, 1) * lengths * at.normals.unsqueeze(1)
    flat = lines.flatten(0, 1).to(tokens.dtype)
    outputs = {name: layer(flat).flatten(1).view(len(tokens), points, -1) for name, layer in layers.items()}
    measured = {name: jumps(layer, at, steps=STEPS, dtype=tokens.dtype) for name, layer in layers.items()}
    return NormalLines(at, offsets, outputs, measured)


GateWeights = Callable[[Tensor], Tensor]  # from logits (T,E) to the weights of all experts (T,E), 0 if not selected
STEP = 1e-6  # of a difference quotient in float64
SHORTER = 1e-2  # of STEP: a change across a tie that is as large over this shorter step is a jump
LINE = 401  # points of the line through a tie


@final
@dataclass(frozen=True)
class GateSlopes:
    """How fast the weights change with the logits, in l2."""

    at_token: Tensor  # (T,): the norm of the Jacobian at the logits; infinite on a tie of top-k
    largest: Tensor  # (T,): the largest slope on the line through the nearest tie; infinite if the weights jump there
    jump: Tensor  # (T,): the change of the weights at the tie; 0 for a continuous gate


def softmax_weights(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


def top_k_weights(logits: Tensor, k: int) -> Tensor:
    """Return the softmax over the k largest logits, 0 elsewhere; ties to the lower index."""
    best = logits.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best))
    return torch.softmax(kept, dim=-1)


def smooth_weights(logits: Tensor, k: int, eps: float) -> Tensor:
    """Return the weights of smooth top-k with a strip of width eps, as `SmoothTopK` computes them."""
    level = logits.topk(k, dim=-1).values[..., -1:]
    fade, in_strip = strip_fade(level - logits, torch.as_tensor(eps, dtype=logits.dtype))
    return torch.softmax((logits + fade).where(in_strip, -torch.inf), dim=-1)


@torch.no_grad()
def gate_slopes(weights: GateWeights, logits: Tensor, k: int, *, reach: float | None = None) -> GateSlopes:
    """Return the local Lipschitz constants of a gate at `logits (T,E)`, and on the line through the nearest tie.

    weights     any gate: from logits to the weights of all experts
    reach       how far the line goes on both sides of the tie; None: the distance of the token to it
    """
    check_k(k, logits.shape[1])
    logits = logits.detach().double()
    # By central differences: `SmoothTopK` hides a part of its derivative from autograd.
    moves = STEP * torch.eye(logits.shape[1], dtype=torch.float64, device=logits.device)
    columns = [(weights(logits + move) - weights(logits - move)) / (2 * STEP) for move in moves]
    at_token = torch.linalg.matrix_norm(torch.stack(columns, dim=2), ord=2)
    if k == logits.shape[1]:
        return GateSlopes(at_token, at_token, torch.zeros_like(at_token))
    last, following = logits.argsort(dim=1, descending=True, stable=True)[:, k - 1 : k + 1].split(1, dim=1)
    direction = torch.zeros_like(logits).scatter(1, last, -(0.5**0.5)).scatter(1, following, 0.5**0.5)
    distance = (logits.gather(1, last) - logits.gather(1, following)).squeeze(1) * 0.5**0.5
    tie = logits + distance.unsqueeze(1) * direction
    ways = STEP * direction, STEP * SHORTER * direction
    wide, narrow = ((weights(tie + way) - weights(tie - way)).norm(dim=1) for way in ways)
    jump = narrow.where((narrow > wide / 2) & (narrow > STEP), 0.0)
    length = distance.clamp_min(STEP) if reach is None else torch.full_like(distance, reach)
    along = torch.linspace(-1, 1, LINE, dtype=torch.float64, device=logits.device).view(1, -1, 1) * length.view(-1, 1, 1)
    line = weights((tie.unsqueeze(1) + along * direction.unsqueeze(1)).flatten(0, 1)).view(len(logits), LINE, -1)
    slopes = line.diff(dim=1).norm(dim=2) / (2 * length / (LINE - 1)).unsqueeze(1)
    largest = slopes.amax(1).maximum(at_token).where(jump == 0, torch.inf)
    return GateSlopes(at_token.where((jump == 0) | (distance > STEP), torch.inf), largest, jump)
