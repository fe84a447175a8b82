"""Select experts by their scores and weigh them: top-k, and top-k with a smooth strip below it.

    T tokens, E experts, K slots
    scores (..., E) rank the experts; of equal scores, the one with the lower index ranks first
    amounts (..., E) are what the weights of the selected experts are computed from
    levels (..., E) are the scores, or their logarithms if the scores are gates that an informer has mixed
    c the k-th largest level, eps the width of the strip below it, u = 1 - (c - level) / eps
    S(u) = -inf for u <= 0, 0 for u >= 1, else log(u^a / (u^a + (1-u)^b))

The factor of an expert in the strip is exp(S(u)): its amount is multiplied by it, or for a softmax S(u) is added.

On a GPU, one kernel selects and weighs, and another computes the gradient. On other devices, and for scores that the
kernels do not support, PyTorch operations compute the same.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operators import (
    cdiv,
    differentiable_gradients,
    has_kernels,
    is_differentiated,
    on_gpu,
    operator,
    snapshot_for_backward,
)
from holdfast.kernels.torch_internals import is_exporting

# How the amounts of selected experts become weights: unchanged, divided by their sum, or by a softmax over them.
Weighing = Literal["raw", "shares", "softmax"]
WEIGHINGS: tuple[Weighing, ...] = ("raw", "shares", "softmax")
MOST_EXPERTS = 512  # that the kernels support: they compare all pairs of experts, which is slow for more
MOST_IN_GRAPH = 128  # experts; the E x E counts of more do not fit into the registers of one Triton program
SHARE = 32  # number of tokens whose pairs of experts one Triton program counts
TINY = torch.finfo(torch.float32).tiny


class Powers(NamedTuple):
    """The exponents of S: near the strip's lower edge its factor grows as u^a, near the upper edge it is 1 - (1-u)^b."""

    a: float = 1.0
    b: float = 50.0


POWERS = Powers()
FEW_SCORES = 2**10  # up to here one stable sort on a CPU is faster than making keys: a step of decoding


Limit = Callable[[Tensor, Tensor], Tensor]  # (gaps, eps) -> the width of the strip


class Amounts(NamedTuple):
    """The values that weights are computed from, and how."""

    values: Tensor  # (..., E)
    how: Weighing


class Strip(NamedTuple):
    """The slots of a smooth top-k, best first: the k best experts and those in the strip below them."""

    experts: Tensor  # (..., K)
    core: Tensor  # (K,) bool: the first k
    in_use: Tensor  # (..., K) bool: whether the slot is in the core or in the strip
    fade: Tensor  # (..., K): S, the logarithm of the factor of each slot; 0 in the core and outside the strip
    gaps: Tensor  # (..., E): level of the k-th minus level of each expert, best first; infinite in the core and after slot K


def top(values: Tensor, k: int) -> Tensor:
    """Return the indices `(..., k)` of the k largest, descending; of equal values, the lower index first on all devices."""
    if is_exporting():
        return exported_keys(values).topk(k, dim=-1).indices
    if values.numel() <= FEW_SCORES and not values.is_cuda and not torch.compiler.is_compiling():
        return values.detach().float().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    keys = ordered_keys(values)
    return keys.argsort(dim=-1, descending=True) if k == values.shape[-1] else keys.topk(k, dim=-1).indices


def top_reference(values: Tensor, k: int) -> Tensor:
    """Return what `top` must return, computed by sorting Python tuples."""
    rows = values.reshape(-1, values.shape[-1]).tolist()
    chosen = [sorted(range(len(row)), key=lambda index: (-row[index], index))[:k] for row in rows]
    return torch.tensor(chosen, dtype=torch.int64).view(*values.shape[:-1], k)


def ordered_keys(values: Tensor) -> Tensor:
    """Return int64 keys in the order of the float32 `values (..., E)`; of equal values, the lower index has the larger key.

    `torch.topk` does not define the order of equal values, and devices differ. All keys are different: the upper 32 bits
    are the bits of the value, changed so that they sort like the value, and the lower 32 bits are E - 1 - index. NaN is
    above all other values, as in torch.
    """
    experts = values.shape[-1]
    bits = (values.detach().float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    monotone = torch.where(values.isnan(), 0x7FFFFFFF, monotone).long()
    countdown = torch.arange(experts - 1, -1, -1, device=values.device)
    return monotone * 2**32 + countdown


def exported_keys(values: Tensor) -> Tensor:
    """Return float64 keys in the order of `ordered_keys`, for `values (..., E)` without NaN and with E up to 2^17.

    ONNX can neither read the bits of a number nor sort stably. The mantissa of a float64 has 29 bits more than that of a
    float32. So each value is lowered by its index times 2^-42 of the value, which is less than the distance to the next
    float32. A value of 0 is lowered by its index times 2^-200, which is smaller than any float32.
    """
    wide = values.detach().double().clamp(-1e300, 1e300)  # an infinite value would become NaN below
    index = torch.arange(values.shape[-1], device=values.device, dtype=torch.float64)
    return wide - (wide.abs() * 2.0**-42 + 2.0**-200) * index


def select_top_k(scores: Tensor, amounts: Amounts, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best experts (..., k), best first, and their weights. Only the amounts get a gradient."""
    if has_select_kernel(scores):
        experts, weights, _ = _select_with_kernels(scores, amounts, None, k, k, False, POWERS)
        return experts, weights
    experts = top(scores, k)
    return experts, weigh(amounts, experts, torch.ones_like(experts, dtype=torch.bool), None)


def select_smooth_top_k(
    scores: Tensor,
    amounts: Amounts,
    k: int,
    eps: Tensor,
    *,
    most: int,
    informed: bool,
    powers: Powers = POWERS,
    limit: Limit | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return experts (..., most), E in unused slots, their weights, and all gaps to the k-th (..., E), in any order.

    Besides the k best, experts in a strip of width `eps` below the k-th are selected. A token that would have more than
    `most` experts has a narrower strip, which ends at the level of the first expert without a slot. Gaps are infinite for
    the k best and for experts without a slot. With `informed`, scores are gates, levels are their logarithms, and an expert
    with a gate of 0 is never selected from the strip. Only the amounts get a gradient.

    limit   returns the width of the strip from the gaps and `eps`: one for all tokens, or (...), one for each
    """
    if has_select_kernel(scores):
        if limit is None:
            return _select_with_kernels(scores, amounts, eps.flatten(), k, most, informed, powers)
        flat = scores.detach().contiguous().view(-1, scores.shape[-1])
        gaps = _strip_gaps(flat, k, most, informed)
        by_token = gaps.view(scores.shape)
        eps = limit(by_token, eps).flatten()
        experts, weights, _ = _select_with_kernels(scores, amounts, eps, k, most, informed, powers, gaps)
        return experts, weights, by_token
    levels = scores.clamp_min(TINY).log() if informed else scores
    strip = smooth_strip(scores, levels, k, eps, most, powers, limit)
    weights = weigh(amounts, strip.experts, strip.in_use, strip.fade)
    in_use = strip.in_use
    if informed:
        in_use = strip.core | (in_use & (scores.gather(-1, strip.experts) > 0))
    return strip.experts.where(in_use, scores.shape[-1]), weights, strip.gaps


def smooth_strip(
    ranks: Tensor,
    levels: Tensor,
    k: int,
    eps: Tensor,
    most: int,
    powers: Powers = POWERS,
    limit: Limit | None = None,
) -> Strip:
    """Return the first `most` slots by `ranks (..., E)`, with a strip of width `eps` in `levels (..., E)` below the k-th.

    limit   returns the width of the strip from the gaps and `eps`: one for all tokens, or (...), one for each
    """
    order = top(ranks, ranks.shape[-1])
    levels = levels.gather(-1, order)
    gaps = (levels[..., k - 1 : k] - levels).detach()
    next_gap = None if most == ranks.shape[-1] else gaps[..., most : most + 1]  # of the first expert without a slot
    slot = torch.arange(ranks.shape[-1], device=ranks.device)
    masked_gaps = gaps.masked_fill((slot < k) | (slot >= most), torch.inf)
    if limit is not None:
        # A compiler might compute gaps twice, for `limit` and for the strip, and round them differently. It reads a copy.
        masked_gaps = gaps = snapshot_for_backward(masked_gaps)
        eps = limit(masked_gaps, eps)
    edge = eps.unsqueeze(-1)
    edge = edge if next_gap is None else torch.minimum(edge, next_gap)
    core = slot[:most] < k
    fade, in_strip = strip_fade(gaps[..., :most], edge, powers)
    return Strip(order[..., :most], core, core | in_strip, fade.where(~core, 0.0), masked_gaps)


def strip_fade(gaps: Tensor, eps: Tensor, powers: Powers = POWERS) -> tuple[Tensor, Tensor]:
    """Return S(u) for u = 1 - gap / eps, 0 outside the strip, and whether u > 0. Only `eps` gets a gradient."""
    in_strip = gaps < eps
    u = 1 - gaps.where(in_strip, 0.0) / eps.clamp_min(TINY)
    inside = in_strip & (u < 1)
    u = u.where(inside, 0.5).clamp(TINY, 1 - 2**-24)
    fade = -F.softplus(powers.b * torch.log1p(-u) - powers.a * u.log())
    return fade.where(inside, 0.0), in_strip


def weigh(amounts: Amounts, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """Return the weights of the slots `experts (..., K)`, 0 where not `in_use`; `fade` has the logarithms of factors."""
    values = amounts.values.gather(-1, experts)
    if amounts.how == "softmax":
        values = values if fade is None else values + fade
        return torch.softmax(values.where(in_use, -torch.inf), dim=-1).where(in_use, 0.0)
    # Not a softmax of the logarithms: if all amounts are 0, all weights must be 0.
    values = values if fade is None else values * fade.exp()
    values = values.where(in_use, 0.0)
    return normalise(values) if amounts.how == "shares" else values


def normalise(amounts: Tensor) -> Tensor:
    """Return `amounts (..., n)` divided by their sum; 0 with a finite gradient where the sum is 0."""
    total = amounts.sum(-1, keepdim=True)
    return amounts / total.where(total >= TINY, 1.0)


def count_pairs(scores: Tensor, real: Tensor | None, k: int) -> Tensor:
    """Return (E,E): for two experts, how many tokens that are `real (B,N)` have both among their k best `scores (B,N,E)`."""
    if has_select_kernel(scores):
        if scores.shape[-1] <= MOST_IN_GRAPH:
            counts: Tensor = _count_pairs(scores.flatten(0, 1), None if real is None else real.flatten(), k)
            return counts.sum(0)  # over Triton programs
        best, _ = select_top_k(scores, Amounts(scores, "raw"), k)
    else:
        best = top(scores, k)
    chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
    chosen = (chosen if real is None else chosen * real.unsqueeze(-1)).flatten(0, 1)
    return chosen.t() @ chosen


def has_select_kernel(scores: Tensor) -> bool:
    """Return whether the kernels take these scores: float32, on a GPU, at most `MOST_EXPERTS` experts."""
    return has_kernels(scores) and scores.dtype == torch.float32 and scores.shape[-1] <= MOST_EXPERTS


def _select_with_kernels(
    scores: Tensor,
    amounts: Amounts,
    eps: Tensor | None,
    k: int,
    width: int,
    informed: bool,
    powers: Powers,
    gaps: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape, experts = scores.shape[:-1], scores.shape[-1]
    values = amounts.values.contiguous().view(-1, experts)
    flat = values.detach() if amounts.values is scores else scores.detach().contiguous().view(-1, experts)
    how = WEIGHINGS.index(amounts.how)
    arguments = flat, values, eps, k, width, how, informed, *powers, gaps
    if torch.is_grad_enabled():
        chosen, weights, found = _Select.apply(*arguments)  # type: ignore[no-untyped-call]
    else:  # in decoding, what autograd adds to a call takes longer than the kernel
        chosen, weights, _, found, _ = _select(*arguments)
    if found.numel():  # without `eps`, and if they are given, gaps are empty (0,E)
        found = found.view(*shape, experts)
    return chosen.view(*shape, -1), weights.view(*shape, -1), found


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, amounts, eps, k, width, how, informed, a, b, gaps):  # type: ignore[no-untyped-def]
        chosen, weights, slots, found, edges = _select(scores, amounts, eps, k, width, how, informed, a, b, gaps)
        ctx.mark_non_differentiable(chosen, found)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, amounts, eps, weights, slots, edges, chosen)
        ctx.rest = k, how, informed, a, b
        return chosen, weights, found

    @staticmethod
    def backward(ctx, _grad_chosen, grad, _grad_gaps):  # type: ignore[no-untyped-def]
        if grad is None:
            return (None,) * 10
        *saved, chosen = ctx.saved_tensors
        if is_differentiated():
            scores, amounts, eps, _, _, edges = saved
            reference = functools.partial(_weigh_reference, scores, chosen, eps, edges, *ctx.rest)
            return None, *differentiable_gradients(reference, [amounts], [True], grad), *(None,) * 8
        return None, _select_backward(grad.contiguous(), *saved, *ctx.rest), *(None,) * 8


def _weigh_reference(scores: Tensor, chosen: Tensor, eps: Tensor | None, edges: Tensor, *rest: Any) -> Tensor:
    """Return the weights of the `chosen` experts (T,K) in operations that autograd can differentiate."""
    k, how, informed, a, b, amounts = rest
    in_use = chosen < scores.shape[1]
    experts = chosen.where(in_use, 0)
    fade = None
    if eps is not None:
        levels = (scores.clamp_min(TINY).log() if informed else scores).gather(1, experts)
        core = torch.arange(chosen.shape[1], device=chosen.device) < k
        width = edges if edges.numel() else eps
        width = width.unsqueeze(1) if width.dim() else width  # one for each token, or one for all
        fade, _ = strip_fade(levels[:, k - 1 : k] - levels, width, Powers(a, b))
        fade = fade.where(~core, 0.0)
    return weigh(Amounts(amounts, WEIGHINGS[how]), experts, in_use, fade)


def empty_selection(
    scores: Tensor, amounts: Tensor, eps: Tensor | None, k: int, width: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return memory for experts, weights, the slot of each expert, gaps, and the width of each token's strip."""
    (tokens, experts), gaps = scores.shape, rest[-1]
    return (
        scores.new_empty(tokens, width, dtype=torch.int64),
        scores.new_empty(tokens, width),
        scores.new_empty(tokens, experts, dtype=torch.int16),
        scores.new_empty(0 if eps is None or gaps is not None else tokens, experts),
        scores.new_empty(0 if eps is None or width == experts else tokens),
    )


# Returns experts, weights, the slot of each expert, gaps, and the width of each token's strip.
_select = operator(
    "choose(Tensor scores, Tensor amounts, Tensor? eps, int k, int width, int how, bool informed, float a, float b, "
    "Tensor? gaps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    on_gpu(__name__, "select"),
    empty_selection,
)
_strip_gaps = operator(  # the gaps that `_select` returns, which do not depend on `eps`
    "strip_gaps(Tensor scores, int k, int width, bool informed) -> Tensor",
    on_gpu(__name__, "strip_gaps"),
    lambda scores, *_: torch.empty_like(scores),
)
_select_backward = operator(
    "choose_backward(Tensor grad, Tensor scores, Tensor amounts, Tensor? eps, Tensor weights, Tensor slots, Tensor edges, "
    "int k, int how, bool informed, float a, float b) -> Tensor",
    on_gpu(__name__, "select_backward"),
    lambda grad, scores, amounts, *_: torch.empty_like(amounts),
)
_count_pairs = operator(
    "chosen_together(Tensor scores, Tensor? real, int k) -> Tensor",
    on_gpu(__name__, "count_pairs"),
    lambda scores, real, k: scores.new_empty(cdiv(scores.shape[0], SHARE), scores.shape[1], scores.shape[1]),
)
