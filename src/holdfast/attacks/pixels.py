"""Attacks on continuous inputs: FGSM, PGD and one perturbation for all follow gradients, SPSA reads only logits.

    maximise loss(model(x'), y) over x' with |x' - x| <= budget and x' within the bounds

    FGSM    x' = x + budget sign(grad)                                  Goodfellow et al. 2015
    PGD     x' <- P(x' + step sign(grad)), many times                   Madry et al. 2018
    SPSA    x' <- P(x' + step Adam(g)), g estimated from probes         Uesato et al. 2018
            g = mean_i (loss(x' + delta v_i) - loss(x' - delta v_i)) / (2 delta) v_i,   v_i random signs
    universal   one perturbation delta for all images                   Moosavi-Dezfooli et al. 2017
            maximise sum_i sigmoid(margin_i(x_i + delta) / (SOFTNESS median_i |margin_i|)) over delta within the budget

P projects onto the ball and the bounds. Inputs are images in [0,1], or embeddings without bounds.

margin_i is the largest wrong logit minus the right one, so that the sum is about the number of wrong answers. Each step of
`universal` needs the gradients of all images; then delta is projected onto the ball. Pixels are clipped to their bounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from holdfast.attacks.flags import Flag, Model, input_gradients, warn
from holdfast.attacks.inputs import AttackedInputs, InputSearch, Threat, ThreatOptions, losses
from holdfast.attacks.route_search import SOFTNESS
from holdfast.attacks.threat import (
    check_budget,
    check_count,
    check_seed,
    clamp,
    direction,
    draw,
    generators,
    project,
)
from holdfast.routing.bounds import Norm

PAPER_BUDGET = 1 / 255  # of the papers' PGD and FGSM rows: l_inf, pixels in [0,1]
PAPER_STEPS = 20


def fgsm(model: Model, inputs: Tensor, labels: Tensor, *, budget: float, **options: Unpack[ThreatOptions]) -> AttackedInputs:
    """Take one step of the whole budget along the sign of the gradient; for l2, along the gradient itself.

    model       maps inputs (B, ...) to logits (B, classes); normalisation belongs inside it
    norm        "linf" by default, or "l2"
    loss        "cross_entropy" by default, or "margin" (the largest wrong logit minus the right one)
    bounds      smallest and largest allowed value of an input, 0 and 1 by default; None for embeddings
    top         attack until the right class is not among the `top` largest logits: 5 for the top-5 error; see `beyond`
    batch       how many inputs the model gets at once; all by default
    check       check the model for reasons not to trust the result, and put them into `flags`; True by default
    """
    threat = Threat(budget, **options)

    def attack(search: InputSearch, first: int) -> None:
        gradient = search.gradient_at(search.clean)
        search.try_inputs(search.projected(search.clean + budget * direction(gradient, threat.norm)))

    return threat.run(attack, model, inputs, labels, name="FGSM")


def pgd(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    seed: int = 0,
    **options: Unpack[ThreatOptions],
) -> AttackedInputs:
    """Take many small steps along the sign of the gradient (for l2, the unit gradient), each followed by a projection.

    The papers' setting is `PAPER_BUDGET` = 1/255 in 20 steps. Of the clean input and all iterates of all restarts, keep the
    one with the highest loss, a misclassified one before a correct one. The random start of an example depends only on the
    seed and on its number in the data set, not on the batch.

    step            by default 2.5 budget / steps, so that iterates can reach the edge of the ball and follow it
    random_start    False starts at the clean input
    Other options as for `fgsm`.
    """
    threat = Threat(budget, **options)
    step = checked_step(budget, step, seed, steps=steps, restarts=restarts)

    def attack(search: InputSearch, first: int) -> None:
        for restart in range(restarts):
            start = random_inputs(search, seed, "pgd", restart, first) if random_start else search.clean
            climb(search, start, search.gradient_at, steps, step)

    record = {"steps": steps, "restarts": restarts, "seed": seed if random_start else None}
    more = {"step": step, "random_start": random_start}
    return threat.run(attack, model, inputs, labels, name="PGD", options=more, **record)


def checked_step(budget: float, step: float | None, seed: int, *, steps: int, tries: int = 0, **counts: int) -> float:
    """Return the length of a step, by default 2.5 budget / steps; raise ValueError if one of these numbers is wrong."""
    check_seed(seed)
    check_count(tries, "tries", least=0)
    for name, count in {"steps": steps, **counts}.items():
        check_count(count, name)
    step = 2.5 * budget / steps if step is None else step
    check_budget(step)
    return step


def random_inputs(search: InputSearch, seed: int, name: str, restart: int, first: int) -> Tensor:
    """Return a random input within the ball and the bounds for each example; `first` is the number of the first of them."""
    clean, threat = search.clean, search.threat
    sources = generators(seed, clean.shape[0], name, restart, first=first)
    return search.projected(clean + threat.budget * in_unit_ball(clean, threat.norm, sources))


def climb(
    search: InputSearch, perturbed: Tensor, gradient_at: Callable[[Tensor], Tensor], steps: int, step: float
) -> Tensor:
    """Take gradient steps from `perturbed`, each followed by a projection, and return where they end.

    `gradient_at` reports what it tries to `search`.
    """
    for _ in range(steps):
        gradient = gradient_at(perturbed)
        if search.finished.all():
            return perturbed
        perturbed = search.projected(perturbed + step * direction(gradient, search.threat.norm))
    search.try_inputs(perturbed)
    return perturbed


def in_unit_ball(like: Tensor, norm: Norm, sources: list[torch.Generator]) -> Tensor:
    """Return a uniformly drawn point of the unit ball for each row of `like (R, ...)`."""
    shape = like.shape[1:]
    if norm == "linf":
        return draw(lambda source: torch.rand(shape, generator=source) * 2 - 1, sources, like)

    def point(source: torch.Generator) -> Tensor:
        way = torch.randn(shape, generator=source, dtype=torch.float64)
        length = torch.rand((), generator=source, dtype=torch.float64) ** (1 / max(way.numel(), 1))
        return way / way.norm().clamp_min(torch.finfo(torch.float64).tiny) * length

    return draw(point, sources, like)


FIRST, SECOND = 0.9, 0.999  # Adam's decays
PAIRS = 8  # pairs of probes drawn together; a constant, so that an example's probes do not depend on the others
AT_ONCE = 512  # probes in one forward


def spsa(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    steps: int = 20,
    samples: int = 64,
    delta: float = 0.01,
    step: float | None = None,
    seed: int = 0,
    **options: Unpack[ThreatOptions],
) -> AttackedInputs:
    """Attack with logits only, in at most steps (2 samples + 1) + 1 queries per example.

    samples     pairs of probes per step; more give a better direction
    delta       distance of a probe from the input; probes stay within the bounds, but may leave the ball
    step        by default 2.5 budget / steps
    Other options as for `pgd`, but the loss is "margin" by default. An example that is misclassified (with `top`: by so
    many) is not queried again.
    """
    options.setdefault("loss", "margin")
    threat = Threat(budget, **options)
    step = checked_step(budget, step, seed, steps=steps, samples=samples)
    check_budget(delta)
    if delta == 0:
        raise ValueError("delta is 0; the probes must differ from the input.")

    def attack(search: InputSearch, first: int) -> None:
        perturbed = search.clean
        sources = generators(seed, perturbed.shape[0], "spsa", first=first)
        mean, square = torch.zeros_like(perturbed), torch.zeros_like(perturbed)
        for number in range(1, steps + 1):
            left = (~search.finished).nonzero().flatten()
            if left.numel() == 0:
                return
            slope = torch.zeros_like(perturbed)
            slope[left] = estimate(search, perturbed[left], left, samples, delta, [sources[row] for row in left.tolist()])
            mean = FIRST * mean + (1 - FIRST) * slope
            square = SECOND * square + (1 - SECOND) * slope.square()
            way = (mean / (1 - FIRST**number)) / ((square / (1 - SECOND**number)).sqrt() + 1e-12)
            perturbed = search.projected(perturbed + step * way)
            search.try_inputs(perturbed)

    record = {"steps": steps, "seed": seed, "black_box": True}
    more = {"step": step, "samples": samples, "delta": delta, "queries": steps * (2 * samples + 1) + 1}
    return threat.run(attack, model, inputs, labels, name="SPSA", options=more, **record)


@torch.no_grad()
def estimate(
    search: InputSearch, perturbed: Tensor, rows: Tensor, samples: int, delta: float, sources: list[torch.Generator]
) -> Tensor:
    """Estimate the gradient of the loss at `perturbed`, the given rows of the batch, from `samples` pairs of probes."""
    labels, bounds, kind = search.labels[rows], search.threat.bounds, search.threat.loss
    total = torch.zeros_like(perturbed)
    for done in range(0, samples, PAIRS):
        count = min(PAIRS, samples - done)
        signs = random_signs((count, *perturbed.shape[1:]), sources, perturbed)
        sides = []
        for side in (1, -1):
            probes = clamp(perturbed.unsqueeze(1) + side * delta * signs, bounds).flatten(0, 1)
            logits = torch.cat([search.model(part) for part in probes.split(AT_ONCE)])
            sides.append(losses(logits, labels.repeat_interleave(count), kind).to(perturbed.dtype).view(-1, count))
        rise = (sides[0] - sides[1]) / (2 * delta)
        total += (rise.view(*rise.shape, *[1] * (perturbed.dim() - 1)) * signs).sum(1)
    return total / samples


def random_signs(shape: tuple[int, ...], sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Return (R, *shape): random signs, 1 or -1, of each generator, with the device and dtype of `like`.

    A generator gives eight signs a byte, the lowest bit first, and the device unpacks them: SPSA draws millions of signs,
    and a draw for each of them took the host 20 times as long.
    """
    count = math.prod(shape)
    packed = [torch.randint(256, (-(-count // 8),), generator=source, dtype=torch.uint8) for source in sources]
    octets = torch.stack(packed).to(like.device).unsqueeze(-1)
    bits = octets >> torch.arange(8, dtype=torch.uint8, device=like.device) & 1
    return bits.flatten(1)[:, :count].to(like.dtype).mul_(2).sub_(1).view(-1, *shape)


def universal(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    budget: float,
    steps: int = PAPER_STEPS,
    step: float | None = None,
    restarts: int = 1,
    tries: int = 4,
    seed: int = 0,
    **options: Unpack[ThreatOptions],
) -> AttackedInputs:
    """Find one perturbation for all inputs, from 0 and from random starts; keep the one with the most wrong answers.

    tries    random perturbations of the same kind, to see whether gradients mislead
    Other options as for `pgd`, without `loss`. An input that the perturbation does not make worse is left unchanged in the
    result.
    """
    threat = replace(Threat(budget, **options), loss="margin")
    step = checked_step(budget, step, seed, steps=steps, restarts=restarts, tries=tries)
    norm, batch = threat.norm, threat.batch or len(inputs)
    best, most = torch.zeros_like(inputs[:1]), -1
    nothing, radius = best, torch.full((1,), budget, dtype=torch.float64, device=inputs.device)

    def slope_at(delta: Tensor) -> Tensor:
        """Return the gradient in `delta`, and keep it if it has the most wrong answers so far."""
        nonlocal best, most
        slope, wrong = torch.zeros_like(delta), 0
        for part, own in zip(inputs.split(batch), labels.split(batch), strict=True):
            logits, gradients = input_gradients(model, clamp(part + delta, threat.bounds), partial(_count, own))
            slope, wrong = slope + gradients.sum(0, keepdim=True), wrong + int((logits.argmax(-1) != own).sum())
        if wrong > most:
            best, most = delta, wrong
        return slope

    def random_delta(name: str, number: int) -> Tensor:
        source = generators(seed, 1, name, first=number)
        return project(budget * in_unit_ball(best, norm, source), nothing, radius, norm)

    flags: list[Flag] = []
    if len(inputs):
        for restart in range(restarts):
            delta = random_delta("universal", restart) if restart else nothing
            for _ in range(steps):
                delta = project(delta + step * direction(slope_at(delta), norm), nothing, radius, norm)
            slope_at(delta)
        ours = most
        for number in range(tries):
            slope_at(random_delta("universal tries", number))
        if threat.check and most > ours:
            why = f"a random perturbation has {most} wrong answers, the one along gradients {ours} of {len(inputs)}"
            flags += warn(Flag("black box beats white box", f"{why}: the gradients are misleading, or it needs more steps."))

    def attack(search: InputSearch, first: int) -> None:
        search.try_inputs(search.projected(search.clean + best))

    record = {"steps": steps, "restarts": restarts, "seed": seed}
    result = threat.run(attack, model, inputs, labels, name="universal", options={"step": step, "tries": tries}, **record)
    return replace(result, shared=True, flags=(*result.flags, *flags))


def _count(labels: Tensor, logits: Tensor) -> Tensor:
    """Return about the number of wrong answers, with a gradient."""
    margins = losses(logits, labels, "margin")
    typical = SOFTNESS * margins.detach().abs().median()
    return torch.sigmoid(margins / typical.clamp_min(torch.finfo(margins.dtype).tiny)).sum()
