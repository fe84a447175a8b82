"""From scores to experts and weights in one kernel, and back in one: what top-k and its smooth strip do, for softmax gates.

    T tokens, E experts, K slots; scores (T,E) rank the experts, ties to the lower index; amounts (T,E) are what weighs them

The plain PyTorch of routing/selection.py, smoothing.py and rules.py is the specification, and what runs elsewhere.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.ops.operators import operator
from holdfast.ops.triton_support import has_kernels, on_device_of

# How amounts become weights: as they are, over their sum, or as a softmax of the chosen ones.
How = Literal["raw", "shares", "softmax"]
HOWS: tuple[How, ...] = ("raw", "shares", "softmax")
MOST_EXPERTS = 512  # beyond it, counting who is ahead of whom is no longer cheap
SHARE = 32  # tokens whose pairs of experts one program counts
MOST_IN_GRAPH = 128  # the counts of an expert graph stay in one program's registers


class Amounts(NamedTuple):
    """What a rule weighs experts by."""

    values: Tensor  # (T,E)
    how: How


def applies(scores: Tensor) -> bool:
    return has_kernels(scores) and scores.dtype == torch.float32 and scores.shape[-1] <= MOST_EXPERTS


def choose(scores: Tensor, amounts: Amounts, k: int) -> tuple[Tensor, Tensor]:
    """The k best experts (..., k), sorted, and their weights; the gradient reaches the amounts."""
    experts, weights, _ = _apply(scores, amounts, None, k, k, informed=False)
    return experts, weights


def choose_smoothly(
    scores: Tensor, amounts: Amounts, k: int, eps: Tensor, *, most: int, informed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts and weights (..., most) with a strip of width `eps` below the k-th, and all gaps to the k-th (..., E).

    A token's strip ends where expert number `most` + 1 is. Gaps are in the experts' own order, infinite for the k best and
    those beyond `most`; where `informed`, scores are gates and gaps logarithms.
    """
    return _apply(scores, amounts, eps, k, most, informed)


def _apply(
    scores: Tensor, amounts: Amounts, eps: Tensor | None, k: int, width: int, informed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape, experts = scores.shape[:-1], scores.shape[-1]
    flat = scores.detach().contiguous().view(-1, experts)
    values = amounts.values.contiguous().view(-1, experts)
    chosen, weights, gaps = _Choose.apply(flat, values, eps, k, width, HOWS.index(amounts.how), informed)  # type: ignore[no-untyped-call]
    return chosen.view(*shape, -1), weights.view(*shape, -1), gaps.view(-1 if eps is None else shape[0], *shape[1:], experts)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, amounts, eps, k, width, how, informed):  # type: ignore[no-untyped-def]
        chosen, weights, slots, gaps, edges = _choose(scores, amounts, eps, k, width, how, informed)
        ctx.mark_non_differentiable(chosen, gaps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, amounts, eps, weights, slots, edges)
        ctx.rest = k, how, informed
        return chosen, weights, gaps

    @staticmethod
    def backward(ctx, _grad_chosen, grad, _grad_gaps):  # type: ignore[no-untyped-def]
        if grad is None:
            return (None,) * 7
        out = _choose_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest)
        return None, out, *(None,) * 5


def together(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """(E,E): how many real tokens have both experts among their k best `scores (T,E)`."""
    parts: Tensor = _together(scores, real, k)
    return parts.sum(0)


def _choose_on_gpu(
    scores: Tensor, amounts: Tensor, eps: Tensor | None, k: int, width: int, how: int, informed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from holdfast.ops import choose_kernels

    with on_device_of(scores):
        return choose_kernels.choose(scores, amounts, eps, k, width, how, informed)


def _choose_backward_on_gpu(
    grad: Tensor,
    scores: Tensor,
    amounts: Tensor,
    eps: Tensor | None,
    weights: Tensor,
    slots: Tensor,
    edges: Tensor,
    k: int,
    how: int,
    informed: bool,
) -> Tensor:
    from holdfast.ops import choose_kernels

    with on_device_of(scores):
        return choose_kernels.choose_backward(grad, scores, amounts, eps, weights, slots, edges, k, how, informed)


def _together_on_gpu(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    from holdfast.ops import choose_kernels

    with on_device_of(scores):
        return choose_kernels.together(scores, real, k, SHARE)


def _choose_fake(
    scores: Tensor, amounts: Tensor, eps: Tensor | None, k: int, width: int, how: int, informed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = scores.shape
    return (
        scores.new_empty(tokens, width, dtype=torch.int64),
        scores.new_empty(tokens, width),
        scores.new_empty(tokens, experts, dtype=torch.int16),
        scores.new_empty(0 if eps is None else tokens, experts),
        scores.new_empty(0 if eps is None or width == experts else tokens),
    )


_choose = operator(
    "choose(Tensor scores, Tensor amounts, Tensor? eps, int k, int width, int how, bool informed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _choose_on_gpu,
    _choose_fake,
)
_choose_backward = operator(
    "choose_backward(Tensor grad, Tensor scores, Tensor amounts, Tensor? eps, Tensor weights, Tensor slots, Tensor edges, "
    "int k, int how, bool informed) -> Tensor",
    _choose_backward_on_gpu,
    lambda grad, scores, amounts, *_: torch.empty_like(amounts),
)
_together = operator(
    "chosen_together(Tensor scores, Tensor? real, int k) -> Tensor",
    _together_on_gpu,
    lambda scores, real, k: scores.new_empty(-(-scores.shape[0] // SHARE), scores.shape[1], scores.shape[1]),
)
