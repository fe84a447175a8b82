"""Randomised smoothing (Cohen et al. 2019) of any classifier: the l2 radius within which the class of a majority vote stays.

    g(x) = the class that f gives to x + noise most often, noise ~ N(0, sigma^2 I)

The function is CERTIFY of the paper: `selection` draws choose a class, `samples` other draws count its hits, and `sampling`
turns the count into a radius, or abstains. It certifies g, not f. f must give one copy the same class whatever other copies
are in its batch, and noise must not be clipped. The confidence 1 - alpha is that of each input, not of all together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.certificates.sampling import Smoothing, certified_radius, lowest_chance, noise_blocks
from holdfast.errors import require_extra

Classify = Callable[[Tensor], Tensor]  # inputs (n, ...) to logits (n, classes)
BATCH = 256  # copies in a forward, by default


@final
@dataclass(frozen=True)
class PredictionCertificates:
    """The certificates of the smoothed classifier at some inputs."""

    classes: Tensor  # (B,) int64: the class that the draws of the selection gave most often
    hits: Tensor  # (B,) int64: how many of `samples` other draws gave it
    smoothing: Smoothing
    radius: Tensor = field(init=False)  # (B,) float64: the class stays at every l2 distance below it; 0 where it abstains

    def __post_init__(self) -> None:
        lowest = lowest_chance(self.hits, self.smoothing.samples, self.smoothing.alpha)
        object.__setattr__(self, "radius", certified_radius(lowest, self.smoothing.sigma))

    @property
    def abstained(self) -> Tensor:
        """(B,) bool: the lower bound of the chance of the class is at most 1/2, so that nothing is certified."""
        return self.radius == 0

    @property
    def confidence(self) -> float:
        """The probability that the certificate of one input is right."""
        return 1 - self.smoothing.alpha

    def accuracy(self, labels: Tensor, radius: float = 0.0) -> float:
        """Return the certified accuracy: the share of inputs with the right class and a radius above `radius`."""
        return float(((self.classes == labels.cpu()) & (self.radius > radius)).double().mean())

    def summary(self) -> dict[str, Any]:
        """Return what to store as JSON."""
        names = ("sigma", "samples", "selection", "alpha", "seed")
        numbers = {name: getattr(self, name).tolist() for name in ("classes", "hits", "radius")}
        return {**{name: getattr(self.smoothing, name) for name in names}, **numbers}


@torch.no_grad()
def certify_predictions(
    classify: Classify, inputs: Tensor, smoothing: Smoothing, *, batch: int = BATCH
) -> PredictionCertificates:
    """Return the radius of each of `inputs (B, ...)`, within which the majority vote of `classify` under noise is one class.

    classify    from copies of an input (n, ...) to logits (n, classes); a normalisation belongs inside it
    batch       copies in one forward: 1 if a copy's logits depend on the other copies
    """
    require_extra("certifying predictions", "scipy")
    if not inputs.is_floating_point() or not inputs.isfinite().all():
        raise ValueError(f"inputs are {inputs.dtype}; expected finite floating-point numbers, to which noise can be added.")
    if batch < 1:
        raise ValueError(f"batch is {batch}; a forward needs at least 1 copy.")
    if isinstance(classify, nn.Module) and classify.training:
        raise ValueError("the classifier is in training mode, where its outputs may be random; call eval() first.")
    classes, hits, sigma = [], [], smoothing.sigma
    for number, one in enumerate(inputs, smoothing.first):
        selected, counted = (
            count_classes(classify, one, sigma, count, smoothing.seed, purpose, number, batch=batch)
            for purpose, count in (("selection", smoothing.selection), ("samples", smoothing.samples))
        )
        classes.append(int(selected.argmax()))  # of several, the first
        hits.append(int(counted[classes[-1]]))
    return PredictionCertificates(torch.tensor(classes, dtype=torch.int64), torch.tensor(hits, dtype=torch.int64), smoothing)


@torch.no_grad()
def count_classes(classify: Classify, one: Tensor, sigma: float, count: int, *place: object, batch: int = BATCH) -> Tensor:
    """Return (classes,) int64 on the CPU: how many of `count` noisy copies of an input get each class.

    The noise depends only on `place`, the seed and what the copies are for, and on the kind of device. A copy with a logit
    that is NaN gets no class.
    """
    counts: Tensor | None = None
    for block in noise_blocks(one.shape, count, *place, device=one.device):
        for part in block.split(batch):
            logits = classify((one.float() + sigma * part).to(one.dtype))
            if logits.dim() != 2 or len(logits) != len(part):
                got = tuple(logits.shape)
                raise ValueError(f"the classifier returned shape {got} for {len(part)} inputs; expected (inputs, classes).")
            counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device) if counts is None else counts
            counts.scatter_add_(0, logits.argmax(1), (~logits.isnan().any(1)).long())
    assert counts is not None
    return counts.cpu()
