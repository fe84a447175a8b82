"""Triton kernels that sort slots by expert, by counting. Imported only where Triton can run.

A slot's row is the number of slots of experts before its own, and of its own expert's before it: in blocks before, and in
its block. Three small launches where a general sort, its inverse and its bounds take fifteen.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.sizes import cdiv, next_power_of_2

BLOCK = 64  # slots that are counted and placed together, by one warp
SPAN = 1024  # blocks whose counts are added up at a time


@triton.jit
def _experts_of(chosen, slot, slots, experts):
    """Their numbers, and which of them are any expert's."""
    expert = tl.load(chosen + slot, mask=slot < slots, other=experts).to(tl.int32)
    return expert, (expert >= 0) & (expert < experts)


@triton.jit
def _count(chosen, counts, slots, experts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    expert, used = _experts_of(chosen, block * BLOCK + tl.arange(0, BLOCK), slots, experts)
    tl.store(counts + bins.to(tl.int64) * blocks + block, tl.histogram(expert, BINS, mask=used), mask=bins < experts)


@triton.jit
def _add_up(counts, totals, blocks, SPAN: tl.constexpr):
    """An expert's counts become how many there are in the blocks before."""
    expert = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, blocks, SPAN):
        block = start + tl.arange(0, SPAN)
        place, inside = counts + expert * blocks + block, block < blocks
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, total + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total)


@triton.jit
def _place(chosen, counts, totals, order, rows, offsets, slots, experts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bins, position = tl.arange(0, BINS), tl.arange(0, BLOCK)
    total = tl.load(totals + bins, mask=bins < experts, other=0)
    ends = tl.cumsum(total, axis=0)
    slot = block * BLOCK + position
    expert, used = _experts_of(chosen, slot, slots, experts)
    own = tl.where(used, expert, 0)
    earlier = (expert[:, None] == expert[None, :]) & (position[None, :] < position[:, None])
    row = tl.gather(ends - total, own, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    row += tl.load(counts + own.to(tl.int64) * blocks + block)
    tl.store(rows + slot, tl.where(used, row, slots).to(tl.int64), mask=slot < slots)
    tl.store(order + row, slot.to(tl.int64), mask=used)
    if block == 0:
        tl.store(offsets + bins, ends, mask=bins < experts)


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """For `chosen (T,K)`: order (T*K,), the rows of the slots (T,K) and the offsets (E,), see kernels/dispatch.py."""
    slots, device = chosen.numel(), chosen.device
    blocks, bins = cdiv(slots, BLOCK), max(next_power_of_2(experts), 16)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    totals = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(slots, dtype=torch.int64, device=device)
    rows = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    _count[(blocks,)](chosen, counts, slots, experts, blocks, BINS=bins, BLOCK=BLOCK, num_warps=1)
    _add_up[(experts,)](counts, totals, blocks, SPAN=SPAN)
    _place[(blocks,)](
        chosen, counts, totals, order, rows, offsets, slots, experts, blocks, BINS=bins, BLOCK=BLOCK, num_warps=1
    )
    return order, rows, offsets
