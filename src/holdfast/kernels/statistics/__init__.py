"""Statistics that routers learn from batches: exact quantiles over all processes, and running means.

Neither makes the host wait for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.kernels.operators import has_kernels, on_gpu, operator

DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the three digits of a 32-bit key
BYTES = 4  # the digits on a GPU, where smaller ones are better: the counts of a byte fit into the registers of a program


def midpoint(values: Tensor, real: Tensor | None, below: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a number with exactly `below` of the finite `values (..., n)` below it: the mean of its two neighbours.

    Only rows where `real (...)` is True count, over all processes. The result is 0 if `below` is 0, and twice the largest
    value if `below` is at least the number of values. `over_ranks` returns the sum of a tensor over all processes.
    """
    if has_kernels(values):
        return _midpoint(below, _count_bytes(values, real, below, over_ranks))
    valid = _valid(values, real)
    most = over_ranks(valid.sum())
    lower, upper = smallest(values, valid, torch.stack([below - 1, below]).minimum(most - 1).clamp_min(0), over_ranks)
    upper = upper.where(below < most, 3 * lower)
    return ((lower + upper) / 2).where((below > 0) & (most > 0), 0.0)


def order_statistic(values: Tensor, real: Tensor | None, rank: Tensor) -> Tensor:
    """Return the `rank`-th smallest, from 0, of the finite `values (..., n)`; infinity if there are not that many.

    Only rows where `real (...)` is True count, and only those of this process.
    """
    if has_kernels(values):
        return _at_rank(rank, _count_bytes(values, real, rank, lambda own: own))
    # Not `smallest`, which rounds to float32: then one value too many could be below the result.
    ranked = values.detach().where(_valid(values, real), torch.inf).flatten().sort().values
    ranked = torch.cat([ranked, ranked.new_full((1,), torch.inf)])
    return ranked.index_select(0, rank.clamp_max(ranked.shape[0] - 1).view(1)).squeeze(0)


def _valid(values: Tensor, real: Tensor | None) -> Tensor:
    return values.isfinite() if real is None else values.isfinite() & real.unsqueeze(-1)


def _count_bytes(values: Tensor, real: Tensor | None, below: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the counts (2,4,256) of the kernels: of the bytes of the values at ranks `below` - 1 and `below`."""
    counts = torch.zeros(2, BYTES, 256, dtype=torch.int64, device=values.device)
    # The kernels read memory in order, while `real` may be the diagonal of an attention mask: copy it once for all four.
    values, real = values.detach().contiguous(), None if real is None else real.contiguous()
    for byte in range(BYTES):
        _count(values, real, below, counts, byte)
        own = counts[:, byte]
        if (summed := over_ranks(own)) is not own:
            own.copy_(summed)
    return counts


def smallest(values: Tensor, valid: Tensor, ranks: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the `ranks[i]`-th smallest (from 0) of the float32 `values` where `valid`; +inf past the last.

    All processes' values count, and processes may hold different numbers of them. A radix selection: three histograms of up
    to 2^11 bins, each summed `over_ranks`.
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


_count = operator(
    "count_bytes(Tensor values, Tensor? real, Tensor below, Tensor(a!) counts, int byte) -> ()",
    on_gpu(__name__, "count_bytes"),
    lambda *_: None,
)
_midpoint = operator(
    "midpoint_of_bytes(Tensor below, Tensor counts) -> Tensor",
    on_gpu(__name__, "midpoint"),
    lambda below, counts: counts.new_empty((), dtype=torch.float32),
)
_at_rank = operator(
    "value_at_rank(Tensor rank, Tensor counts) -> Tensor",
    on_gpu(__name__, "at_rank"),
    lambda rank, counts: counts.new_empty((), dtype=torch.float32),
)
_update_running_mean = on_gpu(__name__, "update_running_mean")


@torch.no_grad()
def update_running_mean(
    mean: Tensor, seen: Tensor, batch: Tensor, tokens: Tensor, due: Tensor, *, memory: float, is_sum: bool
) -> None:
    """Move the running `mean (n,)` towards a batch's value, in place, where `due` and the batch has any `tokens`.

    The first batch sets the mean; `seen ()` uint8 says whether there was one. With `is_sum`, `batch` is a sum over the
    tokens, which is divided by them. Without, it is a value, and as long as it is 0 no batch counts as seen.
    """
    if not torch.compiler.is_compiling() and has_kernels(mean):  # a compiler fuses the formula by itself
        _update_running_mean(mean, seen.view(torch.bool), batch, tokens, due, memory, is_sum)
        return
    counts, known = tokens > 0, seen != 0
    batch = batch / tokens.clamp_min(1) if is_sum else batch
    moved = torch.where(known, memory * mean + (1 - memory) * batch, batch).where(counts, mean)
    now_known = known | (counts if is_sum else counts & (batch > 0))
    # Not where(..., out=mean): under torch.compile a backward that computes it again would then read the new state.
    mean.copy_(torch.where(due, moved, mean))
    seen.copy_(torch.where(due, now_known, seen))
