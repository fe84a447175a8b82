"""Attacks on continuous inputs that follow gradients: FGSM and PGD. Images in [0,1], or embeddings without bounds.

maximise loss(model(x'), y) over x' with |x' - x| <= budget and x' within the bounds
"""

import torch
from torch import Tensor

from holdfast.attacks.ball import Bounds
from holdfast.attacks.flags import Model
from holdfast.attacks.inputs import AttackedInputs
from holdfast.attacks.search import Loss, Search, Threat
from holdfast.attacks.seeds import check_seed, draw, generators
from holdfast.attacks.threat import Norm, check_budget, check_count, direction

PAPER_BUDGET = 1 / 255  # of the papers' PGD and FGSM rows: l_inf, pixels in [0,1]
PAPER_STEPS = 20


def fgsm(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    norm: Norm = "linf",
    loss: Loss = "cross_entropy",
    bounds: Bounds = (0.0, 1.0),
    batch: int | None = None,
    check: bool = True,
) -> AttackedInputs:
    """One step of the whole budget: x' = x + budget sign(grad) (Goodfellow et al. 2015); along the gradient itself for l2.

    model       inputs (B, ...) to logits (B, classes); normalisation belongs into it
    loss        "cross_entropy", or "margin" (the best wrong logit minus the right one)
    bounds      what inputs may be; None for embeddings
    batch       how many inputs go through the model at once; all by default
    check       look at the model for reasons not to trust the result, and put them into `flags`
    """

    def attack(search: Search, first: int) -> None:
        gradient = search.climb(search.clean)
        search.look(search.projected(search.clean + budget * direction(gradient, norm)))

    threat = Threat(budget, norm, bounds, loss)
    return threat.run(attack, model, inputs, labels, name="FGSM", batch=batch, check=check)


def pgd(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    norm: Norm = "linf",
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    seed: int = 0,
    loss: Loss = "cross_entropy",
    bounds: Bounds = (0.0, 1.0),
    batch: int | None = None,
    check: bool = True,
) -> AttackedInputs:
    """Many small steps, each projected back: x' <- P(x' + step d(grad)), d the sign or, for l2, the unit gradient (Madry et
    al. 2018). The papers' setting is `PAPER_BUDGET` = 1/255 in 20 steps.

    Of all iterates of all restarts and the clean input, the one with the highest loss is kept, a wrong one before a right.
    An example's random start depends on the seed and its number only, not on the batch.

    step            by default 2.5 budget / steps, so that the border can be reached and walked along
    random_start    False starts at the clean input
    Other options as for `fgsm`.
    """
    threat = Threat(budget, norm, bounds, loss)
    check_seed(seed)
    check_count(steps, "steps")
    check_count(restarts, "restarts")
    step = 2.5 * budget / steps if step is None else step
    check_budget(step)

    def attack(search: Search, first: int) -> None:
        for restart in range(restarts):
            moved = search.clean
            if random_start:
                sources = generators(seed, moved.shape[0], "pgd", restart, first=first)
                moved = search.projected(moved + budget * in_unit_ball(moved, norm, sources))
            for _ in range(steps):
                gradient = search.climb(moved)
                if search.done:
                    return
                moved = search.projected(moved + step * direction(gradient, norm))
            search.look(moved)

    return threat.run(
        attack,
        model,
        inputs,
        labels,
        name="PGD",
        batch=batch,
        check=check,
        steps=steps,
        restarts=restarts,
        seed=seed if random_start else None,
        options={"step": step, "random_start": random_start},
    )


def in_unit_ball(like: Tensor, norm: Norm, sources: list[torch.Generator]) -> Tensor:
    """Uniform in the unit ball, a point for each row of `like (R, ...)`."""
    shape = like.shape[1:]
    if norm == "linf":
        return draw(lambda source: torch.rand(shape, generator=source) * 2 - 1, sources, like)

    def point(source: torch.Generator) -> Tensor:
        way = torch.randn(shape, generator=source, dtype=torch.float64)
        length = torch.rand((), generator=source, dtype=torch.float64) ** (1 / max(way.numel(), 1))
        return way / way.norm().clamp_min(torch.finfo(torch.float64).tiny) * length

    return draw(point, sources, like)
