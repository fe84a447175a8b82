"""Triton kernels of ops/heads.py. Imported only where Triton can run."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # copied by one program


@triton.jit
def _take(
    rows,
    head,
    out,
    count,
    width,
    stride_batch,
    stride_head,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < count) & (column < width)
    place = batch * stride_batch + tl.load(head) * stride_head + row * stride_row + column * stride_column
    tl.store(out + (batch * count + row) * width + column, tl.load(rows + place, mask=inside), mask=inside)


@triton.jit
def _put(rows, head, out, heads, elements, BLOCK: tl.constexpr):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    place = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    own = place < elements * (tl.program_id(0) % heads == tl.load(head)).to(tl.int64)
    values = tl.load(rows + batch * elements + place, mask=own, other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * elements + place, values, mask=place < elements)


def take(rows: Tensor, head: Tensor) -> Tensor:
    batches, _, count, width = rows.shape
    out = torch.empty(batches, count, width, dtype=rows.dtype, device=rows.device)
    across = triton.next_power_of_2(width)
    down = max(1, ELEMENTS // across)
    _take[batches, triton.cdiv(count, down)](rows, head, out, count, width, *rows.stride(), ROWS=down, WIDTH=across)
    return out


def put(rows: Tensor, head: Tensor, heads: int) -> Tensor:
    """`rows (B,N,D)`, contiguous."""
    out = torch.empty(rows.shape[0], heads, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    elements = rows[0].numel()
    _put[rows.shape[0] * heads, triton.cdiv(elements, ELEMENTS)](rows, head, out, heads, elements, BLOCK=ELEMENTS)
    return out
