"""The r-th smallest of many numbers that may be spread over processes: exact, and nobody waits for a count."""

from collections.abc import Callable

import torch
from torch import Tensor

DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the three digits of a 32-bit key


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
