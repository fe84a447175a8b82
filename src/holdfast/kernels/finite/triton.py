"""A Triton kernel that looks for NaN and infinity."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.launching import cdiv

BLOCK = 4096


@triton.jit
def _check(scores, found, zero, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores + place, mask=place < size, other=0.0)
    finite = tl.abs(scores) < float("inf")  # no comparison with NaN is true
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.store(found, 1)
    if tl.program_id(0) == 0:
        tl.store(zero, 0.0)


def check(scores: Tensor, found: Tensor) -> Tensor:
    """Write 1 to `found`, which may lie in the host's pinned memory, if a score is not finite; return a 0."""
    zero = torch.empty((), dtype=scores.dtype, device=scores.device)
    _check[(cdiv(scores.numel(), BLOCK),)](scores, found, zero, scores.numel(), BLOCK=BLOCK)
    return zero
