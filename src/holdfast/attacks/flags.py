"""Warnings that say when a robustness number cannot be trusted (after AutoAttack's checks, Croce & Hein 2020).

An attack that fails proves nothing if the forward is random (gradients of one draw, scores of another), if gradients
vanish (there was no direction to follow), or if an attack without gradients does better than one with them.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.threat import Json

Model = Callable[[Tensor], Tensor]  # inputs (B, ...) to logits (B, classes)
Kind = Literal[
    "train mode",
    "randomised forward",
    "zero gradients",
    "not finite",
    "probabilities",
    "black box beats white box",
    "nothing changed",
]
TOLERANCE = 1e-5  # two forwards that differ by more, relative to the largest logit, are random; GPU kernels differ by less
LOOKED_AT = 64  # examples that the checks run on


class AttackWarning(UserWarning):
    """A result of an attack carries a flag."""


@dataclass(frozen=True)
class Flag:
    """One reason not to trust a result."""

    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    def summary(self) -> Json:
        return {"kind": self.kind, "detail": self.detail}


def warn(*flags: Flag) -> tuple[Flag, ...]:
    """The flags, each also said as a warning."""
    for flag in flags:
        warnings.warn(str(flag), AttackWarning, stacklevel=3)
    return flags


def check_model(model: Model, inputs: Tensor, labels: Tensor) -> tuple[Flag, ...]:
    """What speaks against trusting attacks on this model, from two forwards and a backward on the first few inputs."""
    inputs, labels = inputs[:LOOKED_AT], labels[:LOOKED_AT]
    if inputs.shape[0] == 0:
        return train_mode(model)
    with torch.no_grad():
        once, again = checked(model(inputs), inputs), model(inputs)
    flags = [*train_mode(model), *randomised(once, again), *_not_finite(once), *_probabilities(once)]
    labels = labels.long()
    logits, gradients = input_gradients(model, inputs, lambda out: F.cross_entropy(out.float(), labels, reduction="sum"))
    wrong = logits.argmax(-1) != labels
    return (*flags, *zero_gradients(gradients, among=~wrong, what="inputs that are classified correctly"))


def checked(logits: Tensor, inputs: Tensor) -> Tensor:
    if logits.dim() != 2 or logits.shape[0] != inputs.shape[0]:
        shape = tuple(logits.shape)
        raise ValueError(f"the model gave shape {shape} for {inputs.shape[0]} inputs; expected logits (inputs, classes).")
    return logits


def input_gradients(model: Model, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (without their graph), and the gradient of `loss(logits)` in the inputs; 0 where none reaches them."""
    inputs = inputs.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(inputs)
        total = loss(logits)
    if not total.requires_grad:
        return logits.detach(), torch.zeros_like(inputs)
    (gradients,) = torch.autograd.grad(total, inputs, allow_unused=True)
    return logits.detach(), torch.zeros_like(inputs) if gradients is None else gradients


def train_mode(model: object) -> tuple[Flag, ...]:
    """Only a module says whether it trains; of a plain function nothing is known."""
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        return (Flag("train mode", "the model or a part of it is in training mode; call model.eval() first."),)
    return ()


def randomised(once: Tensor, again: Tensor) -> tuple[Flag, ...]:
    """Two evaluations of the same inputs."""
    if once.numel() == 0:
        return ()
    scale = 1 + float(once.detach().abs().nan_to_num(0.0, 0.0).amax())
    apart = float((once - again).detach().abs().nan_to_num(0.0).amax())
    if apart <= TOLERANCE * scale:
        return ()
    detail = f"two evaluations of the same inputs differ by {apart:.2g}; average over the randomness inside the attack."
    return (Flag("randomised forward", detail),)


def zero_gradients(gradients: Tensor, among: Tensor | None = None, what: str = "inputs") -> tuple[Flag, ...]:
    """`gradients (B, ...)` that are 0 everywhere, for those of the B examples that count."""
    vanish = ~(gradients.detach() != 0).flatten(1).any(1)  # NaN is not 0, and has a flag of its own
    vanish = vanish if among is None else vanish[among]
    if not vanish.any():
        return ()
    detail = f"no gradient reaches {int(vanish.sum())} of {vanish.numel()} {what}: attacks that follow it are blind there."
    return (Flag("zero gradients", detail),)


def black_box_wins(white: Tensor, black: Tensor, name: str) -> tuple[Flag, ...]:
    """`white`, `black` (B,) bool: which examples fell to an attack with gradients, and to one without (called `name`)."""
    extra = int((black & ~white).sum())
    if extra == 0:
        return ()
    detail = (
        f"{name}, which sees no gradients, broke {extra} of {white.numel()} examples that attacks with gradients did not: "
        "the gradients mislead, or the attacks need more steps."
    )
    return (Flag("black box beats white box", detail),)


def nothing_changed(rate: float, changed: int, what: str) -> tuple[Flag, ...]:
    if rate == 0 or changed > 0:
        return ()
    return (
        Flag(
            "nothing changed", f"the rate was {rate:g}, but no {what} was changed: the text is short or has none to change."
        ),
    )


def _not_finite(logits: Tensor) -> tuple[Flag, ...]:
    if logits.isfinite().all():
        return ()
    return (Flag("not finite", "some logits of clean inputs are NaN or infinite."),)


def _probabilities(logits: Tensor) -> tuple[Flag, ...]:
    """Cross-entropy takes logits; a softmax before it flattens its gradient."""
    sums = logits.float().sum(-1)
    if logits.shape[-1] > 1 and bool((logits >= 0).all() & ((sums - 1).abs() < 1e-3).all()):
        return (Flag("probabilities", "the outputs look like probabilities; attacks need the logits before the softmax."),)
    return ()
