"""The universal perturbation: one change of pixels for all images (Moosavi-Dezfooli et al. 2017).

    maximise sum_i sigmoid(margin_i(x_i + delta) / (SOFTNESS median_i |margin_i|)) over one delta within the budget

margin_i is the largest wrong logit minus the right one, so that the sum is about the number of wrong answers. Each step
needs the gradients of all images; then delta is projected onto the ball. Pixels that would leave their bounds are clipped.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from holdfast.attacks.flags import Flag, Model, input_gradients, warn
from holdfast.attacks.inputs import AttackedInputs, InputSearch, Threat, losses
from holdfast.attacks.pixels import PAPER_STEPS, in_unit_ball
from holdfast.attacks.route_search import SOFTNESS
from holdfast.attacks.threat import Bounds, check_budget, check_count, check_seed, clamp, direction, generators, project
from holdfast.routing.bounds import Norm


def universal(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    norm: Norm = "linf",
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    tries: int = 4,
    seed: int = 0,
    bounds: Bounds = (0.0, 1.0),
    top: int = 1,
    batch: int | None = None,
    check: bool = True,
) -> AttackedInputs:
    """Find one perturbation for all inputs, from 0 and from random starts; keep the one with the most wrong answers.

    tries    random perturbations of the same kind, to see whether gradients mislead
    Other options as for `pgd`. An input that the perturbation does not make worse is left unchanged in the result.
    """
    threat = Threat(budget, norm, bounds, "margin", top)
    check_seed(seed)
    for name, count, least in (("steps", steps, 1), ("restarts", restarts, 1), ("tries", tries, 0)):
        check_count(count, name, least)
    step = 2.5 * budget / steps if step is None else step
    check_budget(step)
    best, most = torch.zeros_like(inputs[:1]), -1
    radius = torch.full((1,), budget, dtype=torch.float64, device=inputs.device)

    def slope_at(delta: Tensor) -> Tensor:
        """Return the gradient in `delta`, and keep it if it has the most wrong answers so far."""
        nonlocal best, most
        slope, wrong = torch.zeros_like(delta), 0
        for part, own in zip(inputs.split(batch or len(inputs)), labels.split(batch or len(inputs)), strict=True):
            logits, gradients = input_gradients(model, clamp(part + delta, bounds), partial(_count, own))
            slope, wrong = slope + gradients.sum(0, keepdim=True), wrong + int((logits.argmax(-1) != own).sum())
        if wrong > most:
            best, most = delta, wrong
        return slope

    def random_delta(name: str, number: int) -> Tensor:
        source = generators(seed, 1, name, first=number)
        return project(budget * in_unit_ball(best, norm, source), torch.zeros_like(best), radius, norm)

    flags: list[Flag] = []
    if len(inputs):
        for restart in range(restarts):
            delta = random_delta("universal", restart) if restart else torch.zeros_like(best)
            for _ in range(steps):
                moved = delta + step * direction(slope_at(delta), norm)
                delta = project(moved, torch.zeros_like(delta), radius, norm)
            slope_at(delta)
        ours = most
        for number in range(tries):
            slope_at(random_delta("universal tries", number))
        if check and most > ours:
            why = f"a random perturbation has {most} wrong answers, the one along gradients {ours} of {len(inputs)}"
            flags += warn(Flag("black box beats white box", f"{why}: the gradients are misleading, or it needs more steps."))

    def attack(search: InputSearch, first: int) -> None:
        search.try_inputs(search.projected(search.clean + best))

    record = {"steps": steps, "restarts": restarts, "seed": seed}
    options = {"step": step, "tries": tries}
    result = threat.run(attack, model, inputs, labels, name="universal", batch=batch, check=check, options=options, **record)
    return replace(result, shared=True, flags=(*result.flags, *flags))


def _count(labels: Tensor, logits: Tensor) -> Tensor:
    """Return about the number of wrong answers, with a gradient."""
    margins = losses(logits, labels, "margin")
    typical = SOFTNESS * margins.detach().abs().median()
    return torch.sigmoid(margins / typical.clamp_min(torch.finfo(margins.dtype).tiny)).sum()
