"""Projection onto the ball of what an attacker may do. The result is inside it, not only up to rounding."""

import torch
from torch import Tensor

from holdfast.attacks.threat import Norm, distances

Bounds = tuple[float, float] | None
TRIES = 4  # rounding after a projection can leave the ball again; each try shrinks a little more


def project(moved: Tensor, centre: Tensor, radius: Tensor, norm: Norm, bounds: Bounds = None) -> Tensor:
    """The rows `moved (R, ...)` brought within `radius (R,)` of `centre`, and within `bounds`, where centre already is.

    Distances are measured in float64 on the numbers that are returned, so |result - centre| <= radius holds exactly,
    and a radius of 0 returns `centre` bit for bit.
    """
    moved = torch.where(moved.isfinite(), moved, centre)
    radius = radius.double().view(-1, *[1] * (centre.dim() - 1))
    if norm == "linf":
        return _clamp(moved.clamp(_edge(centre, radius, -1), _edge(centre, radius, 1)), bounds)
    return _shrunk(_clamp(moved, bounds), centre, radius)


def _edge(centre: Tensor, radius: Tensor, side: int) -> Tensor:
    """centre + side radius in the dtype of `centre`, a little nearer where rounding would go beyond."""
    exact, limits = centre.double() + side * radius, torch.finfo(centre.dtype)
    near = exact.to(centre.dtype)
    step = limits.eps * exact.abs() + limits.eps * limits.smallest_normal  # at least the distance to the next number
    nearer = (exact - side * step).to(centre.dtype)
    nearer = torch.maximum(nearer, centre) if side > 0 else torch.minimum(nearer, centre)
    return torch.where((near.double() - centre.double()).abs() > radius, nearer, near)


def _shrunk(moved: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Along the way to the centre until inside the l2 ball. Bounds hold at both ends, and so on the way."""
    far = distances(moved, centre, "l2").view_as(radius)
    for attempt in range(TRIES):
        outside = far > radius
        if not outside.any():
            return moved
        factor = radius / far.clamp_min(torch.finfo(torch.float64).tiny) * (1 - 2.0 ** (-24 + 6 * attempt))
        nearer = centre.double() + (moved.double() - centre.double()) * factor
        moved = torch.where(outside, nearer.to(centre.dtype), moved)
        far = distances(moved, centre, "l2").view_as(radius)
    return torch.where(far > radius, centre, moved)


def _clamp(inputs: Tensor, bounds: Bounds) -> Tensor:
    return inputs if bounds is None else inputs.clamp(*bounds)


def check_bounds(inputs: Tensor, bounds: Bounds) -> None:
    if not inputs.is_floating_point():
        raise ValueError(f"inputs are {inputs.dtype}; expected floating point, images as numbers from 0 to 1 (bytes / 255).")
    if not inputs.isfinite().all():
        raise ValueError("inputs hold NaN or infinite numbers; there is nothing to attack.")
    if bounds is None or inputs.numel() == 0:
        return
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds are {bounds}; expected (lowest, highest), or None for inputs without any.")
    if inputs.min() < low or inputs.max() > high:
        raise ValueError(
            f"inputs range from {float(inputs.min()):.4g} to {float(inputs.max()):.4g}; expected {low:g} to {high:g}: "
            "attack pixels and put the normalisation into the model, or say bounds=None for embeddings."
        )
