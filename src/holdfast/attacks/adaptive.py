"""Attacks that know how a classifier is defended: by routers, or by a majority vote under noise.

`adaptive` raises the loss of a model with routers and changes its routes with the same steps:

    maximise loss(model(x'), y) + strength mean_{l,t} min(margin_lt(x'), 0)    within the budget

margin_lt is the highest key of an expert outside the clean set of token t in layer l minus the lowest key inside it: below 0
until the token flips, then it no longer counts (`route_search.LeaveSet`). An attack that follows the loss alone gets no
gradient through a choice of experts; this one is led to where other experts compute the output (adaptive attacks: Tramer et
al. 2020). Half of the runs follow the loss alone, so that the attack is no weaker than PGD with half as many.

`attack_smoothed` moves an input, within an l2 ball, to where the vote leaves its class:

    minimise the mean over noise of softmax(f(x' + noise))_c over |x' - x| <= radius,  noise ~ N(0, sigma^2 I)

A step follows the gradient of this mean over fresh draws (expectation over transformation, Athalye et al. 2018, as Salman et
al. 2019 attack smoothed classifiers). Inputs have no bounds: a certificate of the vote has none either.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Unpack

import torch
from torch import Tensor

from holdfast.attacks.flags import Flag, black_box_flag, late_flag, randomised_flag, warn
from holdfast.attacks.inputs import AttackedInputs, InputSearch, Threat, ThreatOptions, losses
from holdfast.attacks.pixels import PAPER_STEPS, checked_step, climb, random_inputs
from holdfast.attacks.route_search import TINY, Layer, LeaveSet
from holdfast.attacks.threat import check_budget, check_count, check_seed, direction, generators, gradient, project
from holdfast.routing import Routing


class RoutedModel(Protocol):
    """A classifier that also returns what its routers do."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """Return logits (B, classes)."""

    def routed(self, inputs: Tensor, /) -> tuple[Tensor, Sequence[Routing]]:
        """Return logits (B, classes) and the differentiable routing of each MoE layer."""


def adaptive(
    model: RoutedModel,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    strength: float = 5.0,
    tries: int = 4,
    seed: int = 0,
    **options: Unpack[ThreatOptions],
) -> AttackedInputs:
    """Follow the loss and the routes together, and from the same random starts the loss alone; keep the worst input.

    strength    of the term of the routes: 5 found more than 1 on a toy whose experts disagree
    restarts    how many random starts, each for two runs
    tries       random inputs within the budget, to see whether gradients mislead
    Other options as for `pgd`. `options` of the result has `flipped`, the share of tokens and layers whose set differs.
    """
    if not hasattr(model, "routed"):
        raise ValueError(
            "the adaptive attack follows routes: the model needs a method routed(inputs) -> (logits, routings)."
        )
    threat = Threat(budget, **options)
    step = checked_step(budget, step, seed, steps=steps, restarts=restarts, tries=tries)
    early = steps - steps // 4  # how many steps come before the last quarter
    flags, flips = dict[str, Flag](), list[Tensor]()
    white, late, black = list[Tensor](), list[Tensor](), list[Tensor]()

    def attack(search: InputSearch, first: int) -> None:
        clean = _layers(model, search.clean)
        if threat.check and first == 0:
            once, again = (torch.cat([layer.keys.flatten() for layer in _layers(model, search.clean)]) for _ in range(2))
            flags.update({flag.kind: flag for flag in randomised_flag(once, again)})

        def joint_gradient(perturbed: Tensor) -> Tensor:
            perturbed = perturbed.detach().requires_grad_()
            with torch.enable_grad():
                logits, routings = model.routed(perturbed)
                value = losses(logits, search.labels, threat.loss).sum()
                for was, routing in zip(clean, routings, strict=True):
                    margins = GOAL.margin(layer_of(routing), was).clamp(max=0)
                    value = value + strength * margins.view(len(logits), -1).mean(1).sum() / len(clean)
            search.keep_worst(perturbed.detach(), logits.detach())
            return gradient(value, perturbed)

        last = torch.zeros_like(search.wrong)  # first got wrong in the last quarter of a run
        for restart in range(restarts):
            for follow in (joint_gradient, search.gradient_at):
                start = random_inputs(search, seed, "adaptive", restart, first)
                middle = climb(search, start, follow, early, step)
                before = search.wrong
                climb(search, middle, follow, steps - early, step)
                last = last | (search.wrong & ~before)
        white.append(search.wrong)
        late.append(last)
        for number in range(tries):
            search.try_inputs(random_inputs(search, seed, "adaptive tries", number, first))
        black.append(search.wrong)
        now = _layers(model, search.best)
        flips.extend(GOAL.reached(after, was).double().mean() for after, was in zip(now, clean, strict=True))

    record = {"steps": steps, "restarts": restarts, "seed": seed}
    settings = {"step": step, "strength": strength, "tries": tries}
    found = threat.run(attack, model, inputs, labels, name="adaptive", options=settings, **record)
    if white and threat.check:
        ends = torch.cat(white)
        more = *black_box_flag(ends, torch.cat(black), "random noise"), *late_flag(torch.cat(late), ends, steps)
        flags.update({flag.kind: flag for flag in more})
    flipped = float(torch.stack(flips).mean()) if flips else 0.0
    return replace(found, flags=(*found.flags, *warn(*flags.values())), options={**found.options, "flipped": flipped})


GOAL = LeaveSet()


def layer_of(routing: Routing) -> Layer:
    """Return the sets, and the logarithms of the gates as the keys that experts are ranked by."""
    return Layer(routing.gates.clamp_min(TINY).log(), GOAL.sets(routing, None))


@torch.no_grad()
def _layers(model: RoutedModel, inputs: Tensor) -> list[Layer]:
    """Return the routes of these inputs. Raise ValueError if the model has no routers."""
    layers = [layer_of(routing) for routing in model.routed(inputs)[1]]
    if not layers:
        raise ValueError("the model has no routers for the adaptive attack to follow; use pgd.")
    return layers


STEPS, DRAWS = 20, 32


def attack_smoothed(
    classify: Callable[[Tensor], Tensor],
    inputs: Tensor,
    classes: Tensor,
    *,
    radius: Tensor,
    sigma: float,
    steps: int = STEPS,
    draws: int = DRAWS,
    seed: int = 0,
    first: int = 0,
    batch: int | None = None,
) -> Tensor:
    """Return inputs (B, ...) within `radius (B,)` of `inputs (B, ...)` where the vote gives `classes (B,)` least often.

    classify    from inputs (n, ...) to logits (n, classes)
    draws       noisy copies of each input in a step
    first       number of the first input: its noise depends on this and the seed only
    batch       copies in a forward; by default all of a step
    """
    check_seed(seed)
    check_count(steps, "steps")
    check_count(draws, "draws")
    check_budget(sigma)
    radius = radius.to(inputs.device)
    wide = [1] * (inputs.dim() - 1)
    numbers = classes.to(inputs.device).repeat_interleave(draws)
    sources = generators(seed, len(inputs), "smoothed", first=first)
    found = inputs.float()
    for _ in range(steps):
        noise = torch.stack([torch.randn(draws, *inputs.shape[1:], generator=source) for source in sources])
        copies = (found.unsqueeze(1) + sigma * noise.to(inputs.device)).flatten(0, 1).to(inputs.dtype)
        slopes = []
        for part, labels in zip(copies.split(batch or len(copies)), numbers.split(batch or len(copies)), strict=True):
            point = part.detach().requires_grad_()
            with torch.enable_grad():
                chance = classify(point).float().softmax(-1).gather(1, labels.unsqueeze(1)).sum()
            slopes.append(torch.autograd.grad(chance, point)[0].float())
        slope = torch.cat(slopes).unflatten(0, (len(inputs), draws)).mean(1)
        step = 2.5 / steps * radius.to(found.dtype).view(-1, *wide)
        found = project(found - step * direction(slope, "l2"), inputs.float(), radius, "l2")
    return found.to(inputs.dtype)
