"""What a router refuses: parts that do not fit together when it is built, and calls that it cannot answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.kernels.torch_internals import is_exporting, is_exporting_to_onnx
from holdfast.routing.parts import Informer, Score, Selector
from holdfast.routing.records import Context

if TYPE_CHECKING:
    from holdfast.routing.router import Router


def check_parts(score: Score, select: Selector, inform: Sequence[Informer]) -> None:
    """Raise ValueError if these parts cannot work as one router."""
    for part, kind in ((score, Score), (select, Selector), *((informer, Informer) for informer in inform)):
        if not isinstance(part, kind):
            raise ValueError(f"Router(score, select, inform) expected a {kind.__name__}, but got a {type(part).__name__}.")
    for side in ("expert", "token"):
        count = sum(informer.side == side for informer in inform)
        if count > 1:
            raise ValueError(f"there are {count} informers on the {side} side; a Router takes at most one on each side.")
    if inform and not select.takes_informers:
        raise ValueError(
            f"{type(select).__name__} does not select by gates, so {type(inform[0]).__name__} would change nothing; "
            "remove one of them."
        )
    for informer in inform:
        if informer.side == "token" and score.scores_sequence:
            raise ValueError(
                f"{type(score).__name__} gives all tokens of a sequence the same scores, so {type(informer).__name__} "
                "would change nothing; remove one of them."
            )
    if select.asks_others and not score.scores_all:
        raise ValueError(
            f"{type(score).__name__} gives a token scores for its own experts only, so a token without a place has no "
            'other expert to ask; limit it with policy="drop".'
        )
    if select.noise is not None and not select.takes_noise:
        raise ValueError(
            f"{type(select).__name__} does not select by scores in training, so {type(select.noise).__name__} would "
            "change nothing; remove the noise."
        )


def checked_tokens(router: "Router", tokens: Tensor, context: Context) -> Tensor:
    """Return `tokens` as (B,N,d); raise ValueError if this router cannot read them, or not in this way."""
    _refuse_tracing(router)
    traits = router.traits
    if context.cache is not None and not traits.cacheable:
        raise ValueError(
            "this router declares cacheable=False: with a RouterCache its routing is not that of one forward; pass "
            "all tokens in one forward, without a cache."
        )
    if tokens.dim() == 2 and not traits.sequence_aware:
        tokens = tokens.unsqueeze(0)
    if tokens.dim() != 3:
        expected = "(B, N, d), because it reads whole sequences" if traits.sequence_aware else "(B, N, d) or (T, d)"
        raise ValueError(f"{router.layer}: tokens have shape {tuple(tokens.shape)}; this router takes {expected}.")
    if not tokens.is_floating_point():
        raise ValueError(f"{router.layer}: tokens have dtype {tokens.dtype}; expected a floating-point dtype.")
    if tokens.shape[-1] != router.dim:
        raise ValueError(f"{router.layer}: tokens have width {tokens.shape[-1]}; this router was built for {router.dim}.")
    return tokens


def _refuse_tracing(router: "Router") -> None:
    """Raise ValueError if this forward is traced or exported by a tool that does not support routers."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ValueError(
            f"{router.layer}: torch.jit.trace and torch.onnx.export(dynamo=False) cannot record a router; use "
            "torch.export.export or torch.onnx.export(dynamo=True)."
        )
    if not is_exporting() or not is_exporting_to_onnx():
        return
    if not router.select.in_onnx:
        raise ValueError(
            f"{router.layer}: ONNX lacks operators that {type(router.select).__name__} needs; use torch.export.export, or "
            "choose another router."
        )
    if router.training:
        raise ValueError(
            f"{router.layer}: this router is in training mode, and an ONNX model cannot update router state; call "
            "model.eval() before torch.onnx.export."
        )
