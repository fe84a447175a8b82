"""Triton kernels of the balance loss. The sums are added in a fixed order, so results repeat to the bit."""

# mypy: ignore-errors
import torch
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel, next_power_of_2
from holdfast.kernels.select import TINY

MOST_PROGRAMS = 256  # that add up tokens; one program then adds their sums
IN_REGISTERS = 4096  # gates that a program has in registers


@kernel
def _sums(
    gates, chosen, real, sums, tokens, experts, tiny, K: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr, E: tl.constexpr
):
    """Add up normalised gates, selections and the number of real tokens, for each expert, of every n-th block of tokens."""
    expert = tl.arange(0, E)
    mass, load = tl.zeros((T, E), dtype=tl.float32), tl.zeros((T, E), dtype=tl.float32)
    count = tl.zeros((T,), dtype=tl.float32)
    for start in range(tl.program_id(0) * T, tokens, tl.num_programs(0) * T):
        token = (start + tl.arange(0, T)).to(tl.int64)
        counts = token < tokens
        if MASKED:
            counts = counts & (tl.load(real + token, mask=counts, other=0) != 0)
        inside = counts[:, None] & (expert < experts)[None, :]
        gate = tl.load(gates + token[:, None] * experts + expert[None, :], mask=inside, other=0.0)
        total = tl.sum(gate, axis=1)
        mass += gate / tl.where(total >= tiny, total, 1.0)[:, None]
        taken = tl.zeros((T, E), dtype=tl.int1)
        for slot in range(K):
            own = tl.load(chosen + token * K + slot, mask=counts, other=-1)
            taken = taken | (own[:, None] == expert[None, :])
        load += tl.where(taken & inside, 1.0, 0.0)
        count += tl.where(counts, 1.0, 0.0)
    row = sums + tl.program_id(0) * (2 * experts + 1)
    tl.store(row + expert, tl.sum(mass, axis=0), mask=expert < experts)
    tl.store(row + experts + expert, tl.sum(load, axis=0), mask=expert < experts)
    tl.store(row + 2 * experts, tl.sum(count, axis=0))


@kernel
def _loss(sums, loss, slopes, rows, experts, tiny, R: tl.constexpr, E: tl.constexpr):
    """Write E sum_e f_e P_e, and E f_e / count: what a normalised gate adds to it."""
    expert = tl.arange(0, E)
    inside = expert < experts
    masses, loads = tl.zeros((R, E), dtype=tl.float32), tl.zeros((R, E), dtype=tl.float32)
    counts = tl.zeros((R,), dtype=tl.float32)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        place = sums + row[:, None] * (2 * experts + 1) + expert[None, :]
        both = (row < rows)[:, None] & inside[None, :]
        masses += tl.load(place, mask=both, other=0.0)
        loads += tl.load(place + experts, mask=both, other=0.0)
        counts += tl.load(sums + row * (2 * experts + 1) + 2 * experts, mask=row < rows, other=0.0)
    count = tl.sum(counts, axis=0)
    count = tl.where(count > 0, count, 1.0)
    mass, load = tl.sum(masses, axis=0), tl.sum(loads, axis=0) / count
    total = tl.sum(load, axis=0)
    slope = experts * (load / tl.where(total >= tiny, total, 1.0)) / count
    tl.store(slopes + expert, slope, mask=inside)
    tl.store(loss, tl.sum(slope * mass, axis=0))


@kernel
def _gradient(grad, gates, real, slopes, out, tokens, experts, tiny, MASKED: tl.constexpr, T: tl.constexpr, E: tl.constexpr):
    expert = tl.arange(0, E)
    token = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    counts = token < tokens
    place = token[:, None] * experts + expert[None, :]
    inside = counts[:, None] & (expert < experts)[None, :]
    if MASKED:
        counts = counts & (tl.load(real + token, mask=counts, other=0) != 0)
    gate = tl.load(gates + place, mask=counts[:, None] & (expert < experts)[None, :], other=0.0)
    slope = tl.load(slopes + expert, mask=expert < experts, other=0.0)[None, :]
    total = tl.sum(gate, axis=1)
    usual = (total >= tiny)[:, None]
    safe = tl.where(total >= tiny, total, 1.0)[:, None]
    mean = tl.sum(slope * gate / safe, axis=1)[:, None]
    value = tl.load(grad) * tl.where(usual, slope - mean, slope) / safe
    tl.store(out + place, tl.where(counts[:, None], value, 0.0), mask=inside)


def _block(experts: int) -> dict[str, int]:
    width = next_power_of_2(experts)
    return {"T": max(1, min(64, IN_REGISTERS // width)), "E": width}


def sums(gates: Tensor, chosen: Tensor, real: Tensor | None) -> Tensor:
    """Return (n, 2E+1): sums of normalised gates, of selections and of real tokens, one row for each program."""
    tokens, experts = gates.shape
    block = _block(experts)
    programs = min(cdiv(tokens, block["T"]), MOST_PROGRAMS)
    out = torch.empty(programs, 2 * experts + 1, device=gates.device)
    masked = real is not None
    mask = real.contiguous() if masked else gates  # the mask of one sequence may be the diagonal of an attention mask
    _sums[(programs,)](gates, chosen, mask, out, tokens, experts, TINY, K=chosen.shape[1], MASKED=masked, **block)
    return out


def loss(sums: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and its slopes (E,) in the normalised gates, from the sums of all programs.

    Of several ranks, it takes the mean over ranks of their sums.
    """
    value, slopes = torch.empty((), device=sums.device), torch.empty(experts, device=sums.device)
    width = next_power_of_2(experts)
    rows = max(1, IN_REGISTERS // width)
    _loss[(1,)](sums, value, slopes, sums.shape[0], experts, TINY, R=rows, E=width)
    return value, slopes


def gradient(grad: Tensor, gates: Tensor, real: Tensor | None, slopes: Tensor) -> Tensor:
    """Return the gradient of `gates (T,E)` for the gradient `grad` of the loss."""
    tokens, experts = gates.shape
    block, out, masked = _block(experts), torch.empty_like(gates), real is not None
    grid, mask = (cdiv(tokens, block["T"]),), real.contiguous() if masked else gates
    _gradient[grid](grad.contiguous(), gates, mask, slopes, out, tokens, experts, TINY, MASKED=masked, **block)
    return out
