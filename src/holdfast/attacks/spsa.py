"""SPSA: a black-box attack that only asks for scores (Uesato et al. 2018).

g = mean_i (loss(x + delta v_i) - loss(x - delta v_i)) / (2 delta) v_i,   v_i random signs,   then Adam along g, projected
"""

from functools import partial

import torch
from torch import Tensor

from holdfast.attacks.ball import Bounds
from holdfast.attacks.flags import Model
from holdfast.attacks.inputs import AttackedInputs
from holdfast.attacks.search import Loss, Search, Threat, losses
from holdfast.attacks.seeds import check_seed, draw, generators
from holdfast.attacks.threat import Norm, check_budget, check_count

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
