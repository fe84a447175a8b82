"""Triton kernels of plain top-k routing: all that follows the logits, in one kernel, and its gradient in another.

    T tokens, E experts, K slots a token

The forward writes gates, experts and weights, reports logits that are NaN or infinite, and adds up what the balance loss
needs; `balance.triton.loss` makes the loss of these sums. The backward computes gates and weights again. Sums are added in a
fixed order, so results repeat to the bit.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.fast_launch import fast_launch
from holdfast.kernels.finite.triton import report
from holdfast.kernels.float32_parts import bf16_parts
from holdfast.kernels.launching import cdiv
from holdfast.kernels.select.triton import BACKWARD_BLOCK, block_of, forward_options, slots_of

MOST_PROGRAMS = 1024  # that write sums, which one program adds up
MOST_SUMS = 2**16  # of all experts, in all programs


@fast_launch
@triton.jit
def _route(
    logits,
    gates,
    chosen,
    weights,
    layer,
    name,
    found,
    sums,
    rows,
    experts,
    k,
    CHECKED: tl.constexpr,
    BALANCED: tl.constexpr,
    LETTERS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """With n programs, route every n-th block of tokens.

    CHECKED: report logits that are not finite. BALANCED: write sums.
    """
    expert = tl.arange(0, EXPERTS)
    mass, load = tl.zeros((ROWS, EXPERTS), dtype=tl.float32), tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (expert < experts)[None, :]
        place = row[:, None] * experts + expert[None, :]
        slots, _ = slots_of(logits, row, rows, experts, k, ROWS, EXPERTS, CHUNK, FEW)
        core = inside & (slots < k)
        logit = tl.load(logits + place, mask=inside, other=-float("inf"))
        power = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        gate = power / tl.sum(power, axis=1)[:, None]
        tl.store(gates + place, gate, mask=inside)
        level = tl.where(core, logit, -float("inf"))
        weight = tl.exp(level - tl.max(level, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
        at = row[:, None] * k + slots
        tl.store(chosen + at, (expert[None, :] + 0 * slots).to(tl.int64), mask=core)
        tl.store(weights + at, weight, mask=core)
        if CHECKED:
            report(tl.where(inside, logit, 0.0), layer, name, found, LETTERS)
        if BALANCED:
            mass += tl.where(inside, gate, 0.0)
            load += tl.where(core, 1.0, 0.0)
            count += tl.where(row < rows, 1.0, 0.0)
    if BALANCED:
        line = sums + tl.program_id(0) * (2 * experts + 1)
        tl.store(line + expert, tl.sum(mass, axis=0), mask=expert < experts)
        tl.store(line + experts + expert, tl.sum(load, axis=0), mask=expert < experts)
        tl.store(line + 2 * experts, tl.sum(count, axis=0))


@fast_launch
@triton.jit
def _gradient(
    logits,
    chosen,
    of_logits,
    of_weights,
    of_loss,
    slopes,
    out,
    rows,
    experts,
    k,
    HAS_LOGITS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write the gradient of a block of logits: that of the logits themselves, of the weights, and of the loss.

    PARTS: write it as this many bfloat16 parts, if not 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    logit = tl.load(logits + place, mask=inside, other=-float("inf"))
    power = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    total = tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
    if HAS_LOGITS:
        total += tl.load(of_logits + place, mask=inside, other=0.0)
    if HAS_WEIGHTS:
        core = tl.zeros((ROWS, EXPERTS), dtype=tl.int1)
        grad = tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
        for slot in range(k):
            own = tl.load(chosen + row * k + slot, mask=row < rows, other=-1)[:, None] == expert[None, :]
            core = core | own
            grad += tl.where(own, tl.load(of_weights + row * k + slot, mask=row < rows, other=0.0)[:, None], 0.0)
        weight = tl.where(core, power, 0.0)  # the best expert is one of them: its power is 1
        weight = weight / tl.sum(weight, axis=1)[:, None]
        total += weight * (grad - tl.sum(weight * grad, axis=1)[:, None])
    if HAS_LOSS:
        gate = power / tl.sum(power, axis=1)[:, None]
        slope = tl.load(slopes + expert, mask=expert < experts, other=0.0)[None, :]
        total += tl.load(of_loss) * gate * (slope - tl.sum(gate * slope, axis=1)[:, None])
    if PARTS:
        first, second, third = bf16_parts(total, PARTS, tl.bfloat16)
        size = tl.cast(rows, tl.int64) * experts  # `rows` is no tensor if it is 1
        tl.store(out + place, first, mask=inside)
        tl.store(out + size + place, second, mask=inside)
        if PARTS > 2:
            tl.store(out + 2 * size + place, third, mask=inside)
    else:
        tl.store(out + place, total, mask=inside)


def route(
    logits: Tensor, k: int, record: tuple[Tensor, Tensor, Tensor] | None, balanced: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gates (T,E), experts (T,k), best first, their weights, and sums for `balance.triton.loss`.

    The sums are empty if not `balanced`.

    record   from `place_of_report`. None: no check
    """
    count, experts = logits.shape
    gates = torch.empty_like(logits)
    chosen = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(count, k, device=logits.device)
    options = forward_options(experts, k)
    programs = cdiv(count, options["ROWS"])
    if balanced:
        programs = min(programs, MOST_PROGRAMS, max(MOST_SUMS // experts, 1))
    sums = torch.empty(programs if balanced else 0, 2 * experts + 1, device=logits.device)
    layer, name, found = (logits, logits, logits) if record is None else record
    _route[(programs,)](
        logits,
        gates,
        chosen,
        weights,
        layer,
        name,
        found,
        sums,
        count,
        experts,
        k,
        CHECKED=record is not None,
        BALANCED=balanced,
        LETTERS=layer.numel() if record is not None else 1,
        **options,
    )
    return gates, chosen, weights, sums


def gradient(
    logits: Tensor,
    chosen: Tensor,
    of_logits: Tensor | None,
    of_weights: Tensor | None,
    of_loss: Tensor | None,
    slopes: Tensor | None,
    parts: int = 0,
) -> Tensor:
    """Return the gradient (T,E) of the logits for the gradients of logits, weights and the loss with these `slopes (E,)`.

    parts   return it as two or three bfloat16 parts (parts,T,E); 0: as float32
    """
    count, experts = logits.shape
    out = logits.new_empty(parts, count, experts, dtype=torch.bfloat16) if parts else torch.empty_like(logits)
    rows, wide = block_of(experts, BACKWARD_BLOCK)
    _gradient[(cdiv(count, rows),)](
        logits,
        chosen,
        logits if of_logits is None else of_logits.contiguous(),
        logits if of_weights is None else of_weights.contiguous(),
        logits if of_loss is None else of_loss,
        logits if slopes is None else slopes,
        out,
        count,
        experts,
        chosen.shape[1],
        HAS_LOGITS=of_logits is not None,
        HAS_WEIGHTS=of_weights is not None,
        HAS_LOSS=of_loss is not None,
        PARTS=parts,
        ROWS=rows,
        EXPERTS=wide,
        num_warps=1,
    )
    return out
