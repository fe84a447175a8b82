"""A Triton kernel that looks for NaN and infinity, and writes the name of the first layer that has one."""

# mypy: ignore-errors
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel

BLOCK = 4096


@kernel
def _check(
    scores, real, layer, name, found, size, experts, MASKED: tl.constexpr, LETTERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the layer's name if a score is NaN or infinite, and no earlier layer has written its own."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if MASKED:
        inside = inside & (tl.load(real + place // experts, mask=inside, other=0) != 0)
    finite = tl.abs(tl.load(scores + place, mask=inside, other=0.0)) < float("inf")  # no comparison with NaN is true
    if tl.min(finite.to(tl.int32)) == 0:  # noqa: SIM102  # `and` would read the host's memory in every program
        if tl.load(found, volatile=True) == 0:  # other programs write the same name
            letter = tl.arange(0, LETTERS)
            tl.store(name + letter, tl.load(layer + letter))
            tl.store(found, 1)


def check(scores: Tensor, real: Tensor | None, layer: Tensor, name: Tensor, found: Tensor) -> None:
    """Copy `layer` to `name` and write 1 to `found` if a real row of `scores (n,E)` is not finite and `found` is 0.

    `name` and `found` may lie in the host's pinned memory.
    """
    masked = real is not None
    grid, mask = (cdiv(scores.numel(), BLOCK),), real.contiguous() if masked else scores
    sizes = scores.numel(), scores.shape[1]
    _check[grid](scores, mask, layer, name, found, *sizes, MASKED=masked, LETTERS=layer.numel(), BLOCK=BLOCK)
