"""The Triton kernel of kernels/norms.py: products whose squares are summed as they come. Needs Triton."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.part_kernels import tile_width
from holdfast.kernels.sizes import cdiv

ROWS, COLUMNS = 64, 128


@triton.jit
def _norms(
    value,
    across,
    bias,
    out,
    count,
    width,
    dim,
    heads,
    stride_row,
    stride_column,
    stride_down,
    stride_across,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inner = tl.arange(0, WIDTH)
    own = value + row[:, None] * stride_row + inner[None, :] * stride_column
    v = tl.load(own, mask=(row < count)[:, None] & (inner < width)[None, :], other=0.0)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, dim, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        place = across + inner[:, None] * stride_down + column[None, :] * stride_across
        w = tl.load(place, mask=(inner < width)[:, None] & (column < dim)[None, :], other=0.0)
        said = tl.dot(v, w) * heads
        if HAS_BIAS:
            said += tl.load(bias + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(said * said, 1)
    tl.store(out + row, total, mask=row < count)


def norms(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """`value (T,D)`, `across (D,d)`, `bias (d,)`: (T,), float32."""
    (count, width), dim = value.shape, across.shape[1]
    out = torch.empty(count, dtype=torch.float32, device=value.device)
    _norms[(cdiv(count, ROWS),)](
        value,
        across,
        value if bias is None else bias,
        out,
        count,
        width,
        dim,
        float(heads),
        *value.stride(),
        *across.stride(),
        HAS_BIAS=bias is not None,
        WIDTH=tile_width(width),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        num_stages=3,
    )
    return out
