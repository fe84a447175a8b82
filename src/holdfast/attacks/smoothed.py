"""PGD on a smoothed classifier: move an input, within an l2 ball, to where a majority vote under noise leaves its class.

    minimise the mean over noise of softmax(f(x' + noise))_c over |x' - x| <= radius,  noise ~ N(0, sigma^2 I)

A step follows the gradient of this mean over fresh draws (expectation over transformation, Athalye et al. 2018, as Salman et
al. 2019 attack smoothed classifiers). Inputs have no bounds: a certificate of the vote has none either.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.attacks.threat import check_budget, check_count, check_seed, derived_seed, direction, project

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
    sources = [torch.Generator().manual_seed(derived_seed(seed, "smoothed", first + row)) for row in range(len(inputs))]
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
