"""The adaptive attack on a classifier with routers: it raises the loss and changes routes with the same steps.

    maximise loss(model(x'), y) + strength mean_{l,t} min(margin_lt(x'), 0)    within the budget

margin_lt is the highest key of an expert outside the clean set of token t in layer l minus the lowest key inside it: below 0
until the token flips, then it no longer counts (`route_goals.LeaveSet`). An attack that follows the loss alone gets no
gradient through a choice of experts; this one is led to where other experts compute the output (adaptive attacks: Tramer et
al. 2020). Half of the runs follow the loss alone, so that the attack is no weaker than PGD with half as many.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from holdfast.attacks.flags import Flag, black_box_flag, late_flag, randomised_flag, warn
from holdfast.attacks.inputs import AttackedInputs, InputSearch, Loss, Threat, losses
from holdfast.attacks.pixels import PAPER_STEPS, climb, random_inputs
from holdfast.attacks.route_goals import Layer, LeaveSet
from holdfast.attacks.route_search import TINY
from holdfast.attacks.threat import Bounds, check_budget, check_count, check_seed, gradient
from holdfast.routing import Routing
from holdfast.routing.bounds import Norm


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
    norm: Norm = "linf",
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    strength: float = 5.0,
    tries: int = 4,
    seed: int = 0,
    loss: Loss = "cross_entropy",
    bounds: Bounds = (0.0, 1.0),
    top: int = 1,
    batch: int | None = None,
    check: bool = True,
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
    threat = Threat(budget, norm, bounds, loss, top)
    check_seed(seed)
    for name, count, least in (("steps", steps, 1), ("restarts", restarts, 1), ("tries", tries, 0)):
        check_count(count, name, least)
    step = 2.5 * budget / steps if step is None else step
    check_budget(step)
    early = steps - steps // 4  # how many steps come before the last quarter
    flags, flips = dict[str, Flag](), list[Tensor]()
    white, late, black = list[Tensor](), list[Tensor](), list[Tensor]()

    def attack(search: InputSearch, first: int) -> None:
        clean = _layers(model, search.clean)
        if check and first == 0:
            once, again = (torch.cat([layer.keys.flatten() for layer in _layers(model, search.clean)]) for _ in range(2))
            flags.update({flag.kind: flag for flag in randomised_flag(once, again)})

        def joint_gradient(perturbed: Tensor) -> Tensor:
            perturbed = perturbed.detach().requires_grad_()
            with torch.enable_grad():
                logits, routings = model.routed(perturbed)
                value = losses(logits, search.labels, loss).sum()
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
    options = {"step": step, "strength": strength, "tries": tries}
    found = threat.run(attack, model, inputs, labels, name="adaptive", batch=batch, check=check, options=options, **record)
    if white and check:
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
