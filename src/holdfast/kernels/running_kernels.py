"""The Triton kernel of kernels/running.py. Imported only where Triton can run."""

# mypy: ignore-errors
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.sizes import next_power_of_2


@triton.jit
def _absorb(state, seen, staged, tokens, due, size, MEMORY: tl.constexpr, IS_SUM: tl.constexpr, BLOCK: tl.constexpr):
    """One program: it alone reads and writes what was seen."""
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


def absorb(state: Tensor, seen: Tensor, staged: Tensor, tokens: Tensor, due: Tensor, memory: float, is_sum: bool) -> None:
    size = state.numel()
    block = next_power_of_2(size)
    _absorb[(1,)](state, seen, staged, tokens, due, size, MEMORY=memory, IS_SUM=is_sum, BLOCK=block, num_warps=1)
