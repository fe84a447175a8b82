"""Matrix products of rows that are sorted by expert, one weight matrix an expert.

    R rows, E experts; offsets (E,) int32: expert e owns rows offsets[e-1] to offsets[e], rows past the last belong to nobody

On a GPU torch's grouped kernel where it applies and a Triton kernel where it does not: neither waits for the offsets.
Elsewhere a loop over experts, which on a CPU is faster than torch's own.
"""

import torch
from torch import Tensor

from holdfast.kernels.triton_support import HAS_TRITON, on_device_of

ALIGNMENT = 16  # bytes, of every row and matrix that torch's grouped kernel takes


def mm(rows: Tensor, weight: Tensor, offsets: Tensor, *, transpose: bool) -> Tensor:
    """Each expert's rows (R,m) times its weight (E,n,m)^T, or times its weight (E,m,n) if not `transpose`.

    What the result holds in nobody's rows is undefined on a GPU, where nothing knows how many they are, and 0 elsewhere.
    """
    matrices = weight.transpose(-2, -1) if transpose else weight
    if rows.shape[0] == 0:
        return rows.new_empty(0, matrices.shape[-1])
    if _torch_has_kernel(rows, weight) and _aligned(matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)
    if HAS_TRITON and rows.is_cuda:
        from holdfast.kernels import grouped_kernels

        with on_device_of(rows):
            return grouped_kernels.mm(rows, matrices, offsets)
    out = rows.new_empty(rows.shape[0], matrices.shape[-1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrices[expert], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each expert's rows of left (R,n) times right (R,m): (E,n,m), zero for an expert without rows."""
    experts = offsets.shape[0]
    if left.shape[0] == 0:
        return left.new_zeros(experts, left.shape[1], right.shape[1])
    if _torch_has_kernel(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
    if HAS_TRITON and left.is_cuda:
        from holdfast.kernels import grouped_kernels

        with on_device_of(left):
            return grouped_kernels.outer(left, right, offsets)
    out = left.new_empty(experts, left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        else:
            out[expert].zero_()
        start = end
    return out


def _torch_has_kernel(*operands: Tensor) -> bool:
    """Whether torch's grouped kernel runs here: elsewhere it is a loop that waits for the offsets, or an error."""
    first = operands[0]
    return (
        first.is_cuda
        and first.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(first.device) >= (8, 0)
        and all(_aligned(x) for x in operands)
        and all(x.data_ptr() % ALIGNMENT == 0 for x in operands)
    )


def _aligned(operand: Tensor) -> bool:
    """Of a result as wide as this too: the kernel would leave gaps between its rows."""
    return operand.shape[-1] * operand.element_size() % ALIGNMENT == 0
