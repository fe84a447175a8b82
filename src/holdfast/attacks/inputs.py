"""What an attack on continuous inputs returns, and several of them taken together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from holdfast.attacks.ball import Bounds
from holdfast.attacks.flags import Flag, black_box_wins, warn
from holdfast.attacks.threat import Json, Norm


@dataclass(frozen=True)
class AttackedInputs:
    """Adversarial inputs, the threat model they were found under, and what speaks against trusting them."""

    attack: str
    inputs: Tensor  # (B, ...), within the ball and the bounds
    success: Tensor  # (B,) bool: the attacked input is classified wrongly
    already_wrong: Tensor  # (B,) bool: so was the clean one
    distances: Tensor  # (B,) float64: how far each input was moved
    budget: float
    norm: Norm
    bounds: Bounds
    steps: int
    restarts: int
    seed: int | None  # None: nothing was random
    black_box: bool = False  # saw no gradients
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def clean_accuracy(self) -> float:
        return 1 - _mean(self.already_wrong)

    @property
    def accuracy(self) -> float:
        """Robust accuracy: the share that is right and stays right."""
        return 1 - _mean(self.success)

    @property
    def rate(self) -> float:
        """The realised rate: the share of inputs that were right and were broken."""
        right = ~self.already_wrong
        return float((self.success & right).sum() / right.sum().clamp_min(1))

    @property
    def realised(self) -> float:
        """The largest distance that was moved; at most the budget."""
        return float(self.distances.max()) if self.distances.numel() else 0.0

    def summary(self) -> dict[str, Json]:
        """What to store with a result."""
        return {
            "attack": self.attack,
            "budget": self.budget,
            "norm": self.norm,
            "bounds": None if self.bounds is None else list(self.bounds),
            "realised": self.realised,
            "rate": self.rate,
            "accuracy": self.accuracy,
            "clean_accuracy": self.clean_accuracy,
            "examples": self.success.numel(),
            "steps": self.steps,
            "restarts": self.restarts,
            "seed": self.seed,
            "black_box": self.black_box,
            "options": dict(self.options),
            "flags": [flag.summary() for flag in self.flags],
        }


def worst_of(*results: AttackedInputs) -> AttackedInputs:
    """Several attacks on the same inputs under one threat model as one: an example is broken if any of them broke it.

    Carries all their flags, and one more where an attack without gradients broke what those with gradients did not.
    """
    if not results:
        raise ValueError("worst_of needs at least one result.")
    first = results[0]
    for other in results[1:]:
        same = (other.budget, other.norm, other.bounds) == (first.budget, first.norm, first.bounds)
        if not same or other.inputs.shape != first.inputs.shape:
            raise ValueError(
                f"{first.attack} and {other.attack} attacked different inputs or under different threat models "
                f"({first.norm} {first.budget:g} and {other.norm} {other.budget:g}); they cannot be counted as one."
            )
    worst = first
    for other in results[1:]:
        better = other.success & ~worst.success
        worst = replace(
            worst,
            inputs=torch.where(per_row(better, worst.inputs), other.inputs, worst.inputs),
            success=worst.success | other.success,
            distances=torch.where(better, other.distances, worst.distances),
        )
    white = [result.success for result in results if not result.black_box]
    black = [result for result in results if result.black_box]
    flags = list(dict.fromkeys(flag for result in results for flag in result.flags))
    if white and black:
        names = " and ".join(result.attack for result in black)
        flags += warn(*black_box_wins(torch.stack(white).any(0), torch.stack([b.success for b in black]).any(0), names))
    return replace(
        worst,
        attack="worst of " + ", ".join(result.attack for result in results),
        seed=next((result.seed for result in results if result.seed is not None), None),
        steps=max(result.steps for result in results),
        restarts=max(result.restarts for result in results),
        black_box=not white,
        options={result.attack: result.summary() for result in results},
        flags=tuple(flags),
    )


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """`mask (R,)` in a shape that broadcasts over the rows of `like (R, ...)`."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def _mean(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0
