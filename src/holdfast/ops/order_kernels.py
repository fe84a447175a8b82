"""Triton kernels of the radix selection in ops/order.py. Imported only where Triton can run.

counts (2,4,256) int64: for the lower and the upper of two ranks, how many candidates have each value of the i-th byte of
their keys, where candidates agree with the rank's key in the bytes before. The first byte is counted once, for both.
Sums of integers: the order in which programs add them changes nothing.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

BINS = tl.constexpr(256)
BLOCK = 2048


@triton.jit
def _rank(counts, below, which):
    """From 0: below - 1 and below, but no further than the last, and how many there are."""
    most = tl.sum(tl.load(counts + tl.arange(0, BINS)), axis=0)
    return tl.maximum(tl.minimum(below - 1 + which, most - 1), 0), most


@triton.jit
def _leading_bytes(counts, below, which, BYTES: tl.constexpr):
    """The first BYTES bytes of the key with this rank."""
    bins = tl.arange(0, BINS)
    rank, _ = _rank(counts, below, which)
    prefix = tl.zeros((), dtype=tl.int64)
    for byte in tl.static_range(BYTES):
        mine = tl.load(counts + ((which if byte > 0 else 0) * 4 + byte) * BINS + bins)
        digit = tl.sum((tl.cumsum(mine, axis=0) <= rank).to(tl.int64), axis=0)
        rank -= tl.sum(tl.where(bins < digit, mine, 0), axis=0)
        prefix = prefix * BINS + digit
    return prefix


@triton.jit
def _count(values, real, below, counts, size, width, PADDED: tl.constexpr, BYTE: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < size, other=float("inf"))
    candidate = (place < size) & (tl.abs(value) < float("inf"))
    if PADDED:
        candidate = candidate & (tl.load(real + place // width, mask=place < size, other=0) != 0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(bits < 0, -bits - 1, bits + 2147483648)
    if BYTE > 0:
        candidate = candidate & ((keys >> (32 - 8 * BYTE)) == _leading_bytes(counts, tl.load(below), which, BYTE))
    digits = ((keys >> (24 - 8 * BYTE)) & 255).to(tl.int32)
    found = tl.histogram(digits, BINS, mask=candidate)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + (which * 4 + BYTE) * BINS + bins, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def _value(counts, below, which):
    key = _leading_bytes(counts, below, which, 4)
    bits = tl.where(key >= 2147483648, key - 2147483648, -key - 1)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _midpoint(below, counts, out):
    wanted = tl.load(below)
    _, most = _rank(counts, wanted, 0)
    lower, upper = _value(counts, wanted, 0), _value(counts, wanted, 1)
    upper = tl.where(wanted < most, upper, 3 * lower)
    tl.store(out, tl.where((wanted > 0) & (most > 0), (lower + upper) / 2, 0.0))


def count(values: Tensor, real: Tensor | None, below: Tensor, counts: Tensor, byte: int) -> None:
    """Count the `byte`-th bytes of the keys, into `counts`, which holds the sums of the bytes before."""
    size = values.numel()
    _count[(triton.cdiv(size, BLOCK), 1 if byte == 0 else 2)](
        values,
        values if real is None else real,
        below,
        counts,
        size,
        values.shape[-1],
        PADDED=real is not None,
        BYTE=byte,
        BLOCK=BLOCK,
    )


def midpoint(below: Tensor, counts: Tensor) -> Tensor:
    out = torch.empty((), dtype=torch.float32, device=counts.device)
    _midpoint[(1,)](below, counts, out, num_warps=4)
    return out
