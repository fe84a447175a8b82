"""Order statistics of many numbers that may be spread over processes: exact, and nobody waits for a count."""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.operators import operator
from holdfast.kernels.triton_support import has_kernels, on_device_of

DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the three digits of a 32-bit key
BYTES = 4  # on a GPU small digits are better: the counts of a byte fit the registers of a program


def midpoint(values: Tensor, real: Tensor | None, below: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """A number with `below` of the finite `values (..., n)` below it, in the middle between two of them; 0 if `below` is 0.

    Only rows where `real (...)`, over all processes. Where `below` is all of them or more, it is twice the last.
    """
    if has_kernels(values):
        counts = torch.zeros(2, BYTES, 256, dtype=torch.int64, device=values.device)
        # Once for all four kernels, which read memory in order: `real` may be the diagonal of an attention mask.
        values, real = values.detach().contiguous(), None if real is None else real.contiguous()
        for byte in range(BYTES):
            _count(values, real, below, counts, byte)
            mine = counts[:, byte]
            if (summed := over_ranks(mine)) is not mine:
                mine.copy_(summed)
        middle: Tensor = _midpoint(below, counts)
        return middle
    valid = values.isfinite() if real is None else values.isfinite() & real.unsqueeze(-1)
    most = over_ranks(valid.sum())
    lower, upper = smallest(values, valid, torch.stack([below - 1, below]).minimum(most - 1).clamp_min(0), over_ranks)
    upper = upper.where(below < most, 3 * lower)
    return ((lower + upper) / 2).where((below > 0) & (most > 0), 0.0)


def smallest(values: Tensor, valid: Tensor, ranks: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """The `ranks[i]`-th smallest (from 0) of the float32 `values` where `valid`, over all processes; +inf beyond the last.

    A radix selection: three histograms of 2^11 bins, each summed `over_ranks`, so that processes may hold different amounts.
    """
    bits = (values.detach().float() + 0.0).flatten().view(torch.int32).long()
    keys = torch.where(bits < 0, -bits - 1, bits + 2**31)  # monotone, from 0 to 2^32 - 1
    valid = valid.flatten()
    found = []
    for index in range(ranks.shape[0]):
        rank, prefix = ranks[index], torch.zeros_like(ranks[index])
        for shift, width in DIGITS:
            candidate = valid & (keys >> (shift + width) == prefix)
            digits = (keys >> shift) & (2**width - 1)
            histogram = torch.zeros(2**width, dtype=torch.int64, device=values.device)
            histogram = over_ranks(histogram.scatter_add(0, digits, candidate.long())).cumsum(0)
            digit = (histogram <= rank).sum()
            below = torch.cat([histogram.new_zeros(1), histogram]).index_select(0, digit.view(1))
            rank = rank - below.squeeze(0)
            prefix = prefix * 2**width + digit
        found.append(prefix)
    chosen = torch.stack(found)
    missing = chosen >= 2**32
    bits = torch.where(chosen >= 2**31, chosen - 2**31, -chosen - 1).clamp(-(2**31), 2**31 - 1)
    return bits.to(torch.int32).view(torch.float32).where(~missing, torch.inf)


def _count_on_gpu(values: Tensor, real: Tensor | None, below: Tensor, counts: Tensor, byte: int) -> None:
    from holdfast.kernels import order_kernels

    with on_device_of(values):
        order_kernels.count(values, real, below, counts, byte)


def _midpoint_on_gpu(below: Tensor, counts: Tensor) -> Tensor:
    from holdfast.kernels import order_kernels

    with on_device_of(counts):
        return order_kernels.midpoint(below, counts)


_count = operator(
    "count_bytes(Tensor values, Tensor? real, Tensor below, Tensor(a!) counts, int byte) -> ()",
    _count_on_gpu,
    lambda *_: None,
)
_midpoint = operator(
    "midpoint_of_bytes(Tensor below, Tensor counts) -> Tensor",
    _midpoint_on_gpu,
    lambda below, counts: counts.new_empty((), dtype=torch.float32),
)
