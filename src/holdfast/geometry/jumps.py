"""The output of a layer along the line through a token's nearest tie, for several routers on the same weights.

At the tie of two experts at the threshold a top-k layer jumps and a smooth one does not (figures 1 and 3 of "Geometric and
Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts"). The line is normal to the boundary:

    y(t) = layer(point + t normal),     t relative to the length of the token

T tokens, P points of a line, d width of a token

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
from typing import final

import torch
from torch import Tensor

from holdfast.geometry.flats import AffineKeys, affine_keys
from holdfast.geometry.ties import check_k
from holdfast.kernels.select import strip_fade
from holdfast.metrics.jump import FlipPoints, Jumps, jumps, nearest_flip
from holdfast.routing.declarations import Order

Layer = Callable[[Tensor], Tensor]  # from tokens (T,d) to outputs (T, ...)
STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)  # relative to the length of a token


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

    `metrics.nearest_flip` does the same from weights. This one also knows cosines, and the factors of AC.
    """
    return nearest_flips(affine_keys(order, tokens), tokens, k)


def nearest_flips(keys: AffineKeys, tokens: Tensor, k: int) -> FlipPoints:
    """Return the nearest boundary of every token that has these keys."""
    rows = tokens.detach().cpu().double().reshape(-1, keys.width)
    experts = keys.index.new_zeros(2, len(rows))
    found = FlipPoints(torch.zeros_like(rows), torch.zeros_like(rows), torch.zeros_like(rows[:, 0]), *experts)
    for chosen, order in keys.orders():
        part = nearest_flip(rows[chosen], order.matrix, k, order.bias)
        for whole, some in zip(vars(found).values(), vars(part).values(), strict=True):
            whole[chosen] = some
    return FlipPoints(*(each.to(tokens.device) for each in vars(found).values()))


@torch.no_grad()
def along_normals(
    layers: Mapping[str, Layer],
    order: Order,
    tokens: Tensor,
    k: int,
    *,
    reach: float = 0.1,
    points: int = 201,
    steps: Sequence[float] = STEPS,
) -> NormalLines:
    """Return the outputs of `layers` along the normal through the nearest tie of each of `tokens (T,d)`.

    layers  by name, for example the same MoE layer with two routers; `order` and `k` are those of the first
    reach   how far from the tie the lines go on both sides, relative to the length of the token
    steps   at which the difference of both sides is measured, decreasing
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
    measured = {name: jumps(layer, at, steps=steps, dtype=tokens.dtype) for name, layer in layers.items()}
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
    wide, narrow = (
        (weights(tie + step * direction) - weights(tie - step * direction)).norm(dim=1) for step in (STEP, STEP * SHORTER)
    )
    jump = narrow.where((narrow > wide / 2) & (narrow > STEP), 0.0)
    length = distance.clamp_min(STEP) if reach is None else torch.full_like(distance, reach)
    along = torch.linspace(-1, 1, LINE, dtype=torch.float64, device=logits.device).view(1, -1, 1) * length.view(-1, 1, 1)
    line = weights((tie.unsqueeze(1) + along * direction.unsqueeze(1)).flatten(0, 1)).view(len(logits), LINE, -1)
    slopes = line.diff(dim=1).norm(dim=2) / (2 * length / (LINE - 1)).unsqueeze(1)
    largest = slopes.amax(1).maximum(at_token).where(jump == 0, torch.inf)
    return GateSlopes(at_token.where((jump == 0) | (distance > STEP), torch.inf), largest, jump)
