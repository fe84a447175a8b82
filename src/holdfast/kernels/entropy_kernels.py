"""A Triton kernel for the entropies of attention weights, all heads in one launch. Imported only where Triton can run.

With t the score less the highest so far, total = sum exp(t) and moment = sum t exp(t), the entropy is log(total) - moment /
total: one pass, and no difference of large numbers. Keys that several heads share are read where they lie.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.entropy import BLOCK, sampled
from holdfast.kernels.mix_kernels import LN_2, LOG2_E, allowed_only, limit, spans
from holdfast.kernels.mix_launch import SCRATCH, SMALL, Tiling, mask_kind, mask_operand, shared_memory
from holdfast.kernels.part_kernels import (
    DTYPES,
    NATIVE,
    WIDEST,
    Kinds,
    Operand,
    as_brains,
    parts_apart,
    product,
    take_apart,
    tile_width,
)
from holdfast.kernels.sizes import cdiv

FAINT = tl.constexpr(-200.0)  # 2^-200 is 0 in float32, and 0 times this is 0, where 0 times -inf would be NaN
TILINGS = (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 1), *SMALL)  # rows no more than BLOCK


@triton.jit
def _look(scores, factor, highest, total, moment, CLAMP: tl.constexpr):
    """The running sums with one more tile of scores, to be multiplied with a positive factor; CLAMP: some are -inf."""
    higher = tl.maximum(highest, tl.max(scores, 1) * factor)
    level = higher
    if CLAMP:
        level = tl.where(higher > -float("inf"), higher, 0.0)
    below = scores * factor - level[:, None]
    if CLAMP:
        below = tl.maximum(below, FAINT)
    weights = tl.exp2(below)
    shift = tl.maximum(highest - level, FAINT)
    fading = tl.exp2(shift)
    moment = fading * (moment + total * shift) + tl.sum(weights * below, 1)
    total = fading * total + tl.sum(weights, 1)
    return higher, total, moment


@triton.jit
def _entropy(
    query,
    key,
    real,
    mask,
    out,
    heads,
    key_heads,
    queries,
    looked_at,
    step,
    keys,
    query_batch,
    query_head,
    key_batch,
    key_head,
    scale,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_REAL: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of `queries` rows those `looked_at`: in every `step`-th block of them, see `entropy.sampled`."""
    # A head's programs are neighbours, so that its keys are read from the cache; those that look at most keys start first.
    blocks = tl.cdiv(looked_at, ROWS)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    of_query = batch * query_batch + head * query_head
    of_key = batch * key_batch + head * key_heads // heads * key_head
    of_mask = batch * mask.batch + head * mask.head
    place = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    first = (place // BLOCK * step + step // 2) * BLOCK + place % BLOCK
    row = first + tl.arange(0, ROWS)
    limits = limit(row, queries, keys, CAUSAL)[:, None]
    q = parts_apart(query, of_query, first, queries, ROWS, WIDTH, PARTS)
    factor = scale * LOG2_E
    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    plain, last = spans(first, queries, keys, ROWS, COLUMNS, CAUSAL, HAS_REAL or MASK != 0)
    if plain > 0:
        # The next tile's product is under way on the tensor cores while this one's exponentials are taken.
        k = parts_apart(key, of_key, 0, keys, COLUMNS, WIDTH, PARTS, False)
        scores = product(nothing, q, k, PARTS, PARTS, True)
        for start in range(COLUMNS, plain, COLUMNS):
            k = parts_apart(key, of_key, start, keys, COLUMNS, WIDTH, PARTS, False)
            following = product(nothing, q, k, PARTS, PARTS, True)
            highest, total, moment = _look(scores, factor, highest, total, moment, False)
            scores = following
        highest, total, moment = _look(scores, factor, highest, total, moment, False)
    for start in range(plain, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = parts_apart(key, of_key, start, keys, COLUMNS, WIDTH, PARTS)
        scores = product(nothing, q, k, PARTS, PARTS, True) * factor
        scores = allowed_only(
            scores, limits, row[:, None], column[None, :], batch, of_mask, queries, keys, real, mask, HAS_REAL, MASK
        )
        highest, total, moment = _look(scores, 1.0, highest, total, moment, True)
    safe = tl.where(total > 0, total, 1.0)
    entropy = (tl.log2(safe) - moment / safe) * LN_2
    tl.store(out + (batch * heads + head) * looked_at + place + tl.arange(0, ROWS), entropy, mask=row < queries)


def _operand(rows: Tensor, as_is: bool, kinds: Kinds) -> tuple[Operand, int, int]:
    """rows (B,H,N,D), and how far apart batches and heads lie: the operand's own groups are counted in elements."""
    if as_is:
        return Operand(rows, 1, rows.stride(2), rows), rows.stride(0), rows.stride(1)
    apart, _ = take_apart(rows.flatten(0, 1), brains=2, kinds=kinds)
    parts = as_brains(apart, rows)
    return parts._replace(group=1), rows.shape[1] * parts.group, parts.group


def _tiling(parts: int, width: int, device: torch.device) -> Tiling:
    """The first that fits into a multiprocessor's shared memory; the last does everywhere."""
    for tiling in TILINGS:
        if 2 * parts * width * (tiling.rows + tiling.stages * tiling.columns) + SCRATCH <= shared_memory(device):
            break
    return tiling


def supports(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether the kernel takes rows of this width and these dtypes, none of them empty."""
    known = query.dtype in DTYPES and key.dtype == query.dtype and scale > 0
    return known and query.shape[-1] <= WIDEST and query.numel() > 0 and key.numel() > 0


def entropy(
    query: Tensor,  # (B,H,N,D)
    key: Tensor,  # (B,key heads,M,D)
    real: Tensor | None,  # (B,M)
    mask: Tensor | None,  # (B,H,N,M), or 1 in place of any of them
    causal: bool,
    scale: float,
    step: int = 1,
    *,
    kinds: Kinds = NATIVE,
) -> Tensor:
    """(B,H,n), float32: of every `step`-th block of queries."""
    batches, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    narrow = query.dtype in (torch.bfloat16, torch.float16) and width == tile_width(width)
    as_is = narrow and query.stride(3) == key.stride(3) == 1
    q, *query_strides = _operand(query, as_is, kinds)
    k, *key_strides = _operand(key, as_is, kinds)
    parts = 1 if as_is else 2
    looked_at = sum(block.stop - block.start for block in sampled(queries, step))
    out = torch.empty(batches, heads, looked_at, dtype=torch.float32, device=query.device)
    tiling = _tiling(parts, tile_width(width), query.device)
    _entropy[(cdiv(looked_at, tiling.rows) * batches * heads,)](
        q,
        k,
        query if real is None else real.contiguous().view(torch.uint8),
        mask_operand(mask, query),
        out,
        heads,
        key_heads,
        queries,
        looked_at,
        step,
        keys,
        *query_strides,
        *key_strides,
        scale,
        WIDTH=tile_width(width),
        PARTS=parts,
        CAUSAL=causal,
        HAS_REAL=real is not None,
        MASK=mask_kind(mask),
        BLOCK=BLOCK,
        **tiling.options,
    )
    return out
