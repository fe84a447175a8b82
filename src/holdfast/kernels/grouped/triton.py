"""Triton kernels that sort slots by expert, move rows between token order and expert order, and work on them there.

R rows sorted by expert, T tokens, K slots a token, E experts, `order` the slot of each row and `slots` the row of each slot;
`used` points at the number of rows that belong to an expert, at most R.

**Sorting** is by counting: a slot's row is the number of slots of earlier experts, plus the number of earlier slots of its
own expert, in the blocks before and in its own block. Three small launches, or two where experts times blocks are few; a
general sort, its inverse and its bounds take fifteen.

**Moving.** Each output element is written by one program in a fixed order of additions, so results repeat to the bit.

**Working on rows**: biases, gated activations, weights, and the sums of an expert's rows. R may be far larger than `used`:
at most `MOST_PROGRAMS` programs run over rows, and each takes every `MOST_PROGRAMS`-th row.

**Products** (`mm`, `outer`) are for dtypes and shapes that torch's grouped kernel refuses (float32, float16, odd widths).
They never wait for the device, and are not tuned for speed. Sums are float32; float32 inputs are multiplied as float32.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operators import cdiv, kernel, next_power_of_2

SORT_BLOCK = 64  # slots that are counted and placed together, by one warp
SPAN = 1024  # blocks whose counts are added up at a time
IN_REGISTERS = 2**11  # counts that a program adds up at a time
FEW_COUNTS = 2**14  # of all experts in all blocks: up to here, every program adds up those that it needs itself
BLOCK = 1024  # columns of a row that one program moves at most
NUMBERS_OF_A_WARP = 256  # 8 for each thread: 16 bytes of bfloat16
FEW_SLOTS = 16  # up to here, all slots of a token are read, whether they are used or not
SHARES = 16  # of an expert's rows: each is added up by its own programs, so that one expert with all rows is not slow
MOST_PROGRAMS = 2**17  # over rows: a program that finds nothing to do still has to be started
TILE = 64  # rows and columns of a tile of a product
DEPTH = 32  # how much of the inner dimension at a time


@triton.jit
def _experts_of(chosen, slot, slots, experts):
    """Return the expert index of each slot, and which slots are in use."""
    expert = tl.load(chosen + slot, mask=slot < slots, other=experts).to(tl.int32)
    return expert, (expert >= 0) & (expert < experts)


@kernel
def _count(chosen, counts, slots, experts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    expert, used = _experts_of(chosen, block * BLOCK + tl.arange(0, BLOCK), slots, experts)
    tl.store(counts + bins.to(tl.int64) * blocks + block, tl.histogram(expert, BINS, mask=used), mask=bins < experts)


@kernel
def _add_up(counts, totals, blocks, SPAN: tl.constexpr):
    """Replace an expert's counts by the number of its slots in the blocks before."""
    expert = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, blocks, SPAN):
        block = start + tl.arange(0, SPAN)
        place, inside = counts + expert * blocks + block, block < blocks
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, total + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total)


@kernel
def _place(
    chosen,
    counts,
    totals,
    order,
    rows,
    offsets,
    slots,
    experts,
    blocks,
    most,
    SPAN: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row of each slot and the slot of each row; a slot whose row would be number `most` or later is unused.

    SPAN: 0 if `_add_up` has added up the counts; otherwise this program does it, SPAN blocks at a time.
    """
    block = tl.program_id(0)
    bins, position = tl.arange(0, BINS), tl.arange(0, BLOCK)
    if SPAN:
        total, before = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
        for start in range(0, blocks, SPAN):
            other = start + tl.arange(0, SPAN)
            inside = (bins < experts)[:, None] & (other < blocks)[None, :]
            count = tl.load(counts + bins[:, None] * blocks + other[None, :], mask=inside, other=0)
            total += tl.sum(count, axis=1)
            before += tl.sum(tl.where((other < block)[None, :], count, 0), axis=1)
    else:
        total = tl.load(totals + bins, mask=bins < experts, other=0)
    ends = tl.cumsum(total, axis=0)
    slot = block * BLOCK + position
    expert, used = _experts_of(chosen, slot, slots, experts)
    own = tl.where(used, expert, 0)
    earlier = (expert[:, None] == expert[None, :]) & (position[None, :] < position[:, None])
    row = tl.gather(ends - total, own, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
    if SPAN:
        row += tl.gather(before, own, axis=0)
    else:
        row += tl.load(counts + own.to(tl.int64) * blocks + block)
    used = used & (row < most)
    tl.store(rows + slot, tl.where(used, row, slots).to(tl.int64), mask=slot < slots)
    tl.store(order + row, slot.to(tl.int64), mask=used)
    if block == 0:
        tl.store(offsets + bins, tl.minimum(ends, most), mask=bins < experts)


@triton.jit
def _last_slot(slots, token, limit, K: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr):
    """Return how many slots to read: up to the last one in use; if FEW, all of them, which lets loads overlap."""
    last = K
    if not FEW:
        places = tl.arange(0, SLOTS)
        own = tl.load(slots + token * K + places, mask=places < K, other=limit)
        last = tl.max(tl.where(own < limit, places + 1, 0), axis=0)
    return last


@triton.jit
def _expert_of(row, offsets, experts, BINS: tl.constexpr):
    """Return the expert that a row belongs to; an unused row has the index `experts`."""
    bins = tl.arange(0, BINS)
    ends = tl.load(offsets + bins, mask=bins < experts, other=2147483647)
    return tl.sum((ends <= row).to(tl.int64), axis=0)


@kernel
def _gather(
    tokens,
    slots,
    used,
    out,
    width,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read a token once and write it to all its rows; reading it once for every row takes half as long again."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    values = tl.load(tokens + token * width + column, mask=column < width, other=0.0)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        tl.store(out + row * width + column, values, mask=(column < width) & (row + 0 * column < limit))


@kernel
def _combine(
    rows,
    slots,
    weights,
    used,
    out,
    width,
    bias,
    offsets,
    experts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.load(used)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(_last_slot(slots, token, limit, K, SLOTS, FEW)):
        row = tl.load(slots + token * K + slot).to(tl.int64)
        # The row of an unused slot is uninitialised memory: never load it, since 0 * NaN is NaN.
        inside = (column < width) & (row + 0 * column < limit)
        values = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if BINS:
            expert = _expert_of(row, offsets, experts, BINS)
            values += tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * K + slot)
        total += values
    tl.store(out + token * width + column, total, mask=column < width)


@kernel
def _add_bias(rows, bias, offsets, width, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    used = tl.load(offsets + experts - 1).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), used, tl.num_programs(0)):
        place = rows + row * width + column
        added = tl.load(bias + _expert_of(row, offsets, experts, BINS) * width + column, mask=inside, other=0.0)
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + added.to(tl.float32)
        tl.store(place, value, mask=inside)


@kernel
def _sum_rows(rows, weights, order, offsets, out, width, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up one share of the rows of one expert: blocks number `share`, `share + shares`, ..."""
    expert, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = 0
    if expert > 0:
        start = tl.load(offsets + expert - 1)
    end = tl.load(offsets + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start + share * ROWS, end, shares * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < end)[:, None] & (column < width)[None, :]
        values = tl.load(rows + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            slot = tl.load(order + row, mask=row < end, other=0)
            values *= tl.load(weights + slot, mask=row < end, other=0.0)[:, None]
        total += values
    place = (share * tl.num_programs(0) + expert).to(tl.int64) * width + column
    tl.store(out + place, tl.sum(total, axis=0), mask=column < width)


@kernel
def _add_bias_dots(grad, bias, order, offsets, dots, width, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    used = tl.load(offsets + experts - 1).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), used, tl.num_programs(0)):
        expert = _expert_of(row, offsets, experts, BINS)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
            total += g * tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        place = dots + tl.load(order + row)
        tl.store(place, tl.load(place) + tl.sum(total, axis=0))


@triton.jit
def _activation(x, NAME: tl.constexpr):
    """Return the activation and its derivative."""
    if NAME == "relu":
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)  # NaN stays NaN, as in torch
    if NAME == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * phi, phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if NAME == "gelu_tanh" or NAME == "gelu_new":
        # 0.5 (1 + tanh(z)) is sigmoid(2z)
        phi = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * phi, phi + x * phi * (1.0 - phi) * slope
    s = tl.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


@kernel
def _glu(gate_up, used, out, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value, _ = _activation(gate, NAME)
        tl.store(out + row * width + column, value * up, mask=inside)


@kernel
def _rows_backward(grad, rows, weights, order, used, out, dots, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of `rows` to `out`, grad . h to `dots`, and weight * h in the place of `grad`.

    h is the row itself or, with the NAME of an activation, activation(gate) * up, which is computed again.
    """
    for row in range(tl.program_id(0).to(tl.int64), tl.load(used).to(tl.int64), tl.num_programs(0)):
        slot = tl.load(order + row)
        weight = tl.load(weights + slot)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
            if NAME == "":
                h = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(out + row * width + column, weight * g, mask=inside)
            else:
                gate = tl.load(rows + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
                up = tl.load(rows + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
                value, slope = _activation(gate, NAME)
                h = (value * up).to(grad.dtype.element_ty).to(tl.float32)  # rounded as it was in the forward
                tl.store(out + row * 2 * width + column, weight * g * up * slope, mask=inside)
                tl.store(out + row * 2 * width + width + column, weight * g * value, mask=inside)
            total += g * h
            tl.store(grad + row * width + column, weight * h, mask=inside)
        tl.store(dots + slot, tl.sum(total, axis=0))


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


def dispatch(chosen: Tensor, experts: int, most_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for `chosen (T,K)` the fields of a `Dispatch`: order (most_rows,), slots (T,K) and offsets (E,)."""
    slots, device = chosen.numel(), chosen.device
    blocks, bins = cdiv(slots, SORT_BLOCK), max(next_power_of_2(experts), 16)
    counts = torch.empty(experts, blocks, dtype=torch.int32, device=device)
    order = torch.empty(most_rows, dtype=torch.int64, device=device)
    rows = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    _count[(blocks,)](chosen, counts, slots, experts, blocks, BINS=bins, BLOCK=SORT_BLOCK, num_warps=1)
    totals, span = counts, 0
    if bins * blocks <= FEW_COUNTS:
        span = min(next_power_of_2(blocks), IN_REGISTERS // bins)
    else:
        totals = torch.empty(experts, dtype=torch.int32, device=device)
        _add_up[(experts,)](counts, totals, blocks, SPAN=SPAN)
    sizes = slots, experts, blocks, most_rows
    warps = 4 if span else 1
    _place[(blocks,)](
        chosen, counts, totals, order, rows, offsets, *sizes, SPAN=span, BINS=bins, BLOCK=SORT_BLOCK, num_warps=warps
    )
    return order, rows, offsets


def _columns(width: int, most: int = BLOCK) -> dict[str, int]:
    """Return how many columns of rows of this width one program takes, at most `most`, and with how many warps.

    Narrow rows get fewer warps: a thread without a column still costs time.
    """
    block = min(most, max(next_power_of_2(width), 128))
    return {"BLOCK": block, "num_warps": 4 if block == most else max(block // NUMBERS_OF_A_WARP, 1)}


def _slot_options(slots: Tensor) -> dict[str, int | bool]:
    count = slots.shape[1]
    return {"K": count, "SLOTS": next_power_of_2(count), "FEW": count <= FEW_SLOTS}


def gather(tokens: Tensor, slots: Tensor, used: Tensor, count: int) -> Tensor:
    """Return the token of each row."""
    width = tokens.shape[1]
    out, block = tokens.new_empty(count, width), _columns(width)
    grid = (tokens.shape[0], cdiv(width, block["BLOCK"]))
    _gather[grid](tokens, slots, used, out, width, **_slot_options(slots), **block)
    return out


def combine(
    rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor, bias: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """Return the weighted sums of rows, with `bias (E,d)` of the row's expert added to each row; it needs `offsets`."""
    width, experts = rows.shape[1], 0 if bias is None else bias.shape[0]
    out, block = rows.new_empty(slots.shape[0], width), _columns(width)
    weighing = {"WEIGHTED": weights is not None, "BINS": 0 if bias is None else next_power_of_2(experts)}
    # A pointer that is not read may be any.
    weights, bias = rows if weights is None else weights, rows if bias is None else bias
    places = bias, used if offsets is None else offsets, experts
    grid = (out.shape[0], cdiv(width, block["BLOCK"]))
    _combine[grid](rows, slots, weights, used, out, width, *places, **weighing, **_slot_options(slots), **block)
    return out


def add_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Add the bias (E,n) of its expert to each row (R,n), in place."""
    experts, width = bias.shape
    block = _columns(width)
    grid = (min(rows.shape[0], MOST_PROGRAMS), cdiv(width, block["BLOCK"]))
    _add_bias[grid](rows, bias, offsets, width, experts, BINS=next_power_of_2(experts), **block)
    return rows


def sum_rows(rows: Tensor, offsets: Tensor, weights: Tensor | None, order: Tensor) -> Tensor:
    """Return the sum (E,n) of the rows (R,n) of each expert, times their weights; float32, the same in each run."""
    experts, width = offsets.shape[0], rows.shape[1]
    parts = torch.empty(SHARES, experts, width, dtype=torch.float32, device=rows.device)
    weighted = weights is not None
    _sum_rows[(experts, cdiv(width, 64), SHARES)](
        rows, weights if weighted else rows, order, offsets, parts, width, WEIGHTED=weighted, ROWS=32, COLUMNS=64
    )
    return parts.sum(0)


def add_bias_dots(grad: Tensor, bias: Tensor, order: Tensor, offsets: Tensor, dots: Tensor) -> Tensor:
    """Add the dot product of each row of `grad (R,d)` and the bias of its expert to `dots`, by slot, in place."""
    experts, width = bias.shape
    grid, bins = (min(grad.shape[0], MOST_PROGRAMS),), next_power_of_2(experts)
    _add_bias_dots[grid](grad, bias, order, offsets, dots, width, experts, BINS=bins, **_columns(width))
    return dots


def glu(gate_up: Tensor, used: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, (R,H), for `gate_up (R,2H)`."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    width, block = out.shape[1], _columns(out.shape[1])
    grid = (min(out.shape[0], MOST_PROGRAMS), cdiv(width, block["BLOCK"]))
    _glu[grid](gate_up, used, out, width, NAME=activation, **block)
    return out


def rows_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, used: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite `grad` with the weighted h: this saves memory where most is needed."""
    out, dots = torch.empty_like(rows), torch.zeros_like(weights)
    grid, width = (min(grad.shape[0], MOST_PROGRAMS),), grad.shape[1]
    block = _columns(width, BLOCK // 2 if activation else BLOCK)
    _rows_backward[grid](grad, rows, weights, order, used, out, dots, width, NAME=activation, **block)
    return out, grad, dots


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
