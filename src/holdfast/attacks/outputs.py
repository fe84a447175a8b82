"""The attack on a layer's output: the perturbation of a token, within its budget, that changes the output most.

    maximise  |y(x') - y(x)|  over  |x' - x| <= budget, in l2

PGD (Madry et al. 2018) climbs from many starts: random directions, and the normals of the planes at which an expert leaves
and another enters, at the whole budget and just past the plane. Gradients do not see the jump of a hard top-k at such a
plane, so only a start beyond it finds it. It is an attack on the bounds of `holdfast.certificates.certify_output`.

T tokens as rows (T,d), E experts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.attacks.threat import (
    budgets_of,
    check_count,
    check_seed,
    direction,
    distances,
    generators,
    gradient,
    project,
)
from holdfast.routing import Routing

PAST = 1.001  # a start beyond a plane, in distances to it
TINY = torch.finfo(torch.float32).tiny


@final
@dataclass(frozen=True)
class AttackedOutputs:
    """For each token, the perturbed token that changed the layer's output most."""

    inputs: Tensor  # (T,d), each within its budget
    change: Tensor  # (T,) float64: the largest |y(x') - y(x)| found
    budgets: Tensor  # (T,) float64


def attack_outputs(
    layer: Callable[[Tensor], tuple[Tensor, Routing]],
    tokens: Tensor,
    *,
    budget: float | Tensor,
    starts: int = 4,
    planes: int = 4,
    steps: int = 20,
    seed: int = 0,
) -> AttackedOutputs:
    """Perturb each of `tokens (T,d)` alone so that the output of its layer changes most.

    layer    from tokens (T,d) to their outputs (T,d) and the `Routing`, differentiable; a token must not depend on others
    budget   the largest perturbation, in l2: a number, or one for each token
    starts   runs from random directions
    planes   how many pairs of experts to try: the weakest of the set against the strongest outside it. Two runs each
    steps    PGD steps of each run; the first is as long as the budget, later ones are shorter
    """
    check_seed(seed)
    for name, count, least in (("starts", starts, 0), ("planes", planes, 0), ("steps", steps, 1)):
        check_count(count, name, least=least)
    if tokens.dim() != 2 or not tokens.is_floating_point() or not tokens.isfinite().all():
        raise ValueError(f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; expected finite rows, (T, d).")
    budgets, clean = budgets_of(tokens, budget), tokens.detach()
    with torch.no_grad():
        before = layer(clean)[0].detach().double()
    best, worst = clean, torch.zeros_like(budgets)

    def keep(rows: Tensor, change: Tensor) -> None:
        nonlocal best, worst
        more = change > worst
        best, worst = rows.where(more.unsqueeze(1), best), change.where(more, worst)

    noise = (torch.randn(clean.shape, generator=each).to(clean) for each in generators(seed, starts, "outputs"))
    begun = [_moved(clean, direction(each, "l2"), budgets, budgets) for each in noise]
    for rows in [*begun, *_past_planes(layer, clean, budgets, planes)]:
        for number in range(steps + 1):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                moved = layer(rows)[0].double() - before
                squared = moved.square().sum(1)
            keep(rows.detach(), squared.detach().sqrt())
            if number < steps:
                pace = budgets * (number + 1) ** -0.5
                rows = _moved(clean, direction(gradient(squared.sum(), rows), "l2"), pace, budgets, rows.detach())
    assert bool((distances(best, clean, "l2") <= budgets).all())
    return AttackedOutputs(best, worst, budgets)


def _moved(clean: Tensor, step: Tensor, pace: Tensor, budgets: Tensor, start: Tensor | None = None) -> Tensor:
    """Return `start` (None: `clean`) after a step of this length, projected into the ball around `clean`."""
    rows = (clean if start is None else start) + step * pace.to(step.dtype).unsqueeze(1)
    return project(rows, clean, budgets, "l2")


def _past_planes(
    layer: Callable[[Tensor], tuple[Tensor, Routing]], clean: Tensor, budgets: Tensor, planes: int
) -> list[Tensor]:
    """Return starts along the normals of the planes where an expert of the set ties with one outside it."""
    if planes == 0:
        return []
    rows = clean.requires_grad_()
    with torch.enable_grad():
        routing = layer(rows)[1]
        keys = routing.gates.clamp_min(TINY).log()
    chosen = routing.chosen
    inside = keys.detach().masked_fill(~chosen, torch.inf).argsort(dim=1)
    outside = keys.detach().masked_fill(chosen, -torch.inf).argsort(dim=1, descending=True)
    found = []
    for number in range(planes):
        weak, strong = inside[:, number % 2], outside[:, min(number // 2, outside.shape[1] - 1)]
        gap = keys.gather(1, weak.unsqueeze(1)) - keys.gather(1, strong.unsqueeze(1))
        slope = gradient(-gap.sum(), rows)
        distance = gap.detach().squeeze(1).double() / slope.norm(dim=1).double().clamp_min(TINY)
        normal = direction(slope, "l2")
        found += [_moved(clean.detach(), normal, pace, budgets) for pace in (budgets, (PAST * distance.clamp_min(0)))]
    clean.requires_grad_(False)
    return found
