"""Triton kernels that sort slots by expert, stably: a counting sort in three launches. Imported only where Triton can run.

S slots, E experts, BINS at least E + 1, the one after the experts for unused slots; B blocks of slots
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # slots that are counted and placed together
COLUMNS = 16  # bins that are summed over the blocks together


@triton.jit
def _expert_of(chosen, slot, slots, experts):
    return tl.minimum(tl.load(chosen + slot, mask=slot < slots, other=0), experts).to(tl.int32)


@triton.jit
def _count(chosen, counts, slots, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_expert_of(chosen, slot, slots, experts), BINS, mask=slot < slots)
    tl.store(counts + block * BINS + tl.arange(0, BINS), found)


@triton.jit
def _sum_blocks(counts, totals, blocks, BINS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Each block's counts become those of the blocks before it."""
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        place = counts + block[:, None] * BINS + bins[None, :]
        own = tl.load(place, mask=(block < blocks)[:, None], other=0)
        tl.store(place, total[None, :] + tl.cumsum(own, axis=0) - own, mask=(block < blocks)[:, None])
        total += tl.sum(own, axis=0)
    tl.store(totals + bins, total)


@triton.jit
def _place(chosen, counts, totals, order, places, offsets, slots, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """A slot's row: how many slots of earlier experts there are, and of its own in earlier blocks and before it here."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins)
    last = tl.cumsum(total, axis=0)
    begin = last - total + tl.load(counts + block * BINS + bins)
    expert = _expert_of(chosen, slot, slots, experts)
    position = tl.arange(0, BLOCK)
    before = (expert[:, None] == expert[None, :]) & (position[None, :] < position[:, None])
    row = tl.sum(before.to(tl.int32), axis=1) + tl.sum(tl.where(expert[:, None] == bins[None, :], begin[None, :], 0), axis=1)
    tl.store(order + row, slot.to(tl.int64), mask=slot < slots)
    tl.store(places + slot, row.to(tl.int64), mask=slot < slots)
    if block == 0:
        tl.store(offsets + bins, last, mask=bins < experts)


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `chosen (T,K)`, contiguous: rows' slots (T*K,), slots' rows (T,K), where each expert's end (E,)."""
    slots, device = chosen.numel(), chosen.device
    blocks, bins = triton.cdiv(slots, BLOCK), max(triton.next_power_of_2(experts + 1), COLUMNS)
    counts = torch.empty(blocks, bins, dtype=torch.int32, device=device)
    totals = torch.empty(bins, dtype=torch.int32, device=device)
    order = torch.empty(slots, dtype=torch.int64, device=device)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    _count[(blocks,)](chosen, counts, slots, experts, BINS=bins, BLOCK=BLOCK)
    _sum_blocks[(bins // COLUMNS,)](counts, totals, blocks, BINS=bins, COLUMNS=COLUMNS, ROWS=512, num_warps=8)
    _place[(blocks,)](chosen, counts, totals, order, places, offsets, slots, experts, BINS=bins, BLOCK=BLOCK)
    return order, places, offsets
