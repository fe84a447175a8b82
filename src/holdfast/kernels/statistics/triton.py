"""Triton kernels for exact quantiles, by radix selection, and for running means.

counts (2,4,256) int64: for the lower and the upper of two neighbouring ranks, how many candidates have each value of the
i-th byte of their keys. A candidate has the same earlier bytes as the key at that rank. As long as both ranks have the same
earlier bytes, only the lower rank's candidates are counted. Counts are integers: the order of additions changes nothing.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel, next_power_of_2

BINS = tl.constexpr(256)
BLOCK = 2048


@triton.jit
def _leading_bytes(counts, below, BYTES: tl.constexpr):
    """Return the first bytes of the keys at ranks `below` - 1 and `below`, or at the last rank, and the number of keys."""
    bins = tl.arange(0, BINS)
    most = tl.sum(tl.load(counts + bins), axis=0)
    lower_rank = tl.maximum(tl.minimum(below - 1, most - 1), 0)
    upper_rank = tl.maximum(tl.minimum(below, most - 1), 0)
    lower = tl.zeros((), dtype=tl.int64)
    upper = tl.zeros((), dtype=tl.int64)
    for byte in tl.static_range(BYTES):
        of_lower = tl.load(counts + byte * BINS + bins)
        up_to_lower = tl.cumsum(of_lower, axis=0)
        of_upper, up_to_upper = of_lower, up_to_lower
        if lower != upper:
            of_upper = tl.load(counts + (4 + byte) * BINS + bins)
            up_to_upper = tl.cumsum(of_upper, axis=0)
        lower_byte = tl.sum((up_to_lower <= lower_rank).to(tl.int64), axis=0)
        upper_byte = tl.sum((up_to_upper <= upper_rank).to(tl.int64), axis=0)
        lower_rank -= tl.sum(tl.where(bins < lower_byte, of_lower, 0), axis=0)
        upper_rank -= tl.sum(tl.where(bins < upper_byte, of_upper, 0), axis=0)
        lower, upper = lower * BINS + lower_byte, upper * BINS + upper_byte
    return lower, upper, most


@triton.jit
def _add_counts(counts, digits, candidate):
    bins = tl.arange(0, BINS)
    found = tl.histogram(digits, BINS, mask=candidate)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@kernel
def _count(values, real, below, counts, size, width, PADDED: tl.constexpr, BYTE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < size, other=float("inf"))
    candidate = (place < size) & (tl.abs(value) < float("inf"))
    if PADDED:
        candidate = candidate & (tl.load(real + place // width, mask=place < size, other=0) != 0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(bits < 0, -bits - 1, bits + 2147483648)
    digits = ((keys >> (24 - 8 * BYTE)) & 255).to(tl.int32)
    if BYTE == 0:
        _add_counts(counts, digits, candidate)
    else:
        lower, upper, _ = _leading_bytes(counts, tl.load(below), BYTE)
        leading = keys >> (32 - 8 * BYTE)
        _add_counts(counts + BYTE * BINS, digits, candidate & (leading == lower))
        if lower != upper:
            _add_counts(counts + (4 + BYTE) * BINS, digits, candidate & (leading == upper))


@triton.jit
def _value(key):
    bits = tl.where(key >= 2147483648, key - 2147483648, -key - 1)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@kernel
def _midpoint(below, counts, out):
    wanted = tl.load(below)
    lower_key, upper_key, most = _leading_bytes(counts, wanted, 4)
    lower, upper = _value(lower_key), _value(upper_key)
    upper = tl.where(wanted < most, upper, 3 * lower)
    tl.store(out, tl.where((wanted > 0) & (most > 0), (lower + upper) / 2, 0.0))


@kernel
def _at_rank(rank, counts, out):
    wanted = tl.load(rank)
    _, key, most = _leading_bytes(counts, wanted, 4)
    tl.store(out, tl.where(wanted < most, _value(key), float("inf")))


def count_bytes(values: Tensor, real: Tensor | None, below: Tensor, counts: Tensor, byte: int) -> None:
    """Count the `byte`-th bytes of the keys into `counts`, which already holds the counts of the bytes before."""
    size, values, padded = values.numel(), values.contiguous(), real is not None
    mask = real.contiguous() if padded else values
    _count[(cdiv(size, BLOCK),)](values, mask, below, counts, size, values.shape[-1], PADDED=padded, BYTE=byte, BLOCK=BLOCK)


def midpoint(below: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the values at both ranks, from the counts of all four bytes."""
    out = torch.empty((), dtype=torch.float32, device=counts.device)
    _midpoint[(1,)](below, counts, out, num_warps=4)
    return out


def at_rank(rank: Tensor, counts: Tensor) -> Tensor:
    """Return the value at `rank`, from the counts of all four bytes; infinity if there are not that many values."""
    out = torch.empty((), dtype=torch.float32, device=counts.device)
    _at_rank[(1,)](rank, counts, out, num_warps=4)
    return out


@kernel
def _update_running_mean(
    state, seen, staged, tokens, due, size, MEMORY: tl.constexpr, IS_SUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Run in one program, which alone reads and writes `seen`."""
    place = tl.arange(0, BLOCK)
    inside = place < size
    count = tl.load(tokens).to(tl.float32)
    if (tl.load(due) != 0) & (count > 0):
        batch = tl.load(staged + place, mask=inside, other=0.0)
        if IS_SUM:
            batch = batch / count
        known = tl.load(seen) != 0
        if known:
            batch = MEMORY * tl.load(state + place, mask=inside, other=0.0) + (1 - MEMORY) * batch
        tl.store(state + place, batch, mask=inside)
        if IS_SUM:
            tl.store(seen, True)
        else:
            tl.store(seen, known | (tl.sum(tl.where(inside, tl.load(staged + place, mask=inside, other=0.0), 0.0)) > 0))


def update_running_mean(
    state: Tensor, seen: Tensor, staged: Tensor, tokens: Tensor, due: Tensor, memory: float, is_sum: bool
) -> None:
    size = state.numel()
    block = next_power_of_2(size)
    _update_running_mean[(1,)](
        state, seen, staged, tokens, due, size, MEMORY=memory, IS_SUM=is_sum, BLOCK=block, num_warps=1
    )
