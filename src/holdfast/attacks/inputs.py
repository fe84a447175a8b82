"""What all attacks on continuous inputs share: the threat model, the search for the worst input, and the result.

`pixels` has the attacks themselves, and `attack_curve` runs one at several budgets. The attacker may also leave an input
unchanged: if the clean input is misclassified and an attack would correct it, the clean input is kept.

B inputs in a batch
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypedDict, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.flags import (
    AttackResult,
    Flag,
    Model,
    black_box_flag,
    check_model,
    checked_logits,
    input_gradients,
    warn,
)
from holdfast.attacks.threat import Bounds, Json, check_bounds, check_budget, check_count, distances, project
from holdfast.errors import require_known
from holdfast.routing.bounds import Norm, check_norm


@dataclass(frozen=True)
class AttackedInputs(AttackResult):
    """Adversarial inputs, the threat model they were found under, and flags that say when not to trust them."""

    stored: ClassVar[tuple[str, ...]] = ("attack", "budget", "norm", "bounds", "realised", "rate", "accuracy")
    stored += ("clean_accuracy", "examples", "steps", "restarts", "seed", "black_box", "options", "flags")
    attack: str
    inputs: Tensor  # (B, ...), within the ball and the bounds
    success: Tensor  # (B,) bool: the attacked input is misclassified
    already_wrong: Tensor  # (B,) bool: the clean input is misclassified
    distances: Tensor  # (B,) float64: the size of each perturbation
    budget: float
    norm: Norm
    bounds: Bounds
    steps: int = 1
    restarts: int = 1
    seed: int | None = None  # None if the attack is deterministic
    black_box: bool = False  # the attack used no gradients
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    ranks: Tensor | None = None  # (B,) int64: the largest number of classes above the right one at any input tried
    shared: bool = False  # all inputs have one perturbation, so that results cannot be mixed input by input

    @property
    def clean_accuracy(self) -> float:
        return 1 - _mean(self.already_wrong)

    @property
    def accuracy(self) -> float:
        """Robust accuracy: the share of inputs that are classified correctly, before and after the attack."""
        return 1 - _mean(self.success)

    @property
    def rate(self) -> float:
        """The realised rate: the share of correctly classified inputs that are misclassified after the attack."""
        right = ~self.already_wrong
        return float((self.success & right).sum() / right.sum().clamp_min(1))

    def beyond(self, top: int) -> Tensor | None:
        """Return (B,) bool: at some input tried, the right class is not among the `top` largest logits; None: not known.

        For `top` of 1 this is `success`. For more, the attack must have been run with this `top`, or it may stop earlier.
        """
        if top == 1:
            return self.success
        return None if self.ranks is None else self.ranks >= top

    @property
    def realised(self) -> float:
        """The size of the largest perturbation; at most the budget."""
        return float(self.distances.max()) if self.distances.numel() else 0.0

    @property
    def examples(self) -> int:
        return self.success.numel()


def worst_of(*results: AttackedInputs) -> AttackedInputs:
    """Combine several attacks on the same inputs under one threat model: an attack succeeds if any of them does.

    The result has the flags of all, and one more if an attack without gradients succeeded where those with gradients
    failed.
    """
    if not results:
        raise ValueError("worst_of needs at least one result.")
    first = results[0]
    worst = first
    for other in results[1:]:
        same = (other.budget, other.norm, other.bounds) == (first.budget, first.norm, first.bounds)
        if not same or other.inputs.shape != first.inputs.shape:
            raise ValueError(
                f"{first.attack} and {other.attack} attacked different inputs or under different threat models "
                f"({first.norm} {first.budget:g} and {other.norm} {other.budget:g}); they cannot be combined."
            )
        worst = _with_successes(worst, other)
    white = [result.success for result in results if not result.black_box]
    black = [result for result in results if result.black_box]
    flags = list(dict.fromkeys(flag for result in results for flag in result.flags))
    if white and black:
        names = " and ".join(result.attack for result in black)
        flags += warn(*black_box_flag(torch.stack(white).any(0), torch.stack([b.success for b in black]).any(0), names))
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


def _with_successes(result: AttackedInputs, other: AttackedInputs) -> AttackedInputs:
    """Return a result in which inputs that only the other attack got misclassified are those of the other attack.

    With a shared perturbation it is that of the attack that got more inputs misclassified.
    """
    if result.shared:
        best = other if int(other.success.sum()) > int(result.success.sum()) else result
        return replace(result, inputs=best.inputs, success=best.success, distances=best.distances, ranks=best.ranks)
    better = other.success & ~result.success
    return replace(
        result,
        inputs=torch.where(per_row(better, result.inputs), other.inputs, result.inputs),
        success=result.success | other.success,
        distances=torch.where(better, other.distances, result.distances),
        ranks=None if result.ranks is None or other.ranks is None else torch.maximum(result.ranks, other.ranks),
    )


def attack_curve(attack: Callable[[float], AttackedInputs], budgets: Sequence[float]) -> list[AttackedInputs]:
    """Return the results of `attack(budget)` for all budgets, the smallest first, each with what smaller budgets found.

    `attack` attacks the same inputs each time. A budget of 0 is the clean error. An input within a small ball is also within
    every larger one. So what an attack has found at a smaller budget counts at the larger ones too: the error never falls
    with the budget, as for the best attacker, which attacks alone need not do. A universal perturbation counts as a whole.
    """
    points: list[AttackedInputs] = []
    for budget in ascending(budgets):
        found = attack(budget)
        if points:
            smaller = points[-1]
            if found.inputs.shape != smaller.inputs.shape or (found.norm, found.bounds) != (smaller.norm, smaller.bounds):
                raise ValueError(f"{found.attack} did not attack the same inputs in the same norm at every budget.")
            found = replace(_with_successes(found, smaller), flags=tuple(dict.fromkeys((*smaller.flags, *found.flags))))
        points.append(found)
    return points


def ascending(budgets: Sequence[float]) -> list[float]:
    """Return the budgets sorted, each once. Raise ValueError if there are none, or if one is not a budget."""
    for budget in budgets:
        check_budget(budget)
    if not budgets:
        raise ValueError("there are no budgets; a curve needs at least one.")
    return sorted(set(budgets))


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """Return `mask (R,)` in a shape that broadcasts over the rows of `like (R, ...)`."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def _mean(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0


Loss = Literal["cross_entropy", "margin"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


class InputSearch:
    """Keep the worst input found so far for each example of a batch; attacks report every input they try."""

    def __init__(self, threat: "Threat", model: Model, clean: Tensor, labels: Tensor) -> None:
        self.threat, self.model, self.clean, self.labels = threat, model, clean.detach(), labels
        self.radius = torch.full((clean.shape[0],), threat.budget, dtype=torch.float64, device=clean.device)
        with torch.no_grad():
            logits = checked_logits(model(self.clean), self.clean)
        self.best = self.clean
        self.wrong = self.already_wrong = logits.argmax(-1) != labels
        self.loss = losses(logits, labels, threat.loss)
        self.ranks = ranks_of(logits, labels)
        self.top = threat.top if threat.top < logits.shape[-1] else 1  # among all classes, every class has a place

    @property
    def finished(self) -> Tensor:
        """(B,) bool: nothing is left to attack, because the right class is no longer among the `top` largest logits."""
        return self.wrong if self.top == 1 else self.ranks >= self.top

    def projected(self, perturbed: Tensor) -> Tensor:
        """Return the inputs projected onto the allowed ball and bounds."""
        return project(perturbed, self.clean, self.radius, self.threat.norm, self.threat.bounds)

    def try_inputs(self, perturbed: Tensor) -> None:
        """Run the model on these inputs and keep those that are worse."""
        with torch.no_grad():
            self.keep_worst(perturbed, self.model(perturbed))

    def gradient_at(self, perturbed: Tensor) -> Tensor:
        """Do as `try_inputs`, and return the gradient of the loss at these inputs."""
        total = lambda logits: losses(logits, self.labels, self.threat.loss).sum()  # noqa: E731
        logits, gradient = input_gradients(self.model, perturbed, total)
        self.keep_worst(perturbed, logits)
        return gradient

    def keep_worst(self, perturbed: Tensor, logits: Tensor) -> None:
        """Keep inputs that are worse than the worst so far: misclassified before correct, then the higher loss."""
        wrong, loss = logits.argmax(-1) != self.labels, losses(logits, self.labels, self.threat.loss)
        worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (loss > self.loss))
        self.best = torch.where(per_row(worse, perturbed), perturbed.detach(), self.best)
        self.wrong, self.loss = torch.where(worse, wrong, self.wrong), torch.where(worse, loss, self.loss)
        self.ranks = torch.maximum(self.ranks, ranks_of(logits, self.labels))


def losses(logits: Tensor, labels: Tensor, kind: Loss) -> Tensor:
    """Return (B,): the cross-entropy, or the margin max_{c != y} logit_c - logit_y.

    The gradient of the margin does not vanish where the model is confident.
    """
    logits = logits.float()
    if kind == "cross_entropy":
        return F.cross_entropy(logits, labels, reduction="none")
    own = F.one_hot(labels, logits.shape[-1]).bool()
    return logits.masked_fill(own, -math.inf).amax(-1) - logits.masked_fill(~own, -math.inf).amax(-1)


def ranks_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) int64: how many classes are above the right one. Of equal logits the lower class is above, as in argmax.

    A logit that is NaN is above all others, so that NaN is never right.
    """
    own = logits.gather(1, labels.unsqueeze(1))
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    above: Tensor = ~(logits <= own) | ((logits == own) & earlier)
    return above.sum(1)


class ThreatOptions(TypedDict, total=False):
    """The fields of `Threat` beside its budget, as keywords of an attack."""

    norm: Norm
    bounds: Bounds
    loss: Loss
    top: int
    batch: int | None
    check: bool


@dataclass(frozen=True)
class Threat:
    """The attacker's budget, norm, bounds and loss, checked; and the loop over batches that all these attacks share."""

    budget: float
    norm: Norm = "linf"
    bounds: Bounds = (0.0, 1.0)
    loss: Loss = "cross_entropy"
    top: int = 1  # an input is attacked until the right class is not among the `top` largest logits; success means top 1
    batch: int | None = None  # inputs that the model gets at once; None: all
    check: bool = True  # whether the model is checked for reasons not to trust the result

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_norm(self.norm)
        check_count(self.top, "top")
        require_known("loss", self.loss, LOSSES)
        if self.batch is not None:
            check_count(self.batch, "batch")

    def run(
        self,
        attack: Callable[[InputSearch, int], None],
        model: Model,
        inputs: Tensor,
        labels: Tensor,
        *,
        name: str,
        options: Mapping[str, Json] | None = None,
        **record: Any,
    ) -> AttackedInputs:
        """Call `attack(search, index of the batch's first input)` on each batch, and return what it found as one result.

        record  further fields of the result: steps, restarts, seed, black_box
        """
        check_bounds(inputs, self.bounds)
        if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise ValueError(f"labels are {got}; expected one class number for each of the {inputs.shape[0]} inputs.")
        labels = labels.long()
        flags = warn(*check_model(model, inputs, labels)) if self.check else ()
        size = self.batch or max(inputs.shape[0], 1)
        searches = []
        for first in range(0, inputs.shape[0], size):
            search = InputSearch(self, model, inputs[first : first + size], labels[first : first + size])
            attack(search, first)
            searches.append(search)
        adversarial = torch.cat([inputs[:0].detach(), *(search.best for search in searches)])
        return AttackedInputs(
            attack=name,
            inputs=adversarial,
            success=torch.cat([labels[:0].bool(), *(search.wrong for search in searches)]),
            already_wrong=torch.cat([labels[:0].bool(), *(search.already_wrong for search in searches)]),
            distances=distances(adversarial, inputs, self.norm),
            budget=self.budget,
            norm=self.norm,
            bounds=self.bounds,
            options={"loss": self.loss, **({"top": self.top} if self.top > 1 else {}), **(options or {})},
            flags=flags,
            ranks=torch.cat([labels[:0], *(search.ranks for search in searches)]),
            **record,
        )
