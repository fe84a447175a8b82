"""Warnings that say when a robustness number cannot be trusted (after AutoAttack's checks, Croce & Hein 2020).

An attack that fails proves nothing if the forward is random (gradients of one draw, scores of another), if gradients
vanish (there was no direction to follow), or if an attack without gradients does better than one with them.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.threat import Json, gradient

Model = Callable[[Tensor], Tensor]  # inputs (B, ...) to logits (B, classes)
Kind = Literal[
    "train mode",
    "randomised forward",
    "zero gradients",
    "not finite",
    "probabilities",
    "black box beats white box",
    "more steps help",
    "nothing changed",
    "still improving",
    "lower bound",
]
TOLERANCE = 1e-5  # two forwards that differ by more, relative to the largest logit, are random; GPU kernels differ by less
LATE_SHARE = 0.1  # of successes in the last quarter of the steps, above which an attack needs more steps
CHECKED_EXAMPLES = 64  # examples that the checks run on


class AttackWarning(UserWarning):
    """Warn that the result of an attack has a flag."""


@dataclass(frozen=True)
class Flag:
    """One reason not to trust a result."""

    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    def summary(self) -> Json:
        return vars(self).copy()


class AttackResult:
    """What the results of all attacks have in common (abstract)."""

    stored: ClassVar[tuple[str, ...]]  # the fields and properties of the summary

    def summary(self) -> dict[str, Json]:
        """Return what to store as JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.stored}
        for name, value in found.items():
            if isinstance(value, tuple):
                found[name] = [entry.summary() if isinstance(entry, Flag) else entry for entry in value]
        return found


def warn(*flags: Flag) -> tuple[Flag, ...]:
    """Issue each flag as a warning, and return the flags."""
    for flag in flags:
        warnings.warn(str(flag), AttackWarning, stacklevel=3)
    return flags


def flags_of_layers(found: Iterable[tuple[int, Flag]]) -> list[dict[str, Json]]:
    """Return the summary of each flag once, with the layers that it is about."""
    layers: dict[Flag, list[int]] = {}
    for layer, flag in dict.fromkeys(found):
        layers.setdefault(flag, []).append(layer)
    where = {flag: f"layer{'s' if at[1:] else ''} {', '.join(map(str, at))}" for flag, at in layers.items()}
    return [{"kind": flag.kind, "detail": f"{where[flag]}: {flag.detail}"} for flag in layers]


def check_model(model: Model, inputs: Tensor, labels: Tensor) -> tuple[Flag, ...]:
    """Return the reasons not to trust attacks on this model, from two forwards and one backward on the first few inputs."""
    inputs, labels = inputs[:CHECKED_EXAMPLES], labels[:CHECKED_EXAMPLES]
    if inputs.shape[0] == 0:
        return train_mode_flag(model)
    with torch.no_grad():
        once, again = checked_logits(model(inputs), inputs), model(inputs)
    flags = [*train_mode_flag(model), *randomised_flag(once, again)]
    if not once.isfinite().all():
        flags.append(Flag("not finite", "some logits of clean inputs are NaN or infinite."))
    # Cross-entropy expects logits: a softmax before it flattens its gradient.
    sums = once.float().sum(-1)
    if once.shape[-1] > 1 and bool((once >= 0).all() & ((sums - 1).abs() < 1e-3).all()):
        detail = "the outputs look like probabilities; attacks need the logits before the softmax."
        flags.append(Flag("probabilities", detail))
    labels = labels.long()
    logits, gradients = input_gradients(model, inputs, lambda out: F.cross_entropy(out.float(), labels, reduction="sum"))
    wrong = logits.argmax(-1) != labels
    return (*flags, *zero_gradient_flag(gradients, among=~wrong, what="inputs that are classified correctly"))


def checked_logits(logits: Tensor, inputs: Tensor) -> Tensor:
    """Return `logits`. Raise ValueError unless they have shape (inputs, classes)."""
    if logits.dim() != 2 or logits.shape[0] != inputs.shape[0]:
        shape, count = tuple(logits.shape), len(inputs)
        raise ValueError(f"the model returned shape {shape} for {count} inputs; expected logits (inputs, classes).")
    return logits


def input_gradients(model: Model, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the detached logits and the gradient of `loss(logits)` in the inputs, 0 where no gradient reaches them."""
    inputs = inputs.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(inputs)
        total = loss(logits)
    return logits.detach(), gradient(total, inputs)


def train_mode_flag(model: object) -> tuple[Flag, ...]:
    """Flag a module in training mode. A callable that is no module has no mode, and gets no flag."""
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        return (Flag("train mode", "the model or a part of it is in training mode; call model.eval() first."),)
    return ()


def randomised_flag(once: Tensor, again: Tensor) -> tuple[Flag, ...]:
    """Flag a forward whose two evaluations of the same inputs differ by more than rounding."""
    if once.numel() == 0:
        return ()
    scale = 1 + float(once.detach().abs().nan_to_num(0.0, 0.0).amax())
    apart = float((once - again).detach().abs().nan_to_num(0.0).amax())
    if apart <= TOLERANCE * scale:
        return ()
    detail = f"two evaluations of the same inputs differ by {apart:.2g}; average over the randomness inside the attack."
    return (Flag("randomised forward", detail),)


def zero_gradient_flag(gradients: Tensor, among: Tensor | None = None, what: str = "inputs") -> tuple[Flag, ...]:
    """Flag examples whose gradient, a row of `gradients (B, ...)`, is 0 everywhere; look only at those in `among (B,)`."""
    vanish = ~(gradients.detach() != 0).flatten(1).any(1)  # NaN is not 0, and has a flag of its own
    vanish = vanish if among is None else vanish[among]
    if not vanish.any():
        return ()
    missing = f"no gradient reaches {int(vanish.sum())} of {vanish.numel()} {what}"
    return (Flag("zero gradients", f"{missing}: attacks that follow gradients cannot work there."),)


def black_box_flag(white: Tensor, black: Tensor, name: str) -> tuple[Flag, ...]:
    """Flag examples that only an attack without gradients flipped or got misclassified.

    white, black    (B,) bool: where the attacks with gradients, and the one without (called `name`), succeeded
    """
    extra = int((black & ~white).sum())
    if extra == 0:
        return ()
    where = f"on {extra} of {white.numel()} examples where attacks with gradients failed"
    why = "the gradients are misleading, or the attacks need more steps"
    return (Flag("black box beats white box", f"{name}, which uses no gradients, succeeded {where}: {why}."),)


def late_flag(late: Tensor, found: Tensor, steps: int) -> tuple[Flag, ...]:
    """Flag an attack that still found much in the last steps of its runs.

    late, found    (B,) bool: the examples that the attack succeeded on in its last steps only, and in any step
    """
    count, total = int(late.sum()), int(found.sum())
    if steps < 4 or count <= LATE_SHARE * total:  # fewer steps have no last quarter
        return ()
    detail = f"{count} of {total} successes came in the last quarter of {steps} steps: more steps would find more."
    return (Flag("more steps help", detail),)
