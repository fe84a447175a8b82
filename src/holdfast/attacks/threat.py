"""What an attacker may do: budgets and norms, checked. A missing budget is an error: without one a number means nothing.

Projection onto the ball of what an attacker may do. The result is inside it, not only up to rounding.

Random numbers that depend on a seed and a place and nothing else: not on batch, device or Python's hash seed.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.errors import unknown

Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = get_args(Norm)
Json = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None  # lists and dictionaries, in fact


def check_norm(norm: str) -> None:
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))


def check_rate(rate: float) -> None:
    if not _is_number(rate) or not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate!r}; state the share of words to attack, from 0 to 1.")


def check_budget(budget: float) -> None:
    if not _is_number(budget) or not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget!r}; state how far the attack may move an input, a number that is not negative.")


def check_count(count: int, name: str, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least {least}.")


def row_norms(rows: Tensor, norm: Norm) -> Tensor:
    """(R,) float64: the length of each of `rows (R, ...)`."""
    flat = rows.detach().flatten(1).double()
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def distances(moved: Tensor, centre: Tensor, norm: Norm) -> Tensor:
    """(R,) float64: how far each row was moved, without rounding the difference first."""
    return row_norms(moved.detach().double() - centre.detach().double(), norm)


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """The step of length 1 that climbs fastest, for each row (R, ...); 0 where there is no gradient."""
    gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    if norm == "linf":
        return gradient.sign()
    # Scaled first: a gradient of 1e-30 has a square of 0.
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return flat.view_as(gradient)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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


BITS = 63  # what torch.Generator.manual_seed takes without wrapping


def mixed(seed: int, *place: object) -> int:
    """One number from a seed and where it is used; the parts are strings or numbers, told apart by their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *place):
        encoded = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big") >> (64 - BITS)


def generators(seed: int, count: int, *place: object, first: int = 0) -> list[torch.Generator]:
    """One generator for each of `count` examples, the first of which is number `first` of its set; on the CPU, where
    every device gets its numbers from."""
    return [torch.Generator().manual_seed(mixed(seed, *place, first + number)) for number in range(count)]


def draw(make: Callable[[torch.Generator], Tensor], sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """`make(generator)` of each generator, stacked, with the device and dtype of `like`."""
    return torch.stack([make(source) for source in sources]).to(device=like.device, dtype=like.dtype)


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}; it must be a whole number.")
