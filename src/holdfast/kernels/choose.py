"""From scores to experts and weights in one kernel, and back in one: what top-k and its smooth strip do, for softmax gates.

    T tokens, E experts, K slots; scores (T,E) rank the experts, ties to the lower index; amounts (T,E) are what weighs them

The plain PyTorch of routing/selection.py, smoothing.py and rules.py is the specification, and what runs elsewhere.
"""

import functools
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels import double_backward
from holdfast.kernels.operators import operator
from holdfast.kernels.triton_support import has_kernels, on_device_of

# How amounts become weights: as they are, over their sum, or as a softmax of the chosen ones.
How = Literal["raw", "shares", "softmax"]
HOWS: tuple[How, ...] = ("raw", "shares", "softmax")
MOST_EXPERTS = 512  # beyond it, counting who is ahead of whom is no longer cheap
SHARE = 32  # tokens whose pairs of experts one program counts
TINY = torch.finfo(torch.float32).tiny
POWER_IN, POWER_OUT = 1, 50  # a and b of the fading S
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
        ctx.save_for_backward(scores, amounts, eps, weights, slots, edges, chosen)
        ctx.rest = k, how, informed
        return chosen, weights, gaps

    @staticmethod
    def backward(ctx, _grad_chosen, grad, _grad_gaps):  # type: ignore[no-untyped-def]
        if grad is None:
            return (None,) * 7
        *saved, chosen = ctx.saved_tensors
        if double_backward.is_wanted():
            scores, amounts, eps, _, _, edges = saved
            plain = functools.partial(_weigh_plain, scores, chosen, eps, edges, *ctx.rest)
            return None, *double_backward.gradients(plain, [amounts], [True], grad), *(None,) * 5
        return None, _choose_backward(grad.contiguous(), *saved, *ctx.rest), *(None,) * 5


def _weigh_plain(
    scores: Tensor,
    chosen: Tensor,
    eps: Tensor | None,
    edges: Tensor,
    k: int,
    how: int,
    informed: bool,
    amounts: Tensor,
) -> Tensor:
    """(T,K): the weights of the `chosen` experts (T,K), for autograd to differentiate."""
    in_use = chosen < scores.shape[1]
    experts = chosen.where(in_use, 0)
    values = amounts.gather(1, experts)
    fade = None
    if eps is not None:
        levels = (scores.clamp_min(TINY).log() if informed else scores).gather(1, experts)
        core = torch.arange(chosen.shape[1], device=chosen.device) < k
        fade, _ = fading(levels[:, k - 1 : k] - levels, edges.unsqueeze(1) if edges.numel() else eps)
        fade = fade.where(~core, 0.0)
    if HOWS[how] == "softmax":
        values = values if fade is None else values + fade
        return torch.softmax(values.where(in_use, -torch.inf), dim=-1).where(in_use, 0.0)
    values = values if fade is None else values * fade.exp()
    values = values.where(in_use, 0.0)
    return shares(values) if HOWS[how] == "shares" else values


def shares(amounts: Tensor) -> Tensor:
    """`amounts (..., n)` over their sum; 0 where there is nothing to share, with a gradient that is finite there too."""
    total = amounts.sum(-1, keepdim=True)
    return amounts / total.where(total >= TINY, 1.0)


def fading(gaps: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """S(u) for u = 1 - gap / eps, 0 outside the strip, and whether u > 0. The gradient reaches eps only."""
    in_strip = gaps < eps
    u = 1 - gaps.where(in_strip, 0.0) / eps.clamp_min(TINY)
    inside = in_strip & (u < 1)
    u = u.where(inside, 0.5).clamp(TINY, 1 - 2**-24)
    fade = -F.softplus(POWER_OUT * torch.log1p(-u) - POWER_IN * u.log())
    return fade.where(inside, 0.0), in_strip


def together(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """(E,E): how many real tokens have both experts among their k best `scores (T,E)`."""
    parts: Tensor = _together(scores, real, k)
    return parts.sum(0)


def _choose_on_gpu(
    scores: Tensor, amounts: Tensor, eps: Tensor | None, k: int, width: int, how: int, informed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from holdfast.kernels import choose_kernels

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
    from holdfast.kernels import choose_kernels

    with on_device_of(scores):
        return choose_kernels.choose_backward(grad, scores, amounts, eps, weights, slots, edges, k, how, informed)


def _together_on_gpu(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    from holdfast.kernels import choose_kernels

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
