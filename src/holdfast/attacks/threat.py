"""The threat model: checked budgets and norms, projection onto the allowed ball, and reproducible random numbers.

A budget is required everywhere, because a robustness number without its budget has no meaning. A projected input is inside
the ball exactly, not only up to rounding. Random numbers depend on a seed and on what they are used for, and on nothing
else: not on the batch, the device or Python's hash seed.

R rows, each one attacked input (an image, a token)
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from holdfast.routing.bounds import Norm

Json = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None  # lists and dictionaries, in fact


def check_rate(rate: float) -> None:
    """Raise ValueError unless `rate` is a number from 0 to 1."""
    if not _is_number(rate) or not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate!r}; give the share of words to attack, from 0 to 1.")


def check_budget(budget: float) -> None:
    """Raise ValueError unless `budget` is a finite number that is not negative."""
    if not _is_number(budget) or not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget!r}; give the largest perturbation of an input, a number that is not negative.")


def check_count(count: int, name: str, least: int = 1) -> None:
    """Raise ValueError unless `count` is a whole number of at least `least`; the error calls it `name`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least {least}.")


def budgets_of(tokens: Tensor, budget: float | Tensor, relative_to: Norm | None = None) -> Tensor:
    """Return (...) float64: the largest allowed perturbation of each of `tokens (..., d)`, from one budget or one for each.

    relative_to     a norm: budgets are multiples of each token's own
    """
    lead = tokens.shape[:-1]
    if isinstance(budget, Tensor):
        if budget.shape != lead or not (budget >= 0).all() or not budget.isfinite().all():
            got, expected = tuple(budget.shape), tuple(lead)
            raise ValueError(f"budget is a tensor of shape {got}; expected finite numbers >= 0 of shape {expected}.")
        radius = budget.to(device=tokens.device, dtype=torch.float64)
    else:
        check_budget(budget)
        radius = torch.full(lead, budget, dtype=torch.float64, device=tokens.device)
    if relative_to is None:
        return radius
    return radius * row_norms(tokens.reshape(-1, tokens.shape[-1]), relative_to).view(lead)


def row_norms(rows: Tensor, norm: Norm) -> Tensor:
    """Return (R,) float64: the norm of each of `rows (R, ...)`."""
    flat = rows.detach().flatten(1).double()
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def distances(perturbed: Tensor, centre: Tensor, norm: Norm) -> Tensor:
    """Return (R,) float64: the size of each row's perturbation, without rounding the difference first."""
    return row_norms(perturbed.detach().double() - centre.detach().double(), norm)


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """Return for each row of `gradient (R, ...)` the step of length 1 that raises the loss most; 0 for a zero gradient."""
    gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    if norm == "linf":
        return gradient.sign()
    # Scaled first: a gradient of 1e-30 has a square of 0.
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return flat.view_as(gradient)


def gradient(value: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of `value` with respect to `inputs`; 0 if `value` does not depend on them."""
    if not value.requires_grad:
        return torch.zeros_like(inputs)
    (slope,) = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(inputs) if slope is None else slope


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Bounds = tuple[float, float] | None
SHRINK_ATTEMPTS = 4  # rounding after a projection can leave the ball again; each attempt shrinks a little more


def project(perturbed: Tensor, centre: Tensor, radius: Tensor, norm: Norm, bounds: Bounds = None) -> Tensor:
    """Return `perturbed (R, ...)`, projected to within `radius (R,)` of `centre` and to within `bounds`.

    `centre` must be within `bounds`. Distances are measured in float64 on the returned numbers, so that
    |result - centre| <= radius is exactly true, and a radius of 0 returns `centre` bit for bit. The host reads no value, so
    that a training step can be captured in a CUDA graph.
    """
    perturbed = torch.where(perturbed.isfinite(), perturbed, centre)
    radius = radius.double().view(-1, *[1] * (centre.dim() - 1))
    if norm == "linf":
        return clamp(perturbed.clamp(_edge(centre, radius, -1), _edge(centre, radius, 1)), bounds)
    # Shrink the perturbation until it is inside the l2 ball. Both ends are within the bounds, so all points between are.
    perturbed = clamp(perturbed, bounds)
    for attempt in range(SHRINK_ATTEMPTS):
        far = distances(perturbed, centre, "l2").view_as(radius)
        outside = far > radius
        factor = radius / far.clamp_min(torch.finfo(torch.float64).tiny) * (1 - 2.0 ** (-24 + 6 * attempt))
        nearer = centre.double() + (perturbed.double() - centre.double()) * factor
        perturbed = torch.where(outside, nearer.to(centre.dtype), perturbed)
    return torch.where(distances(perturbed, centre, "l2").view_as(radius) > radius, centre, perturbed)


def _edge(centre: Tensor, radius: Tensor, side: int) -> Tensor:
    """Return `centre + side * radius` in the dtype of `centre`, moved inwards where rounding would leave the ball."""
    exact, limits = centre.double() + side * radius, torch.finfo(centre.dtype)
    near = exact.to(centre.dtype)
    step = limits.eps * exact.abs() + limits.eps * limits.smallest_normal  # at least the distance to the next number
    nearer = (exact - side * step).to(centre.dtype)
    nearer = torch.maximum(nearer, centre) if side > 0 else torch.minimum(nearer, centre)
    return torch.where((near.double() - centre.double()).abs() > radius, nearer, near)


def clamp(inputs: Tensor, bounds: Bounds) -> Tensor:
    return inputs if bounds is None else inputs.clamp(*bounds)


def check_bounds(inputs: Tensor, bounds: Bounds) -> None:
    """Raise ValueError unless inputs are finite floating-point numbers within `bounds`."""
    if not inputs.is_floating_point():
        raise ValueError(f"inputs are {inputs.dtype}; expected floating point, images as numbers from 0 to 1 (bytes / 255).")
    if not inputs.isfinite().all():
        raise ValueError("inputs contain NaN or infinite numbers and cannot be attacked.")
    if bounds is None or inputs.numel() == 0:
        return
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds are {bounds}; expected (lowest, highest), or None for inputs without any.")
    if inputs.min() < low or inputs.max() > high:
        found = f"inputs range from {float(inputs.min()):.4g} to {float(inputs.max()):.4g}"
        advice = "attack pixels and put the normalisation into the model, or pass bounds=None for embeddings"
        raise ValueError(f"{found}; expected {low:g} to {high:g}: {advice}.")


SEED_BITS = 63  # torch.Generator.manual_seed accepts these without wrapping


def derived_seed(seed: int, *place: object) -> int:
    """Return a seed made from `seed` and from `place`, the strings and numbers that say what it is used for, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *place):
        encoded = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)


def generators(seed: int, count: int, *place: object, first: int = 0) -> list[torch.Generator]:
    """Return one generator for each of `count` examples; `first` is the number of the first example in its data set.

    They are on the CPU, so that every device gets the same random numbers.
    """
    return [torch.Generator().manual_seed(derived_seed(seed, *place, first + number)) for number in range(count)]


def draw(make: Callable[[torch.Generator], Tensor], sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Return `make(generator)` of each generator, stacked, with the device and dtype of `like`."""
    return torch.stack([make(source) for source in sources]).to(device=like.device, dtype=like.dtype)


def check_seed(seed: int) -> None:
    """Raise ValueError unless `seed` is a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}; it must be a whole number.")
