"""Triton kernels that sort slots by expert, by counting. Imported only where Triton can run.

A slot's row is the number of slots of experts before its own, and of its own expert's before it: counts of each program's
share of the slots, then positions within it. Two launches where a general sort, its inverse and its bounds take fifteen.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.ops.clusters_kernels import sum_counts

PROGRAMS = 256
TILE_ELEMENTS = 8192  # slots times experts that are compared at a time
MOST_SLOTS = 128  # of them


@triton.jit
def _experts_of(chosen, slot, last, experts):
    """Their numbers, and whose count."""
    expert = tl.load(chosen + slot, mask=slot < last, other=experts).to(tl.int32)
    return expert, (expert >= 0) & (expert < experts)


@triton.jit
def _count(chosen, counts, slots, share, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    last = tl.minimum((tl.program_id(0) + 1) * share, slots)
    for start in range(tl.program_id(0) * share, last, BLOCK):
        expert, used = _experts_of(chosen, start + tl.arange(0, BLOCK), last, experts)
        total += tl.histogram(expert, BINS, mask=used)
    tl.store(counts + tl.program_id(0) * BINS + bins, total)


@triton.jit
def _place(chosen, counts, order, rows, offsets, slots, share, experts, programs, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of its expert come before a slot in its block is a product with a triangle: 0 and 1, exact in any order."""
    bins, position = tl.arange(0, BINS), tl.arange(0, BLOCK)
    earlier = (position[None, :] < position[:, None]).to(tl.float16)
    total, before = sum_counts(counts, tl.program_id(0), programs, BINS)
    ends = tl.cumsum(total, axis=0)
    begin = ends - total + before
    last = tl.minimum((tl.program_id(0) + 1) * share, slots)
    for start in range(tl.program_id(0) * share, last, BLOCK):
        slot = start + position
        expert, used = _experts_of(chosen, slot, last, experts)
        member = (expert[:, None] == bins[None, :]) & used[:, None]
        ahead = tl.dot(earlier, member.to(tl.float16)).to(tl.int32)
        row = tl.sum(tl.where(member, begin[None, :] + ahead, 0), axis=1)
        tl.store(rows + slot, tl.where(used, row, slots).to(tl.int64), mask=slot < last)
        tl.store(order + row, slot.to(tl.int64), mask=used)
        begin += tl.sum(member.to(tl.int32), axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets + bins, ends, mask=bins < experts)


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `chosen (T,K)` the order (T*K,), the rows of the slots (T,K) and the offsets (E,), as ops/dispatch.py has them."""
    slots, device = chosen.numel(), chosen.device
    bins = max(triton.next_power_of_2(experts), 16)
    block = min(max(TILE_ELEMENTS // bins, 16), MOST_SLOTS)
    share = triton.cdiv(triton.cdiv(slots, PROGRAMS), block) * block
    programs = triton.cdiv(slots, share)
    counts = torch.empty(programs, bins, dtype=torch.int32, device=device)
    order = torch.empty(slots, dtype=torch.int64, device=device)
    rows = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    size = {"BINS": bins, "BLOCK": block}
    _count[(programs,)](chosen, counts, slots, share, experts, **size)
    _place[(programs,)](chosen, counts, order, rows, offsets, slots, share, experts, programs, **size)
    return order, rows, offsets
