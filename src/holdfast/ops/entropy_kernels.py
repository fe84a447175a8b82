"""A Triton kernel for the entropies of attention weights, all heads in one launch. Imported only where Triton can run.

With t the score less the highest so far, total = sum exp(t) and moment = sum t exp(t), the entropy is log(total) - moment /
total: one pass, and no difference of large numbers. Keys that several heads share are read where they lie.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.ops.mix_kernels import LN_2, LOG2_E, Tiling, allowed_only, mask_kind, mask_operand
from holdfast.ops.part_kernels import PARTS, WIDEST, Operand, product, split, tile_width, tiles

FAINT = tl.constexpr(-200.0)  # 2^-200 is 0 in float32, and 0 times this is 0, where 0 times -inf would be NaN
TILING, WIDE_TILING = Tiling(128, 128, 8, 3), Tiling(64, 64, 4, 1)
ORDER = tl.constexpr(1)  # which head has the lowest mean entropy does not hang on a score's seventh digit


@triton.jit
def _look(scores, highest, total, moment, CLAMP: tl.constexpr):
    """The running sums with one more tile of scores; CLAMP where some may be -inf."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    level = tl.where(higher > -float("inf"), higher, 0.0)
    below = scores - level[:, None]
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    of_query = batch * query_batch + head * query_head
    of_key = batch * key_batch + head * key_heads // heads * key_head
    of_mask = batch * mask.batch + head * mask.head
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the rows that look at most keys start first
    row = first + tl.arange(0, ROWS)
    q = tiles(query, of_query, row, queries, WIDTH, PARTS)
    factor = scale * LOG2_E
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    last = keys
    plain = keys // COLUMNS * COLUMNS  # up to here every row may look at every key, and nothing has to be asked
    if CAUSAL:
        last = tl.minimum(keys, keys - queries + first + ROWS)
        plain = tl.maximum(tl.minimum(plain, (keys - queries + first + 1) // COLUMNS * COLUMNS), 0)
    if HAS_REAL or MASK != 0:
        plain = 0
    for start in range(0, plain, COLUMNS):
        k = tiles(key, of_key, start + tl.arange(0, COLUMNS), keys, WIDTH, PARTS)
        scores = product(tl.zeros((ROWS, COLUMNS), tl.float32), q, k, PARTS, PARTS, ORDER, True) * factor
        highest, total, moment = _look(scores, highest, total, moment, False)
    for start in range(plain, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = tiles(key, of_key, column, keys, WIDTH, PARTS)
        scores = product(tl.zeros((ROWS, COLUMNS), tl.float32), q, k, PARTS, PARTS, ORDER, True) * factor
        across = column[None, :]
        scores = allowed_only(
            scores, row[:, None], across, batch, of_mask, queries, keys, real, real, mask, CAUSAL, False, HAS_REAL, MASK
        )
        highest, total, moment = _look(scores, highest, total, moment, True)
    safe = tl.where(total > 0, total, 1.0)
    entropy = (tl.log2(safe) - moment / safe) * LN_2
    tl.store(out + (batch * heads + head) * queries + row, entropy, mask=row < queries)


def _operand(rows: Tensor, as_is: bool, kind: torch.dtype) -> tuple[Operand, int, int]:
    """rows (B,H,N,D), and how far apart batches and heads lie: the operand's own groups are counted in elements."""
    if as_is:
        return Operand(rows, 0, 1, rows.stride(2)), rows.stride(0), rows.stride(1)
    parts = split(rows.flatten(0, 1), None, kind, most=2)
    return parts._replace(group=1), rows.shape[1] * parts.group, parts.group


def supports(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel takes rows of this width and these dtypes, none of them empty."""
    known = query.dtype in PARTS and key.dtype == query.dtype
    return known and query.shape[-1] <= WIDEST and query.numel() > 0 and key.numel() > 0


def entropy(
    query: Tensor,  # (B,H,N,D)
    key: Tensor,  # (B,key heads,M,D)
    real: Tensor | None,  # (B,M)
    mask: Tensor | None,  # (B,H,N,M), or 1 in place of any of them
    causal: bool,
    scale: float,
    kind: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(B,H,N), float32."""
    batches, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    narrow = query.dtype in (torch.bfloat16, torch.float16) and width == tile_width(width)
    as_is = narrow and query.stride(3) == key.stride(3) == 1
    q, *query_strides = _operand(query, as_is, kind)
    k, *key_strides = _operand(key, as_is, kind)
    parts = 1 if as_is else q.at.shape[0]
    out = torch.empty(batches, heads, queries, dtype=torch.float32, device=query.device)
    rows, columns, warps, stages = TILING if width <= 128 and parts == 1 else WIDE_TILING
    _entropy[batches * heads, triton.cdiv(queries, rows)](
        q,
        k,
        query if real is None else real.contiguous().view(torch.uint8),
        mask_operand(mask, query),
        out,
        heads,
        key_heads,
        queries,
        keys,
        *query_strides,
        *key_strides,
        scale,
        WIDTH=tile_width(width),
        PARTS=parts,
        CAUSAL=causal,
        HAS_REAL=real is not None,
        MASK=mask_kind(mask),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        num_stages=stages,
    )
    return out
