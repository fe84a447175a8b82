"""Attacks on continuous inputs that follow gradients: FGSM and PGD. Images in [0,1], or embeddings without bounds.

maximise loss(model(x'), y) over x' with |x' - x| <= budget and x' within the bounds


SPSA: a black-box attack that only asks for scores (Uesato et al. 2018).

g = mean_i (loss(x + delta v_i) - loss(x - delta v_i)) / (2 delta) v_i,   v_i random signs,   then Adam along g, projected
"""

from functools import partial

import torch
from torch import Tensor

from holdfast.attacks.flags import Model
from holdfast.attacks.inputs import AttackedInputs, Loss, Search, Threat, losses
from holdfast.attacks.threat import Bounds, Norm, check_budget, check_count, check_seed, direction, draw, generators

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


FIRST, SECOND = 0.9, 0.999  # Adam's decays
PAIRS = 8  # pairs of probes drawn at once; a constant, so that an example's probes do not depend on the others
AT_ONCE = 512  # probes in one forward


def spsa(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    norm: Norm = "linf",
    steps: int = 20,
    samples: int = 64,
    delta: float = 0.01,
    step: float | None = None,
    seed: int = 0,
    loss: Loss = "margin",
    bounds: Bounds = (0.0, 1.0),
    batch: int | None = None,
    check: bool = True,
) -> AttackedInputs:
    """Sees only the logits of what it asks: at most steps (2 samples + 1) + 1 queries an example.

    samples     pairs of probes a step; more make a better direction
    delta       how far a probe looks; probes stay within the bounds, but may leave the ball
    step        by default 2.5 budget / steps
    Other options as for `pgd`. Broken examples are left alone, so that they cost no more queries.
    """
    threat = Threat(budget, norm, bounds, loss)
    check_seed(seed)
    check_count(steps, "steps")
    check_count(samples, "samples")
    check_budget(delta)
    if delta == 0:
        raise ValueError("delta is 0; probes must look somewhere else than at the input.")
    step = 2.5 * budget / steps if step is None else step
    check_budget(step)

    def attack(search: Search, first: int) -> None:
        moved = search.clean
        sources = generators(seed, moved.shape[0], "spsa", first=first)
        mean, square = torch.zeros_like(moved), torch.zeros_like(moved)
        for number in range(1, steps + 1):
            left = (~search.wrong).nonzero().flatten()
            if left.numel() == 0:
                return
            slope = torch.zeros_like(moved)
            slope[left] = estimate(search, moved[left], left, samples, delta, [sources[row] for row in left.tolist()])
            mean = FIRST * mean + (1 - FIRST) * slope
            square = SECOND * square + (1 - SECOND) * slope.square()
            way = (mean / (1 - FIRST**number)) / ((square / (1 - SECOND**number)).sqrt() + 1e-12)
            moved = search.projected(moved + step * way)
            search.look(moved)

    return threat.run(
        attack,
        model,
        inputs,
        labels,
        name="SPSA",
        batch=batch,
        check=check,
        steps=steps,
        seed=seed,
        black_box=True,
        options={"step": step, "samples": samples, "delta": delta, "queries": steps * (2 * samples + 1) + 1},
    )


@torch.no_grad()
def estimate(
    search: Search, moved: Tensor, rows: Tensor, samples: int, delta: float, sources: list[torch.Generator]
) -> Tensor:
    """The slope of the loss at `moved`, the given rows of the batch, from `samples` pairs of probes."""
    labels, bounds, kind = search.labels[rows], search.threat.bounds, search.threat.loss
    total = torch.zeros_like(moved)
    for done in range(0, samples, PAIRS):
        count = min(PAIRS, samples - done)
        signs = draw(partial(_signs, torch.Size((count, *moved.shape[1:]))), sources, moved)
        sides = []
        for side in (1, -1):
            probes = _within(moved.unsqueeze(1) + side * delta * signs, bounds).flatten(0, 1)
            logits = torch.cat([search.model(part) for part in probes.split(AT_ONCE)])
            sides.append(losses(logits, labels.repeat_interleave(count), kind).to(moved.dtype).view(-1, count))
        rise = (sides[0] - sides[1]) / (2 * delta)
        total += (rise.view(*rise.shape, *[1] * (moved.dim() - 1)) * signs).sum(1)
    return total / samples


def _signs(shape: torch.Size, source: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=source) * 2 - 1


def _within(probes: Tensor, bounds: Bounds) -> Tensor:
    return probes if bounds is None else probes.clamp(*bounds)
