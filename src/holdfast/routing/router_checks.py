"""What a router refuses: parts that do not fit together, and tools that cannot trace or export it."""

import math
from collections.abc import Sequence

import torch

from holdfast.kernels.torch_internals import is_exporting_to_onnx
from holdfast.routing.parts import Informer, Score, Selector
from holdfast.routing.records import Context


def check_parts(score: Score, select: Selector, inform: Sequence[Informer], drops: bool = False) -> None:
    """Raise ValueError if these parts cannot work as one router; `drops`: it has expert dropout."""
    for part, kind in ((score, Score), (select, Selector), *((informer, Informer) for informer in inform)):
        if not isinstance(part, kind):
            raise ValueError(f"Router(score, select, inform) expected a {kind.__name__}, but got a {type(part).__name__}.")
    if not (hasattr(score, "dim") and hasattr(score, "experts")):
        raise ValueError(f"{type(score).__name__} must set self.dim and self.experts in its constructor.")
    for side in ("expert", "token"):
        count = sum(informer.side == side for informer in inform)
        if count > 1:
            raise ValueError(f"there are {count} informers on the {side} side; a Router takes at most one on each side.")
    if inform and (reason := select.declares.refuses_informers) is not None:
        raise ValueError(f"{type(select).__name__} takes no {type(inform[0]).__name__}: it {reason}; remove one of them.")
    for informer in inform:
        if informer.side == "token" and score.declares.scores_sequence:
            raise ValueError(
                f"{type(score).__name__} gives all tokens of a sequence the same scores, so {type(informer).__name__} "
                "would change nothing; remove one of them."
            )
    if select.declares.asks_others and not score.declares.scores_all:
        raise ValueError(
            f"{type(score).__name__} gives a token scores for its own experts only, so a token without a place has no "
            'other expert to ask; limit it with policy="drop".'
        )
    if select.noise is not None and not select.declares.takes_noise:
        raise ValueError(
            f"{type(select).__name__} does not select by scores in training, so {type(select.noise).__name__} would "
            "change nothing; remove the noise."
        )
    if drops and (reason := select.declares.refuses_dropout) is not None:
        raise ValueError(f"{type(select).__name__} takes no expert dropout: it {reason}; remove drop.")


def check_gradient_scaling(largest: float | None, select: Selector) -> None:
    """Raise ValueError if gradients cannot be scaled by the loads of experts, with `largest` as the largest factor."""
    if largest is None:
        return
    if not 1 < largest < math.inf:
        raise ValueError(f"gradient_scaling is {largest}; the largest factor must be finite and above 1, such as 10.")
    if select.layer_kind != "moe":
        raise ValueError(
            f"{type(select).__name__} uses every expert for every token, so their loads are equal and gradient_scaling "
            "would change nothing; remove it."
        )


def require_usable(layer: str, training: bool, context: Context) -> None:
    """Raise ValueError if a forward of a layer with disabled experts trains, or replays recorded routes."""
    if training:
        raise ValueError(f"{layer}: experts are disabled in evaluation only; call model.eval().")
    if context.replayed is not None:
        raise ValueError(f"{layer}: recorded routes may name a disabled expert; replay them without holdfast.disable.")


def refuse_tracing(layer: str, select: Selector, training: bool) -> None:
    """Raise ValueError if a forward of this layer is traced or exported by a tool that does not support its router."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ValueError(
            f"{layer}: torch.jit.trace and torch.onnx.export(dynamo=False) cannot record a router; use "
            "torch.export.export or torch.onnx.export(dynamo=True)."
        )
    if not is_exporting_to_onnx():
        return
    if not select.declares.in_onnx:
        raise ValueError(
            f"{layer}: ONNX lacks operators that {type(select).__name__} needs; use torch.export.export, or "
            "choose another router."
        )
    if training:
        raise ValueError(
            f"{layer}: this router is in training mode, and an ONNX model cannot update router state; call "
            "model.eval() before torch.onnx.export."
        )
