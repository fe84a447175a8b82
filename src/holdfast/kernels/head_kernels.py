"""Triton kernels of kernels/heads.py. Imported only where Triton can run."""

# mypy: ignore-errors
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.sizes import cdiv, next_power_of_2

ELEMENTS = 4096  # copied by one program


class Source(NamedTuple):
    """Rows (B,H,N,D) through strides, and where one head of them goes."""

    at: Tensor
    batch: int
    head: int
    row: int
    column: int
    batches: int  # B
    own: int  # H
    count: int  # N
    width: int  # D
    out: Tensor


@triton.jit
def _take(sources, shapes: tl.constexpr, head, heads):
    """The third axis of the grid says which of them. `shapes`: rows and columns of a program's tile of each."""
    for index in tl.static_range(len(shapes)):
        if tl.program_id(2) == index:
            source = sources[index]
            batch = tl.program_id(0).to(tl.int64)
            row = (tl.program_id(1) * shapes[index][0] + tl.arange(0, shapes[index][0])).to(tl.int64)[:, None]
            column = tl.arange(0, shapes[index][1])[None, :]
            count = source.count * (batch < source.batches).to(tl.int64)
            inside = (row < count) & (column < source.width)
            place = batch * source.batch + tl.load(head) * source.own // heads * source.head
            values = tl.load(source.at + place + row * source.row + column * source.column, mask=inside)
            tl.store(source.out + (batch * source.count + row) * source.width + column, values, mask=inside)


@triton.jit
def _put(rows, head, out, heads, own, elements, BLOCK: tl.constexpr):
    batch = (tl.program_id(0) // own).to(tl.int64)
    place = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mine = place < elements * (tl.program_id(0) % own == tl.load(head) * own // heads).to(tl.int64)
    values = tl.load(rows + batch * elements + place, mask=mine, other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * elements + place, values, mask=place < elements)


def take(rows: Sequence[Tensor], head: Tensor, heads: int) -> list[Tensor]:
    outs = [torch.empty(each.shape[0], *each.shape[2:], dtype=each.dtype, device=each.device) for each in rows]
    widths = [next_power_of_2(each.shape[3]) for each in rows]
    shapes = tuple((max(1, ELEMENTS // width), width) for width in widths)
    blocks = [cdiv(each.shape[2], height) for each, (height, _) in zip(rows, shapes, strict=True)]
    sources = tuple(Source(each, *each.stride(), *each.shape, out) for each, out in zip(rows, outs, strict=True))
    _take[max(each.shape[0] for each in rows), max(blocks), len(rows)](sources, shapes, head, heads)
    return outs


def put(rows: Tensor, head: Tensor, heads: int, own: int) -> Tensor:
    """`rows (B,N,D)`, contiguous."""
    out = torch.empty(rows.shape[0], own, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    elements = rows[0].numel()
    _put[rows.shape[0] * own, cdiv(elements, ELEMENTS)](rows, head, out, heads, own, elements, BLOCK=ELEMENTS)
    return out
