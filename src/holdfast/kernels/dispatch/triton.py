"""Triton kernels that sort slots by expert and move rows between token order and expert order.

R rows sorted by expert, T tokens, K slots a token, E experts, `order` the slot of each row and `slots` the row of each slot;
`used` points at the number of rows that belong to an expert, at most R.

**Sorting** is by counting: a slot's row is the number of slots of earlier experts, plus the number of earlier slots of its
own expert, in the blocks before and in its own block. Three small launches, or two where experts times blocks are few; a
general sort, its inverse and its bounds take fifteen.

**Moving.** Each output element is written by one program in a fixed order of additions, so results repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.fast_launch import fast_launch
from holdfast.kernels.launching import cdiv, next_power_of_2

SORT_BLOCK = 64  # slots that are counted and placed together, by one warp
SPAN = 1024  # blocks whose counts are added up at a time
IN_REGISTERS = 2**11  # counts that a program adds up at a time
FEW_COUNTS = 2**14  # of all experts in all blocks: up to here, every program adds up those that it needs itself
BLOCK = 1024  # columns of a row that one program moves at most
NUMBERS_OF_A_WARP = 256  # 8 for each thread: 16 bytes of bfloat16
FEW_SLOTS = 16  # up to here, all slots of a token are read, whether they are used or not


@triton.jit
def _experts_of(chosen, slot, slots, experts):
    """Return the expert index of each slot, and which slots are in use."""
    expert = tl.load(chosen + slot, mask=slot < slots, other=experts).to(tl.int32)
    return expert, (expert >= 0) & (expert < experts)


@fast_launch
@triton.jit
def _count(chosen, counts, slots, experts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    expert, used = _experts_of(chosen, block * BLOCK + tl.arange(0, BLOCK), slots, experts)
    tl.store(counts + bins.to(tl.int64) * blocks + block, tl.histogram(expert, BINS, mask=used), mask=bins < experts)


@fast_launch
@triton.jit
def _add_up(counts, totals, blocks, SPAN: tl.constexpr):
    """Replace an expert's counts by the number of its slots in the blocks before."""
    expert = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, blocks, SPAN):
        block = start + tl.arange(0, SPAN)
        place, inside = counts + expert * blocks + block, block < blocks
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, total + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total)


@fast_launch
@triton.jit
def _place(
    chosen,
    counts,
    totals,
    order,
    rows,
    offsets,
    slots,
    experts,
    blocks,
    most,
    SPAN: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row of each slot and the slot of each row; a slot whose row would be number `most` or later is unused.

    SPAN: 0 if `_add_up` has added up the counts; otherwise this program does it, SPAN blocks at a time.
    """
    block = tl.program_id(0)
    bins, position = tl.arange(0, BINS), tl.arange(0, BLOCK)
    if SPAN:
        total, before = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
        for start in range(0, blocks, SPAN):
            other = start + tl.arange(0, SPAN)
            inside = (bins < experts)[:, None] & (other < blocks)[None, :]
            count = tl.load(counts + bins[:, None] * blocks + other[None, :], mask=inside, other=0)
            total += tl.sum(count, axis=1)
            before += tl.sum(tl.where((other < block)[None, :], count, 0), axis=1)
    else:
        total = tl.load(totals + bins, mask=bins < experts, other=0)
    ends = tl.cumsum(total, axis=0)
    slot = block * BLOCK + position
    expert, used = _experts_of(chosen, slot, slots, experts)
    own = tl.where(used, expert, 0)
    earlier = (expert[:, None] == expert[None, :]) & (position[None, :] < position[:, None])
    row = tl.gather(ends - total, own, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    if SPAN:
        row += tl.gather(before, own, axis=0)
    else:
        row += tl.load(counts + own.to(tl.int64) * blocks + block)
    used = used & (row < most)
    tl.store(rows + slot, tl.where(used, row, slots).to(tl.int64), mask=slot < slots)
    tl.store(order + row, slot.to(tl.int64), mask=used)
    if block == 0:
        tl.store(offsets + bins, tl.minimum(ends, most), mask=bins < experts)


@triton.jit
def _last_slot(slots, token, limit, K: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr):
    """Return how many slots to read: up to the last one in use; if FEW, all of them, which lets loads overlap."""
    last = K
    if not FEW:
        places = tl.arange(0, SLOTS)
        own = tl.load(slots + token * K + places, mask=places < K, other=limit)
        last = tl.max(tl.where(own < limit, places + 1, 0), axis=0)
    return last


@triton.jit
def expert_of(row, offsets, experts, BINS: tl.constexpr):
    """Return the expert that a row belongs to; an unused row has the index `experts`."""
    bins = tl.arange(0, BINS)
    ends = tl.load(offsets + bins, mask=bins < experts, other=2147483647)
    return tl.sum((ends <= row).to(tl.int64), axis=0)


@fast_launch
@triton.jit
def _gather(
    tokens,
    slots,
    used,
    out,
    width,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read a token once and write it to all its rows; reading it once for every row takes half as long again."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    values = tl.load(tokens + token * width + column, mask=column < width, other=0.0)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        tl.store(out + row * width + column, values, mask=(column < width) & (row + 0 * column < limit))


@fast_launch
@triton.jit
def _combine(
    rows,
    slots,
    weights,
    used,
    out,
    width,
    bias,
    offsets,
    experts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        # The row of an unused slot is uninitialised memory: never load it, since 0 * NaN is NaN.
        inside = (column < width) & (row + 0 * column < limit)
        values = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if BINS:
            expert = expert_of(row, offsets, experts, BINS)
            values += tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * K + slot)
        total += values
    tl.store(out + token * width + column, total, mask=column < width)


def dispatch(chosen: Tensor, experts: int, most_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for `chosen (T,K)` the fields of a `Dispatch`: order (most_rows,), slots (T,K) and offsets (E,)."""
    slots, device = chosen.numel(), chosen.device
    blocks, bins = cdiv(slots, SORT_BLOCK), max(next_power_of_2(experts), 16)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    order = torch.empty(most_rows, dtype=torch.int64, device=device)
    rows = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    _count[(blocks,)](chosen, counts, slots, experts, blocks, BINS=bins, BLOCK=SORT_BLOCK, num_warps=1)
    totals, span = counts, 0
    if bins * blocks <= FEW_COUNTS:
        span = min(next_power_of_2(blocks), IN_REGISTERS // bins)
    else:
        totals = torch.empty(experts, dtype=torch.int32, device=device)
        _add_up[(experts,)](counts, totals, blocks, SPAN=SPAN)
    sizes = slots, experts, blocks, most_rows
    warps = 4 if span else 1
    _place[(blocks,)](
        chosen, counts, totals, order, rows, offsets, *sizes, SPAN=span, BINS=bins, BLOCK=SORT_BLOCK, num_warps=warps
    )
    return order, rows, offsets


def columns(width: int, most: int = BLOCK) -> dict[str, int]:
    """Return how many columns of rows of this width one program takes, at most `most`, and with how many warps.

    Narrow rows get fewer warps: a thread without a column still costs time.
    """
    block = min(most, max(next_power_of_2(width), 128))
    return {"BLOCK": block, "num_warps": 4 if block == most else max(block // NUMBERS_OF_A_WARP, 1)}


def _slot_options(slots: Tensor) -> dict[str, int | bool]:
    count = slots.shape[1]
    return {"K": count, "SLOTS": next_power_of_2(count), "FEW": count <= FEW_SLOTS}


def gather(tokens: Tensor, slots: Tensor, used: Tensor, count: int) -> Tensor:
    """Return the token of each row."""
    width = tokens.shape[1]
    out, block = tokens.new_empty(count, width), columns(width)
    grid = (tokens.shape[0], cdiv(width, block["BLOCK"]))
    _gather[grid](tokens, slots, used, out, width, **_slot_options(slots), **block)
    return out


def combine(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    used: Tensor,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Return the weighted sums of rows, with `bias (E,d)` of the row's expert added to each row; it needs `offsets`."""
    out = rows.new_empty(slots.shape[0], rows.shape[1])
    block = columns(out.shape[1])
    experts = 0 if bias is None else bias.shape[0]
    _combine[(out.shape[0], cdiv(out.shape[1], block["BLOCK"]))](
        rows,
        slots,
        rows if weights is None else weights,
        used,
        out,
        out.shape[1],
        rows if bias is None else bias,
        used if offsets is None else offsets,
        experts,
        WEIGHTED=weights is not None,
        BINS=0 if bias is None else next_power_of_2(experts),
        **_slot_options(slots),
        **block,
    )
    return out
