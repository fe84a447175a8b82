"""What an attack on continuous inputs returns, and several of them taken together.

The worst inputs found so far: what every attack on continuous inputs shares.

An attacker may also do nothing: where the clean input is wrong and an attack would make it right, the clean one stays.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.flags import Flag, Model, black_box_wins, check_model, checked, input_gradients, warn
from holdfast.attacks.threat import (
    Bounds,
    Json,
    Norm,
    check_bounds,
    check_budget,
    check_count,
    check_norm,
    distances,
    project,
)
from holdfast.errors import unknown


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


Loss = Literal["cross_entropy", "margin"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


class Search:
    """The worst inputs found so far for one batch; every attack reports its tries here."""

    def __init__(self, threat: "Threat", model: Model, clean: Tensor, labels: Tensor) -> None:
        self.threat, self.model, self.clean, self.labels = threat, model, clean.detach(), labels
        self.radius = torch.full((clean.shape[0],), threat.budget, dtype=torch.float64, device=clean.device)
        with torch.no_grad():
            logits = checked(model(self.clean), self.clean)
        self.best = self.clean
        self.wrong = logits.argmax(-1) != labels
        self.already_wrong = self.wrong
        self.loss = losses(logits, labels, threat.loss)

    @property
    def done(self) -> bool:
        return bool(self.wrong.all())

    def projected(self, moved: Tensor) -> Tensor:
        return project(moved, self.clean, self.radius, self.threat.norm, self.threat.bounds)

    def look(self, moved: Tensor) -> None:
        """Try these inputs."""
        with torch.no_grad():
            self.note(moved, self.model(moved))

    def climb(self, moved: Tensor) -> Tensor:
        """Try these inputs, and return the gradient of the loss there."""
        logits, gradient = input_gradients(
            self.model, moved, lambda logits: losses(logits, self.labels, self.threat.loss).sum()
        )
        self.note(moved, logits)
        return gradient

    def note(self, moved: Tensor, logits: Tensor) -> None:
        """Keep those that are worse than the worst so far: wrong before right, then by loss."""
        wrong, loss = logits.argmax(-1) != self.labels, losses(logits, self.labels, self.threat.loss)
        worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (loss > self.loss))
        self.best = torch.where(per_row(worse, moved), moved.detach(), self.best)
        self.wrong, self.loss = torch.where(worse, wrong, self.wrong), torch.where(worse, loss, self.loss)


def losses(logits: Tensor, labels: Tensor, kind: Loss) -> Tensor:
    """(B,): cross-entropy, or max_{c != y} logit_c - logit_y, whose gradient does not vanish when a model is sure."""
    logits = logits.float()
    if kind == "cross_entropy":
        return F.cross_entropy(logits, labels, reduction="none")
    own = F.one_hot(labels, logits.shape[-1]).bool()
    return logits.masked_fill(own, -math.inf).amax(-1) - logits.masked_fill(~own, -math.inf).amax(-1)


class Threat:
    """What an attacker may do and wants, checked; and the loop over batches that all these attacks share."""

    def __init__(self, budget: float, norm: Norm, bounds: Bounds, loss: Loss) -> None:
        check_budget(budget)
        check_norm(norm)
        if loss not in LOSSES:
            raise ValueError(unknown("loss", loss, LOSSES))
        self.budget, self.norm, self.bounds, self.loss = budget, norm, bounds, loss

    def run(
        self,
        attack: Callable[[Search, int], None],
        model: Model,
        inputs: Tensor,
        labels: Tensor,
        *,
        name: str,
        batch: int | None,
        check: bool,
        steps: int = 1,
        restarts: int = 1,
        seed: int | None = None,
        black_box: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> AttackedInputs:
        """`attack(search, number of the batch's first input)` on each batch, and what it found as one result."""
        check_bounds(inputs, self.bounds)
        labels = checked_labels(inputs, labels)
        if batch is not None:
            check_count(batch, "batch")
        flags = warn(*check_model(model, inputs, labels)) if check else ()
        size = batch or max(inputs.shape[0], 1)
        moved, success, already = [inputs[:0].detach()], [labels[:0].bool()], [labels[:0].bool()]
        for first in range(0, inputs.shape[0], size):
            search = Search(self, model, inputs[first : first + size], labels[first : first + size])
            attack(search, first)
            moved.append(search.best)
            success.append(search.wrong)
            already.append(search.already_wrong)
        adversarial = torch.cat(moved)
        return AttackedInputs(
            attack=name,
            inputs=adversarial,
            success=torch.cat(success),
            already_wrong=torch.cat(already),
            distances=distances(adversarial, inputs, self.norm),
            budget=self.budget,
            norm=self.norm,
            bounds=self.bounds,
            steps=steps,
            restarts=restarts,
            seed=seed,
            black_box=black_box,
            options={"loss": self.loss, **(options or {})},
            flags=flags,
        )


def checked_labels(inputs: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ValueError(f"labels are {got}; expected one class number for each of the {inputs.shape[0]} inputs.")
    return labels.long()
