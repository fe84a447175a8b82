"""Mixing in PyTorch, a block of queries at a time, so that no N x N matrix is held; and for autograd, all of it at a time.

    G groups (sequences), N queries, M keys; see kernels/token_mixing/__init__.py for the formula

This is what the kernels are compared with, and what runs on a CPU, with levels, and for operands that are too wide for the
kernels. A step of decoding has one query in each group: `mix_one_query`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp32_linear import ieee_float32, matmul_float32

BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # scores held at a time: 16 MiB; on a GPU, where small ones wait, 128
FEWEST_ROWS = 16  # queries in a block, however many keys there are
SAMPLED_BLOCK = 64  # neighbouring queries in a block, where only some blocks are looked at


def mix_at_once(terms: "ScoreTerms", value: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `mix_in_blocks` returns, with all scores held at a time: for autograd to differentiate, and for exported
    programs."""
    scores = terms.all_scores()
    highest = finite_or_zero(scores.detach().amax(-1, keepdim=True))
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    divisor = total.clamp_min(torch.finfo(torch.float32).tiny)  # the logarithm of 0 would have a gradient of NaN
    log_total = (highest + divisor.log()).where(total > 0, -torch.inf)
    return (terms.product(weights, value) / divisor).float(), log_total.squeeze(-1).float()


def mix_one_query(terms: "ScoreTerms", value: Tensor, with_total: bool) -> tuple[Tensor, ...]:
    """Return the mixture (G,1,n), and with `with_total` also log_total (G,1), without gradients: a step of decoding.

    The keys of `terms` need not be 0 in padding. Compiled, a product is a sum that the compiler fuses with the operations
    around it; precision switches do not affect it.
    """
    is_compiled = torch.compiler.is_compiling()

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.transpose(1, 2) * right).sum(1, keepdim=True) if is_compiled else torch.bmm(left, right)

    with nullcontext() if is_compiled else ieee_float32():
        scores = product(terms.query, terms.key.transpose(1, 2)).mul_(terms.scale)
        if terms.second_query is not None and terms.second_key is not None:
            scores.add_(product(terms.second_query, terms.second_key.transpose(1, 2)), alpha=terms.second_scale)
        scores = terms.limited(scores, slice(0, 1), slice(0, terms.key.shape[1]))
        sees_nothing = scores.amax(-1, keepdim=True) == -torch.inf
        weights = scores.softmax(-1).masked_fill_(sees_nothing, 0.0)
        out = product(weights, value.to(weights.dtype)).float()
    return (out, scores.logsumexp(-1).float()) if with_total else (out,)


def expanded_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a view of the mask with a row for each query and a column for each key."""
    return None if mask is None else mask.expand(-1, query.shape[1], key.shape[1])


def only_real(rows: Tensor, real: Tensor | None) -> Tensor:
    """Return float32 rows that are 0 in padding: a weight of 0 times NaN is NaN."""
    return rows.float() if real is None else rows.float().masked_fill(~real.unsqueeze(-1), 0.0)


def query_blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield which queries form a block, and the keys that they may attend to."""
    groups, queries, _ = query.shape
    keys = key.shape[1]
    elements = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS["cpu"])
    rows = max(FEWEST_ROWS, elements // max(groups * keys, 1))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        yield slice(start, end), slice(0, keys - queries + end if causal else keys)


class ScoreTerms(NamedTuple):
    """The operands of the scores, 0 in padding: float32, or float64 where a product could overflow float32."""

    query: Tensor
    key: Tensor
    second_query: Tensor | None
    second_key: Tensor | None
    bias: Tensor | None
    real: Tensor | None
    mask: Tensor | None
    query_level: Tensor | None  # (G,N)
    key_level: Tensor | None  # (G,M)
    causal: bool
    scale: float
    second_scale: float

    def prepared(self) -> "ScoreTerms":
        """Return the operands, as they are given, in the precision that they need."""
        query, key = self.query.float(), only_real(self.key, self.real)
        second_query = None if self.second_query is None else self.second_query.float()
        second_key = None if self.second_key is None else only_real(self.second_key, self.real)
        operands: tuple[Tensor | None, ...] = (query, key, second_query, second_key, self.bias)
        if _overflows(query, key, self.scale) or _overflows(second_query, second_key, self.second_scale):
            operands = tuple(None if operand is None else operand.double() for operand in operands)
        return ScoreTerms._make((*operands, *self[len(operands) :]))

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """Return (G, block, keys), -inf where not allowed."""
        scores = torch.bmm(self.query[:, rows], self.key[:, columns].transpose(1, 2)).mul_(self.scale)
        if self.second_query is not None and self.second_key is not None:
            more = self.second_key[:, columns].transpose(1, 2)
            scores.baddbmm_(self.second_query[:, rows], more, alpha=self.second_scale)
        return self.limited(scores, rows, columns)

    def all_scores(self) -> Tensor:
        """Return (G,N,M), for autograd to differentiate, also twice and under every precision switch."""
        scores = self.product(self.query, self.key.transpose(1, 2)) * self.scale
        if self.second_query is not None and self.second_key is not None:
            scores = scores + self.product(self.second_query, self.second_key.transpose(1, 2)) * self.second_scale
        return self.limited(scores, slice(0, self.query.shape[1]), slice(0, self.key.shape[1]))

    @property
    def wide(self) -> bool:
        """Whether the operands are float64."""
        return self.query.dtype == torch.float64

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left right in the precision of the operands."""
        return left.double() @ right.double() if self.wide else matmul_float32(left, right)

    def limited(self, scores: Tensor, rows: slice, columns: slice) -> Tensor:
        """Add biases and masks to the scores, in place."""
        if self.bias is not None:
            scores.add_(self.bias[:, None, columns])
        if self.mask is not None:
            part = self.mask[:, rows, columns]
            scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
        if self.real is not None:
            scores.masked_fill_(~self.real[:, None, columns], -torch.inf)
        if self.query_level is not None and self.key_level is not None:
            scores.masked_fill_(self.key_level[:, None, columns] > self.query_level[:, rows, None], -torch.inf)
        if self.causal:
            offset = self.key.shape[1] - self.query.shape[1]
            position = torch.arange(rows.start, rows.stop, device=scores.device) + offset
            later = torch.arange(columns.stop, device=scores.device) > position.unsqueeze(1)
            scores.masked_fill_(later, -torch.inf)
        return scores


def _overflows(query: Tensor | None, key: Tensor | None, scale: float) -> bool:
    """Return whether a product could overflow float32. On a GPU, where finding out would wait, return False."""
    if query is None or key is None or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    largest = [max(-float(low), float(high)) for low, high in (query.detach().aminmax(), key.detach().aminmax())]
    return largest[0] * largest[1] * query.shape[-1] * max(abs(scale), 1.0) > torch.finfo(torch.float32).max / 8


def _exp(log_weights: Tensor) -> Tensor:
    """Return exp of the log weights, in place, and 0 below -80: the total is at least 1, and denormals are slow on a CPU."""
    return torch.threshold_(log_weights, -80.0, -torch.inf).exp_()


def finite_or_zero(values: Tensor) -> Tensor:
    return values.where(values > -torch.inf, 0.0)


def sampled(queries: int, step: int) -> list[slice]:
    """Return every `step`-th block of queries, starting at block `step // 2`."""
    return [
        slice(first, min(first + SAMPLED_BLOCK, queries))
        for first in range(step // 2 * SAMPLED_BLOCK, queries, step * SAMPLED_BLOCK)
    ]


def sampled_count(queries: int, step: int) -> int:
    """Return how many queries are in the `sampled` blocks."""
    return sum(block.stop - block.start for block in sampled(queries, step))


def mix_in_blocks(terms: ScoreTerms, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mixture (G,N,n), and the logarithm of the total of the weights (G,N), float32."""
    query, key = terms.query, terms.key
    value = value.to(query.dtype)
    out = query.new_empty(*query.shape[:2], value.shape[2], dtype=torch.float32)
    log_total = query.new_empty(query.shape[:2], dtype=torch.float32)
    with ieee_float32():
        for rows, columns in query_blocks(query, key, terms.causal):
            scores = terms.scores(rows, columns)
            highest = finite_or_zero(scores.amax(-1, keepdim=True))
            weights = _exp(scores.sub_(highest))
            total = weights.sum(-1, keepdim=True)
            out[:, rows] = torch.bmm(weights, value[:, columns]) / total.clamp_min(torch.finfo(torch.float32).tiny)
            log_total[:, rows] = (highest + total.log()).squeeze(-1)
    return out, log_total


def mix_in_blocks_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    out: Tensor,
    log_total: Tensor,
    terms: ScoreTerms,
    value: Tensor,
    shared: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, second query, second key and bias; None where there is no operand.

    `grad` and `grad_total` are the gradients of `out` and `log_total`. The gradient of a score is weight_ij (grad_i . v_j -
    grad_i . out_i + grad_total_i). With `shared`, keys are the queries, and their gradient is added to that of the queries.
    """
    query, key, second_query, second_key, bias = terms[:5]
    grad, value = grad.to(query.dtype), value.to(query.dtype)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    grad_second_query = None if second_query is None else torch.empty_like(second_query)
    grad_second_key = None if second_key is None else torch.zeros_like(second_key)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    centre = (grad * out).sum(-1, keepdim=True)
    centre = centre if grad_total is None else centre - grad_total.unsqueeze(-1)
    log_total = finite_or_zero(log_total).unsqueeze(-1)
    with ieee_float32():
        for rows, columns in query_blocks(query, key, terms.causal):
            scores = terms.scores(rows, columns)
            if terms.wide:  # their logarithms do not fit into float32
                weights = _exp(scores.sub_(finite_or_zero(scores.amax(-1, keepdim=True))))
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            else:
                weights = _exp(scores.sub_(log_total[:, rows]))
            grad_value[:, columns] += torch.bmm(weights.transpose(1, 2), grad[:, rows])
            slopes = torch.bmm(grad[:, rows], value[:, columns].transpose(1, 2))
            # Huge keys would magnify the rounding error of a difference that is 0: there both sides are computed in float64.
            middle = centre[:, rows]
            if terms.wide:
                middle = (slopes * weights).sum(-1, keepdim=True)
                middle = middle if grad_total is None else middle - grad_total[:, rows, None]
            slopes = slopes.sub_(middle).mul_(weights)
            if grad_bias is not None:
                grad_bias[:, columns] += slopes.sum(1)
            if second_query is not None and second_key is not None:
                assert grad_second_query is not None and grad_second_key is not None
                grad_second_query[:, rows] = torch.bmm(slopes, second_key[:, columns]) * terms.second_scale
                more = torch.bmm(slopes.transpose(1, 2), second_query[:, rows])
                grad_second_key[:, columns] += more * terms.second_scale
            slopes.mul_(terms.scale)
            grad_query[:, rows] = torch.bmm(slopes, key[:, columns])
            grad_key[:, columns] += torch.bmm(slopes.transpose(1, 2), query[:, rows])
    if shared:
        grad_query += grad_key
    return grad_query, grad_key, grad_value, grad_second_query, grad_second_key, grad_bias
