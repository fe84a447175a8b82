"""Triton kernels for true float32 products on bfloat16 tensor cores. Imported only where Triton can run.

    T tokens, d width, n outputs (experts); G tiles of tokens of one cluster each, see kernels/clusters.py

A float32 number is the exact sum of three bfloat16 numbers (8 + 8 + 8 bits), a float16 number of two, and the product of
two bfloat16 numbers is exact in float32, in which tensor cores add. So numbers are split into parts. A product of parts i
and j is about 2^-8(i+j) of the whole; those that round away are left out. What is small, weights and gradients of logits, is
split beforehand, tokens and scaled weights on the way into the product.

Every output is a sum in an order that depends on d (of a weight's gradient, on T) and on nothing else: a token's logits are
the same to the bit in any batch.
"""

# mypy: ignore-errors
import os

import triton
import triton.language as tl

# numpy, and so the interpreter, has no bfloat16 product: there the parts are held in float32, with the same values.
PART = tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16


@triton.jit
def _leading(x):
    """The first 8 bits of a float32, cut off rather than rounded, so that the largest number does not become infinite."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(x, PARTS: tl.constexpr, PART: tl.constexpr):
    """Its parts, the largest first; as many as there are, and the last again in place of those that there are not."""
    if PARTS == 1:
        return x.to(PART), x.to(PART), x.to(PART)
    rest = x.to(tl.float32)
    first = _leading(rest)
    rest = rest - first  # beside an infinity NaN, which `require_finite` reports just as well
    if PARTS == 2:
        return first.to(PART), rest.to(PART), rest.to(PART)
    second = _leading(rest)
    return first.to(PART), second.to(PART), (rest - second).to(PART)


@triton.jit
def _pick(first, second, third, INDEX: tl.constexpr):
    # ruff: noqa: RET505 - Triton wants one return on each way through
    if INDEX == 0:
        return first
    elif INDEX == 1:
        return second
    else:
        return third


@triton.jit
def _product(
    left_0,
    left_1,
    left_2,
    right_0,
    right_1,
    right_2,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """left right from LEFT and RIGHT parts, of products that reach into the first BYTES, the small ones first."""
    product = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for down in tl.static_range(BYTES):
        for i in tl.static_range(LEFT):
            if BYTES - 1 - down - i >= 0 and BYTES - 1 - down - i < RIGHT:
                product = tl.dot(
                    _pick(left_0, left_1, left_2, i),
                    _pick(right_0, right_1, right_2, BYTES - 1 - down - i),
                    product,
                    input_precision="ieee",
                )
    return product


@triton.jit
def _load_parts(parts, size, places, mask, COUNT: tl.constexpr, PART: tl.constexpr):
    """Up to three parts that lie `size` elements apart, and the last again in place of those that there are not."""
    first = tl.load(parts + places, mask=mask, other=0.0).to(PART)
    second, third = first, first
    if COUNT > 1:
        second = tl.load(parts + size + places, mask=mask, other=0.0).to(PART)
        third = second
    if COUNT > 2:
        third = tl.load(parts + 2 * size + places, mask=mask, other=0.0).to(PART)
    return first, second, third


@triton.jit
def split_all(values, out, size, width, stride_height, stride_width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(values + place // width * stride_height + place % width * stride_width, mask=inside, other=0.0)
    first, second, third = _split(value, COUNT, tl.bfloat16)
    tl.store(out + place, first, mask=inside)
    tl.store(out + size + place, second, mask=inside)
    if COUNT > 2:
        tl.store(out + 2 * size + place, third, mask=inside)


@triton.jit
def linear(
    tokens,
    weight,
    order,
    owners,
    scales,
    out,
    count,
    inner,
    width,
    weight_size,
    one,
    TOKEN_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    EVEN: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out = tokens weight^T with the weight in parts, or tokens (weight * scales of the tile's cluster)^T, split here.

    The weight is the left operand, because the tensor cores take a left operand, scaled and split, from registers. They cut
    off where float32 rounds, so their sums are kept short and added up outside. `one` is 1, which the compiler must not
    know, or it would let the tensor cores do all of the sum.
    """
    tile = tl.program_id(0)
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        mine, used = (row < count)[:, None], (column < width)[:, None]
        total = tl.zeros((WIDTH, TILE), dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            if EVEN:
                wanted, known = mine, used
            else:
                wanted, known = mine & (depth < inner)[None, :], used & (depth < inner)[None, :]
            x = tl.load(tokens + row[:, None] * inner + depth[None, :], mask=wanted, other=0.0)
            x_0, x_1, x_2 = _split(tl.trans(x), TOKEN_PARTS, PART)
            places = column[:, None] * inner + depth[None, :]
            if CLUSTERED:
                scale = tl.load(scales + cluster * inner + depth, mask=depth < inner, other=0.0)
                w = tl.load(weight + places, mask=known, other=0.0).to(tl.float32) * scale[None, :]
                if WEIGHT_PARTS == 2:  # rounded rather than cut off, so that two parts hold 17 bits
                    w_0 = w.to(tl.bfloat16).to(PART)
                    w_1 = (w - w_0.to(tl.float32)).to(PART)
                    w_2 = w_1
                else:
                    w_0, w_1, w_2 = _split(w, WEIGHT_PARTS, PART)
            else:
                w_0, w_1, w_2 = _load_parts(weight, weight_size, places, known, WEIGHT_PARTS, PART)
            total += _product(w_0, w_1, w_2, x_0, x_1, x_2, WIDTH, TILE, WEIGHT_PARTS, TOKEN_PARTS, 3) * one
        tl.store(out + row[None, :] * width + column[:, None], total, mask=(row < count)[None, :] & used)


@triton.jit
def grad_tokens(
    grad,
    weight,
    order,
    owners,
    scales,
    out,
    count,
    inner,
    width,
    share,
    grad_size,
    weight_size,
    one,
    GRAD_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """grad weight (times the scales), of two parts each where it is rounded to half precision: they are plenty then.

    A program makes a share of the features of its tokens, programs side by side the others. NARROW: no more than DEPTH
    outputs, so that the tokens' gradients are read once.
    """
    shares = tl.cdiv(inner, share)
    tile = tl.program_id(0) // shares
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cluster = 0
    if CLUSTERED:
        cluster = tl.load(owners + tile).to(tl.int64)
        row = tl.load(order + row).to(tl.int64)
    if cluster >= 0:
        mine = (row < count)[:, None]
        column = tl.arange(0, DEPTH).to(tl.int64)
        known = mine & (column < width)[None, :]
        g_0, g_1, g_2 = _load_parts(grad, grad_size, row[:, None] * width + column[None, :], known, GRAD_PARTS, PART)
        first = tl.program_id(0) % shares * share
        for start in range(first, min(first + share, inner), WIDTH):
            feature = (start + tl.arange(0, WIDTH)).to(tl.int64)
            used = (feature < inner)[None, :]
            places = column[:, None] * inner + feature[None, :]
            w_0, w_1, w_2 = _load_parts(weight, weight_size, places, (column < width)[:, None] & used, WEIGHT_PARTS, PART)
            total = _product(g_0, g_1, g_2, w_0, w_1, w_2, TILE, WIDTH, GRAD_PARTS, WEIGHT_PARTS, GRAD_PARTS)
            if not NARROW:
                for begin in range(DEPTH, width, DEPTH):
                    more = begin + column
                    known = mine & (more < width)[None, :]
                    h_0, h_1, h_2 = _load_parts(
                        grad, grad_size, row[:, None] * width + more[None, :], known, GRAD_PARTS, PART
                    )
                    places = more[:, None] * inner + feature[None, :]
                    w_0, w_1, w_2 = _load_parts(
                        weight, weight_size, places, (more < width)[:, None] & used, WEIGHT_PARTS, PART
                    )
                    more_of_it = _product(h_0, h_1, h_2, w_0, w_1, w_2, TILE, WIDTH, GRAD_PARTS, WEIGHT_PARTS, GRAD_PARTS)
                    total += more_of_it * one
            if CLUSTERED:
                total = total * tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
            tl.store(out + row[:, None] * inner + feature[None, :], total, mask=mine & used)


@triton.jit
def grad_weight(
    grad,
    tokens,
    order,
    owners,
    bounds,
    scales,
    out,
    count,
    clusters,
    inner,
    width,
    grad_size,
    one,
    GRAD_PARTS: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    CLUSTERED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[s] = grad^T tokens (times the scales) over the s-th share of the tokens, in short sums as in `linear`."""
    feature = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    column = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    split = tl.program_id(2)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    tiles = tl.load(bounds + clusters) if CLUSTERED else tl.cdiv(count, TILE)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(split * share, min(tiles, (split + 1) * share)):
        row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        if CLUSTERED:
            row = tl.load(order + row).to(tl.int64)
            cluster = tl.load(owners + tile).to(tl.int64)
            factor = tl.load(scales + cluster * inner + feature, mask=feature < inner, other=0.0)[None, :]
        else:
            factor = one
        mine = (row < count)[:, None]
        known = mine & (column < width)[None, :]
        g_0, g_1, g_2 = _load_parts(grad, grad_size, row[:, None] * width + column[None, :], known, GRAD_PARTS, PART)
        x = tl.load(tokens + row[:, None] * inner + feature[None, :], mask=mine & (feature < inner)[None, :], other=0.0)
        x_0, x_1, x_2 = _split(x, TOKEN_PARTS, PART)
        product = _product(
            tl.trans(g_0),
            tl.trans(g_1),
            tl.trans(g_2),
            x_0,
            x_1,
            x_2,
            HEIGHT,
            WIDTH,
            GRAD_PARTS,
            TOKEN_PARTS,
            GRAD_PARTS,
        )
        total += product * factor
    place = (split * width + column[:, None]) * inner + feature[None, :]
    tl.store(out + place, total, mask=(column < width)[:, None] & (feature < inner)[None, :])


@triton.jit
def fold(parts, out, splits, size, BLOCK: tl.constexpr):
    """The sum over the first axis, in its order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total, mask=place < size)
