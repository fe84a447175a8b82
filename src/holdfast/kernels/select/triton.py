"""Triton kernels that select experts by their scores.

    T tokens, E experts, K slots a token

An expert's slot is the number of experts ahead of it: those with a higher score, and those with the same score and a lower
index. Counting them takes E^2 comparisons a token. On a GPU that is cheaper than sorting, and it gives each expert its slot.
Where only a few slots matter, finding the best expert that is left, once for each slot, is cheaper still.
"""

# mypy: ignore-errors
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.float32_parts import BF16_PART
from holdfast.kernels.operators import cdiv, kernel, next_power_of_2
from holdfast.kernels.select import SHARE, empty_selection

RAW, SHARES, SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # indices into `WEIGHINGS`
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
FORWARD_BLOCK = 256  # scores in one program
BACKWARD_BLOCK = 512  # gradients of scores in one program
CHUNK = 32  # experts that all others are compared with at a time
FEW_SLOTS = 16  # up to here, slots are filled one after the other


@triton.jit
def _keys(values, inside):
    """Return int32 keys in the order of the values, as `ordered_keys`: -0.0 is 0.0, NaN highest, those outside lowest."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ HIGHEST, bits)
    return tl.where(inside, tl.where(values != values, HIGHEST, keys), LOWEST)


@triton.jit
def _fill_slots(keys, slots, first, last, EXPERTS: tl.constexpr):
    """Give the slots from `first` to `last` to the best experts that are left, and take those out of the keys."""
    expert = tl.arange(0, EXPERTS)
    for slot in range(first, last):
        best = expert[None, :] == tl.argmax(keys, axis=1)[:, None]
        slots = tl.where(best, slot, slots)
        keys = tl.where(best, LOWEST, keys)
    return keys, slots


@triton.jit
def _count_ahead(scores, row, rows, keys, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return (ROWS, EXPERTS): how many experts are ahead of each."""
    expert = tl.arange(0, EXPERTS)
    slots = tl.zeros((ROWS, EXPERTS), dtype=tl.int32)
    for start in range(0, experts, CHUNK):
        other = start + tl.arange(0, CHUNK)
        known = (row < rows)[:, None] & (other < experts)[None, :]
        others = _keys(tl.load(scores + row[:, None] * experts + other[None, :], mask=known, other=0.0), known)
        higher = others[:, :, None] > keys[:, None, :]
        level = (others[:, :, None] == keys[:, None, :]) & (other[:, None] < expert[None, :])[None, :, :]
        slots += tl.sum((higher | level).to(tl.int32), axis=1)
    return slots


@triton.jit
def slots_of(
    scores, row, rows, experts, wanted, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr
):
    """Return (ROWS, EXPERTS), each expert's slot, and keys; if FEW, only the first `wanted` slots, and the other keys."""
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    keys = _keys(tl.load(scores + row[:, None] * experts + expert[None, :], mask=inside, other=0.0), inside)
    if FEW:
        keys, slots = _fill_slots(keys, tl.full((ROWS, EXPERTS), EXPERTS, dtype=tl.int32), 0, wanted, EXPERTS)
    else:
        slots = _count_ahead(scores, row, rows, keys, experts, ROWS, EXPERTS, CHUNK)
    return slots, keys


@triton.jit
def _fade(gaps, eps, A: tl.constexpr, B: tl.constexpr):
    """Return S(u), 0 where it does not apply, and which gaps lie in the strip, as `strip_fade`."""
    in_strip = gaps < eps
    u = 1 - tl.where(in_strip, gaps, 0.0) / tl.maximum(eps, TINY)
    inside = in_strip & (u < 1)
    u = tl.minimum(tl.maximum(tl.where(inside, u, 0.5), TINY), 0.99999994)
    x = B * tl.log(1 - u) - A * tl.log(u)
    fade = -tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    return tl.where(inside, fade, 0.0), in_strip


@triton.jit
def _gaps(levels, slots, inside, k, LOGARITHM: tl.constexpr):
    """Return how far below the k-th each expert is; with LOGARITHM, in logarithms of the levels."""
    if LOGARITHM:
        levels = tl.log(tl.maximum(levels, TINY))
    threshold = tl.sum(tl.where((slots == k - 1) & inside, levels, 0.0), axis=1)
    return threshold[:, None] - levels


@kernel
def _strip_gaps(
    scores,
    out,
    rows,
    experts,
    k,
    width,
    CAPPED: tl.constexpr,
    INFORMED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Write the gaps of a block of tokens: infinite for the k best and, if CAPPED, for experts without a slot."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    slots, _ = slots_of(scores, row, rows, experts, width if CAPPED else k, ROWS, EXPERTS, CHUNK, FEW)
    gaps = _gaps(tl.load(scores + place, mask=inside, other=0.0), slots, inside, k, INFORMED)
    outside = slots < k
    if CAPPED:
        outside = outside | (slots >= width)
    tl.store(out + place, tl.where(outside, float("inf"), gaps), mask=inside)


@kernel
def _select(
    scores,
    amounts,
    eps,
    chosen,
    weights,
    slot_of,
    gaps_of,
    edges,
    rows,
    experts,
    k,
    width,
    HOW: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr,
    EACH: tl.constexpr,
    GIVEN: tl.constexpr,
    INFORMED: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Select and weigh a block of tokens.

    CAPPED: there are fewer slots than experts, and a strip ends at the first expert without a slot.
    EACH: 1 if `eps` has a width for each token, 0 if it has one for all.
    GIVEN: gaps are read. Computed again they might be rounded otherwise, and more of them be below `eps` than counted.
    FEW: slots are filled one after the other, those of the strip as far as the widest strip of a token in the block.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    wanted = width + 1 if CAPPED else k
    slots, keys = slots_of(scores, row, rows, experts, wanted, ROWS, EXPERTS, CHUNK, FEW)
    amount = tl.load(amounts + place, mask=inside, other=0.0)
    core = inside & (slots < k)
    in_use, fade = core, tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
    if SMOOTH:
        gaps = _gaps(tl.load(scores + place, mask=inside, other=0.0), slots, inside, k, INFORMED)
        crossed = core
        edge = tl.load(eps + row * EACH, mask=row < rows, other=0.0)
        if CAPPED:
            edge = tl.minimum(edge, tl.sum(tl.where((slots == width) & inside, gaps, 0.0), axis=1))
            tl.store(edges + row, edge, mask=row < rows)
            crossed = core | (slots >= width)
        if GIVEN:
            gaps = tl.load(gaps_of + place, mask=inside, other=float("inf"))
        else:
            tl.store(gaps_of + place, tl.where(crossed, float("inf"), gaps), mask=inside)
        fade, in_strip = _fade(gaps, edge[:, None], A, B)
        if FEW and not CAPPED:
            crossing = tl.max(tl.sum((in_strip & inside & ~core).to(tl.int32), axis=1), axis=0)
            keys, slots = _fill_slots(keys, slots, k, k + crossing, EXPERTS)
            unused = (row < rows)[:, None] & ((expert >= k + crossing) & (expert < width))[None, :]
            tl.store(chosen + row[:, None] * width + expert[None, :], experts, mask=unused)
            tl.store(weights + row[:, None] * width + expert[None, :], 0.0, mask=unused)
        fade = tl.where(core, 0.0, fade)
        in_use = core | (in_strip & inside)
    if HOW == SOFTMAX:
        level = tl.where(in_use, amount + fade, -float("inf"))
        weight = tl.exp(level - tl.max(level, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
    else:
        weight = tl.where(in_use, amount * tl.exp(fade), 0.0)
        if HOW == SHARES:
            total = tl.sum(weight, axis=1)[:, None]
            weight = weight / tl.where(total >= TINY, total, 1.0)
    weight = tl.where(in_use, weight, 0.0)
    tl.store(slot_of + place, tl.where(in_use, slots, experts), mask=inside)
    if SMOOTH and INFORMED:  # a gate of 0 gets a gradient, but no slot
        in_use = core | (in_use & (amount > 0))
    written = inside & (slots < width)
    at = row[:, None] * width + slots
    tl.store(chosen + at, tl.where(in_use, expert[None, :], experts).to(tl.int64), mask=written)
    tl.store(weights + at, weight, mask=written)


@kernel
def _select_backward(
    grad,
    amounts,
    eps,
    weights,
    slot_of,
    edges,
    out,
    rows,
    experts,
    k,
    width,
    scores,
    HOW: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr,
    EACH: tl.constexpr,
    INFORMED: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    slots = tl.load(slot_of + place, mask=inside, other=32767).to(tl.int32)
    in_use = inside & (slots < width)
    at = row[:, None] * width + slots
    g = tl.load(grad + at, mask=in_use, other=0.0)
    if HOW == RAW:
        result = g
    else:
        weight = tl.load(weights + at, mask=in_use, other=0.0)
        mean = tl.sum(tl.where(in_use, weight * g, 0.0), axis=1)[:, None]
        result = weight * (g - mean)
    if HOW != SOFTMAX:
        fading = tl.full((ROWS, EXPERTS), 1.0, dtype=tl.float32)
        if SMOOTH:
            gaps = _gaps(tl.load(scores + place, mask=inside, other=0.0), slots, inside, k, INFORMED)
            edge = edges + row if CAPPED else eps + row * EACH
            fade, _ = _fade(gaps, tl.load(edge, mask=row < rows, other=0.0)[:, None], A, B)
            fading = tl.where(slots < k, 1.0, tl.exp(fade))
        if HOW == SHARES:
            amount = tl.load(amounts + place, mask=in_use, other=0.0)
            total = tl.sum(tl.where(in_use, amount * fading, 0.0), axis=1)[:, None]
            result = tl.where(total >= TINY, (g - mean) / tl.where(total >= TINY, total, 1.0), g)
        result = result * fading
    tl.store(out + place, tl.where(in_use, result, 0.0), mask=inside)


@kernel
def _count_pairs(
    scores,
    real,
    out,
    rows,
    share,
    experts,
    k,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Write out[s] = Z^T Z over the s-th share of the rows, Z the 0/1 matrix of chosen experts: exact in any order."""
    split = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS, EXPERTS), dtype=tl.float32)
    for start in range(split * share, min(rows, (split + 1) * share), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        slots, _ = slots_of(scores, row, rows, experts, k, ROWS, EXPERTS, CHUNK, FEW)
        counted = (row < rows)[:, None] & (expert < experts)[None, :]
        if PADDED:
            counted = counted & (tl.load(real + row, mask=row < rows, other=0) != 0)[:, None]
        chosen = tl.where(counted & (slots < k), 1.0, 0.0).to(BF16_PART)
        total = tl.dot(tl.trans(chosen), chosen, total)
    place = split * experts * experts + expert[:, None] * experts + expert[None, :]
    tl.store(out + place, total, mask=(expert < experts)[:, None] & (expert < experts)[None, :])


def block_of(experts: int, elements: int) -> tuple[int, int]:
    """Return how many rows a program of `elements` scores takes, and the number of experts rounded up to a power of 2."""
    wide = max(next_power_of_2(experts), 16)
    return max(elements // wide, 1), wide


def forward_options(experts: int, slots: int) -> dict[str, int | bool]:
    """Return the sizes at compile time of a kernel that fills this many slots."""
    rows, wide = block_of(experts, FORWARD_BLOCK)
    few = slots <= FEW_SLOTS
    # The best of a row is found fastest by one warp; where all are compared, each thread counts for its own experts.
    warps = 1 if few else min(max(wide // 32, 1), 8)
    return {"ROWS": rows, "EXPERTS": wide, "CHUNK": min(CHUNK, wide), "FEW": few, "num_warps": warps}


def select(
    scores: Tensor,
    amounts: Tensor,
    eps: Tensor | None,
    k: int,
    width: int,
    how: int,
    informed: bool,
    a: float = 1.0,
    b: float = 50.0,
    gaps: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return experts and weights (T,width), each expert's slot (T,E), the gaps (T,E) and each strip's width (T,).

    `eps` is the width of all strips, (1,), or has one for each token, (T,). Without `eps` the last two are empty. Gaps are
    infinite for the k best, and for experts without a slot. Widths are empty if there is a slot for every expert: they are
    `eps`. With `gaps` of `strip_gaps`, those are compared with `eps`, and the returned gaps are empty.
    """
    count, experts = scores.shape
    capped = eps is not None and width < experts
    chosen, weights, slots, found, edges = empty_selection(scores, amounts, eps, k, width, gaps)
    options = forward_options(experts, width if capped else k)
    written = chosen, weights, slots, found if gaps is None else gaps, edges
    weighing = {**_weighing(eps, how, informed, a, b), "CAPPED": capped, "GIVEN": gaps is not None}
    _select[(cdiv(count, options["ROWS"]),)](
        scores, amounts, scores if eps is None else eps, *written, count, experts, k, width, **weighing, **options
    )
    return chosen, weights, slots, found, edges


def _weighing(eps: Tensor | None, how: int, informed: bool, a: float, b: float) -> dict[str, Any]:
    """Return what kernels know at compile time of how experts are weighed."""
    each = int(eps is not None and eps.numel() > 1)  # whether each token has a strip of its own width
    return {"HOW": how, "SMOOTH": eps is not None, "EACH": each, "INFORMED": informed, "A": a, "B": b}


def strip_gaps(scores: Tensor, k: int, width: int, informed: bool) -> Tensor:
    """Return the gaps (T,E) that `select` returns."""
    (count, experts), out = scores.shape, torch.empty_like(scores)
    capped = width < experts
    options = forward_options(experts, width if capped else k)
    grid = (cdiv(count, options["ROWS"]),)
    _strip_gaps[grid](scores, out, count, experts, k, width, CAPPED=capped, INFORMED=informed, **options)
    return out


def select_backward(
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
    a: float = 1.0,
    b: float = 50.0,
) -> Tensor:
    """Return the gradient of the amounts (T,E) from that of the weights (T,K)."""
    count, experts = amounts.shape
    out = torch.empty_like(amounts)
    rows, wide = block_of(experts, BACKWARD_BLOCK)
    weighing = {**_weighing(eps, how, informed, a, b), "CAPPED": edges.numel() > 0}
    saved, sizes = (amounts, amounts if eps is None else eps, weights, slots, edges), (count, experts, k, grad.shape[1])
    _select_backward[(cdiv(count, rows),)](
        grad, *saved, out, *sizes, scores, **weighing, ROWS=rows, EXPERTS=wide, num_warps=1
    )
    return out


def count_pairs(scores: Tensor, real: Tensor | None, k: int, share: int = SHARE) -> Tensor:
    """Return (S,E,E), to be summed: how often two experts are both among a real token's k best."""
    (count, experts), scores = scores.shape, scores.contiguous()
    splits, padded = cdiv(count, share), real is not None
    out = torch.empty(splits, experts, experts, dtype=torch.float32, device=scores.device)
    mask, sizes = real.contiguous() if padded else scores, {"ROWS": 16, "EXPERTS": max(next_power_of_2(experts), 16)}
    _count_pairs[(splits,)](
        scores, mask, out, count, share, experts, k, PADDED=padded, **sizes, CHUNK=16, FEW=k <= FEW_SLOTS, num_warps=4
    )
    return out
