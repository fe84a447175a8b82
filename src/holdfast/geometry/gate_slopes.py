"""How fast the weights of experts can change with the logits: local Lipschitz constants of gates.

    softmax     the largest eigenvalue of diag(p) - p p^T, at most 1/2
    sparsemax   1 where two or more experts are in the support, 0 with one
    top-k       finite inside a cell; infinite at a tie, where the weights jump by sqrt(2) times the weight of the expert
                that leaves
    smooth      finite everywhere: the jump of top-k is spread over a strip of width eps

T tokens, E experts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.geometry.ties import check_k
from holdfast.kernels.select import strip_fade

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
    jacobian = _jacobian(weights, logits)
    at_token = torch.linalg.matrix_norm(jacobian, ord=2)
    if k == logits.shape[1]:
        return GateSlopes(at_token, at_token, torch.zeros_like(at_token))
    ranked = logits.argsort(dim=1, descending=True, stable=True)
    gap = (logits.gather(1, ranked[:, k - 1 : k]) - logits.gather(1, ranked[:, k : k + 1])).squeeze(1)
    direction = (
        torch.zeros_like(logits).scatter(1, ranked[:, k - 1 : k], -(0.5**0.5)).scatter(1, ranked[:, k : k + 1], 0.5**0.5)
    )
    distance = gap * 0.5**0.5
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


def _jacobian(weights: GateWeights, logits: Tensor) -> Tensor:
    """Return (T,E,E) by central differences: `SmoothTopK` hides a part of its derivative from autograd."""
    columns = []
    for expert in range(logits.shape[1]):
        step = torch.zeros_like(logits)
        step[:, expert] = STEP
        columns.append((weights(logits + step) - weights(logits - step)) / (2 * STEP))
    return torch.stack(columns, dim=2)
