"""The output of a layer along the line through a token's nearest tie, for several routers on the same weights.

At the tie of two experts at the threshold a top-k layer jumps and a smooth one does not (figures 1 and 3 of "Geometric and
Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts"). The line is normal to the boundary:

    y(t) = layer(point + t normal),     t relative to the length of the token

T tokens, P points of a line, d width of a token
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.geometry.affine import affine_keys
from holdfast.geometry.ties import nearest_ties, tie_points
from holdfast.metrics.jump import FlipPoints, Jumps, jumps
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
    ties = nearest_ties(order, tokens, k, (1,))
    if not ties.distances.isfinite().all():
        raise ValueError("some token has no tie: all its experts are selected, or their weights are equal.")
    points = tie_points(order, tokens, ties.sets[:, 0])
    rows = tokens.detach().cpu().double().reshape(-1, tokens.shape[-1])
    moves = points - rows
    still = ties.distances[:, 0] <= 1e-9 * rows.norm(dim=1)  # such a token moves nowhere, which gives no normal
    if still.any():
        raise ValueError(f"{int(still.sum())} tokens lie on a boundary; leave them out.")
    first, second = ties.sets[:, 0].nonzero()[:, 1].view(-1, 2).unbind(1)
    ahead = _is_ahead(order, tokens, first, second)
    leaving, entering = first.where(ahead, second), second.where(ahead, first)
    normals = torch.nn.functional.normalize(moves, dim=1)
    found = (points, normals, ties.distances[:, 0], leaving, entering)
    return FlipPoints(*(each.to(tokens.device) for each in found))


def _is_ahead(order: Order, tokens: Tensor, first: Tensor, second: Tensor) -> Tensor:
    logits = affine_keys(order, tokens).logits
    one, other = (logits.gather(1, each.unsqueeze(1)).squeeze(1) for each in (first, second))
    return (one > other) | ((one == other) & (first < second))


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
