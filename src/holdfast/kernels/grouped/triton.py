"""Triton grouped products for the dtypes and shapes that torch's grouped kernel refuses (float32, float16, odd widths).

They never wait for the device, and are not tuned for speed. Sums are float32; float32 inputs are multiplied as float32.
"""

# mypy: ignore-errors
import torch
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel

TILE = 64  # rows and columns of a result tile
DEPTH = 32  # how much of the inner dimension at a time


@kernel
def _mm(
    rows,
    weight,
    offsets,
    tile_expert,
    tile_row,
    out,
    experts,
    inner,
    width,
    stride_expert,
    stride_inner,
    stride_width,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < experts:
        row = tl.load(tile_row + tl.program_id(0)).to(tl.int64) + tl.arange(0, TILE)
        own = row < tl.load(offsets + expert)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            left = tl.load(
                rows + row[:, None] * inner + depth[None, :], mask=own[:, None] & (depth < inner)[None, :], other=0.0
            )
            right = tl.load(
                weight + expert * stride_expert + depth[:, None] * stride_inner + column[None, :] * stride_width,
                mask=(depth < inner)[:, None] & (column < width)[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(out + row[:, None] * width + column[None, :], total, mask=own[:, None] & (column < width)[None, :])


@kernel
def _outer(left, right, offsets, out, height, width, TILE: tl.constexpr, DEPTH: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    last = tl.load(offsets + expert)
    up = tl.program_id(1) * TILE + tl.arange(0, TILE)
    across = tl.program_id(2) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(first, last, DEPTH):
        row = (start + tl.arange(0, DEPTH)).to(tl.int64)
        a = tl.load(
            left + row[None, :] * height + up[:, None], mask=(row < last)[None, :] & (up < height)[:, None], other=0.0
        )
        b = tl.load(
            right + row[:, None] * width + across[None, :], mask=(row < last)[:, None] & (across < width)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    place = expert * height * width + up[:, None] * width + across[None, :]
    tl.store(out + place, total, mask=(up < height)[:, None] & (across < width)[None, :])


def _tiles(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which expert's rows each tile covers, and its first row; expert E for tiles that are not needed.

    The number of tiles is an upper bound that does not depend on the offsets: one partly filled tile an expert.
    """
    experts = offsets.shape[0]
    starts = torch.nn.functional.pad(offsets[:-1], (1, 0))
    ends = ((offsets - starts + TILE - 1) // TILE).cumsum(0)
    tile = torch.arange(cdiv(rows, TILE) + experts, device=offsets.device)
    expert = torch.searchsorted(ends, tile, right=True)
    known = expert.clamp_max(experts - 1)
    first_tile = torch.nn.functional.pad(ends[:-1], (1, 0))[known]
    return expert, starts[known] + (tile - first_tile) * TILE


def mm(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return each expert's rows (R,m) times its matrix (E,m,n), of any strides."""
    experts, inner, width = matrices.shape
    out = rows.new_empty(rows.shape[0], width)
    tile_expert, tile_row = _tiles(rows.shape[0], offsets)
    grid = (tile_expert.shape[0], cdiv(width, TILE))
    strides = matrices.stride()
    _mm[grid](rows, matrices, offsets, tile_expert, tile_row, out, experts, inner, width, *strides, TILE=TILE, DEPTH=DEPTH)
    return out


def outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum over each expert's rows of left (R,n) times right (R,m), as (E,n,m)."""
    experts, height, width = offsets.shape[0], left.shape[1], right.shape[1]
    out = left.new_empty(experts, height, width)
    grid = (experts, cdiv(height, TILE), cdiv(width, TILE))
    _outer[grid](left, right, offsets, out, height, width, TILE=TILE, DEPTH=DEPTH)
    return out
