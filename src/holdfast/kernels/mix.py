"""Attention-like mixing without an N x N matrix: a block of queries at a time, forward and backward, in true float32.

    G groups (sequences), N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + bias_ij) over the allowed j;  out_i = sum_j weight_ij v_j

What is allowed: j <= i if `causal`, `real[j]` if given, and what `mask` says: bool, True where allowed, or a bias to add. A
query that may look at nothing gets 0.

Products of tokens of 1e19 and more are beyond float32. On a CPU such operands are mixed in float64; on a GPU, where asking
would wait, the result is NaN, and a router in training says so.

On a GPU the kernels of kernels/mix_kernels.py do this in tiles; here is what they are compared with,
and what runs on a CPU and for operands too wide for a tile.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import double_backward
from holdfast.kernels.operators import EVERYWHERE, operator
from holdfast.kernels.precision import ieee_float32, matmul_float32
from holdfast.kernels.triton_support import HAS_TRITON, on_device_of

BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # scores held at a time: 16 MiB; on a GPU, where small ones wait, 128
FEWEST_ROWS = 16  # queries in a block, however many keys there are


class Second(NamedTuple):
    """Another product of queries and keys that is added to the scores."""

    query: Tensor  # (G,N,m')
    key: Tensor  # (G,M,m')
    scale: float


def softmax_mix(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    value: Tensor,  # (G,M,n)
    *,
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # (G,N,M), or 1 in place of G or N
    second: Second | None = None,
    bias: Tensor | None = None,  # (G,M), added to the scores of a key
    coarse: bool = False,
) -> Tensor:
    """out (G,N,n), float32, differentiable in everything but a bias in `mask`.

    `coarse`: gradients of queries and keys end up in bfloat16, and need be no better than that.
    """
    other_query, other_key, other_scale = (None, None, 0.0) if second is None else second
    bias = None if bias is None else bias.float()
    if torch.compiler.is_exporting():
        terms = score_terms(
            query, key, other_query, other_key, bias, real, expanded_mask(mask, query, key), causal, scale, other_scale
        )
        return _whole_mix(terms, _only_real(value, real))
    own_key = None if key is query else key
    out: Tensor = _SoftmaxMix.apply(  # type: ignore[no-untyped-call]
        query,
        own_key,
        value,
        other_query,
        other_key,
        bias,
        real,
        expanded_mask(mask, query, key),
        causal,
        scale,
        other_scale,
        coarse,
    )
    return out


def _whole_mix(terms: "_Terms", value: Tensor) -> Tensor:
    """The mixture with all scores held at a time, for autograd to differentiate and for any backend and format."""
    scores = terms.all_scores()
    weights = (scores - finite_or_zero(scores.detach().amax(-1, keepdim=True))).exp()
    mixed = terms.product(weights, value) / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return mixed.float()


def expanded_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A view of the mask with a row for each query and a column for each key."""
    return None if mask is None else mask.expand(-1, query.shape[1], key.shape[1])


def _only_real(rows: Tensor, real: Tensor | None) -> Tensor:
    """float32, and 0 in padding: a weight of 0 times NaN is NaN."""
    return rows.float() if real is None else rows.float().masked_fill(~real.unsqueeze(-1), 0.0)


def query_blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Which queries go together, and how many keys they may see."""
    groups, queries, _ = query.shape
    keys = key.shape[1]
    elements = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS["cpu"])
    rows = max(FEWEST_ROWS, elements // max(groups * keys, 1))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        yield slice(start, end), slice(0, keys - queries + end if causal else keys)


class _Terms(NamedTuple):
    """What scores are made of, 0 in padding: float32, or float64 where a product could be more than float32 holds."""

    query: Tensor
    key: Tensor
    second_query: Tensor | None
    second_key: Tensor | None
    bias: Tensor | None
    real: Tensor | None
    mask: Tensor | None
    causal: bool
    scale: float
    second_scale: float

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """(G, block, keys), -inf where not allowed."""
        scores = torch.bmm(self.query[:, rows], self.key[:, columns].transpose(1, 2)).mul_(self.scale)
        if self.second_query is not None and self.second_key is not None:
            more = self.second_key[:, columns].transpose(1, 2)
            scores.baddbmm_(self.second_query[:, rows], more, alpha=self.second_scale)
        return self._limited(scores, rows, columns)

    def all_scores(self) -> Tensor:
        """(G,N,M), for autograd to differentiate, also twice and under every precision switch."""
        scores = self.product(self.query, self.key.transpose(1, 2)) * self.scale
        if self.second_query is not None and self.second_key is not None:
            scores = scores + self.product(self.second_query, self.second_key.transpose(1, 2)) * self.second_scale
        return self._limited(scores, slice(0, self.query.shape[1]), slice(0, self.key.shape[1]))

    @property
    def wide(self) -> bool:
        return self.query.dtype == torch.float64

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        return left.double() @ right.double() if self.wide else matmul_float32(left, right)

    def _limited(self, scores: Tensor, rows: slice, columns: slice) -> Tensor:
        """Add biases and masks, in place."""
        if self.bias is not None:
            scores.add_(self.bias[:, None, columns])
        if self.mask is not None:
            part = self.mask[:, rows, columns]
            scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
        if self.real is not None:
            scores.masked_fill_(~self.real[:, None, columns], -torch.inf)
        if self.causal:
            offset = self.key.shape[1] - self.query.shape[1]
            position = torch.arange(rows.start, rows.stop, device=scores.device) + offset
            later = torch.arange(columns.stop, device=scores.device) > position.unsqueeze(1)
            scores.masked_fill_(later, -torch.inf)
        return scores


def score_terms(
    query: Tensor,
    key: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    second_scale: float,
) -> _Terms:
    second_query = None if second_query is None else second_query.float()
    second_key = None if second_key is None else _only_real(second_key, real)
    query, key = query.float(), _only_real(key, real)
    if _overflows(query, key, scale) or _overflows(second_query, second_key, second_scale):
        query, key = query.double(), key.double()
        second_query, second_key, bias = (
            None if operand is None else operand.double() for operand in (second_query, second_key, bias)
        )
    return _Terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)


def _overflows(query: Tensor | None, key: Tensor | None, scale: float) -> bool:
    """Could a product be more than float32 holds? Asked on a CPU only, where the answer is at hand."""
    if query is None or key is None or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    largest = [max(-float(low), float(high)) for low, high in (query.detach().aminmax(), key.detach().aminmax())]
    return largest[0] * largest[1] * query.shape[-1] * max(abs(scale), 1.0) > torch.finfo(torch.float32).max / 8


def _exp(log_weights: Tensor) -> Tensor:
    """In place. Below -80 a weight is 0: beside a total of at least 1 it is nothing, and denormals cost a CPU dearly."""
    return torch.threshold_(log_weights, -80.0, -torch.inf).exp_()


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def finite_or_zero(values: Tensor) -> Tensor:
    return values.where(values > -torch.inf, 0.0)


def _on_kernels(query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None) -> bool:
    """Whether the Triton kernels can take these."""
    if not (HAS_TRITON and query.is_cuda):
        return False
    from holdfast.kernels import mix_launch

    return mix_launch.supports(query, key, value, second_query, second_key)


VALUE_HALVES = 6  # where they are among the parts of `mix_launch.take_all_apart`


def _needed_again(parts: list[Tensor]) -> list[Tensor]:
    """Those that the backward reads: all but the halves of the values."""
    return [part.new_empty(0) if at == VALUE_HALVES else part for at, part in enumerate(parts)]


class _SoftmaxMix(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query, key, value, second_query, second_key, bias, real, mask, causal, scale, second_scale, coarse
    ):
        """No key: the queries are."""
        ctx.how = (key is None, causal, scale, second_scale)
        needs = ctx.needs_input_grad[:6]
        ctx.wants = [needs[0] or needs[3], needs[0 if key is None else 1] or needs[4] or needs[5], needs[2], coarse]
        key = query if key is None else key
        parts = _mix_parts(query, key, value, second_query, second_key, real, ctx.how[0], ctx.wants)
        rows = (query, key, value, second_query, second_key, bias, real, mask)
        out, log_total = _softmax_mix(*rows, parts, *ctx.how)
        ctx.save_for_backward(out, log_total, *rows, *_needed_again(parts))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        everything = ctx.saved_tensors  # once: under activation checkpointing they are not there a second time
        if double_backward.is_wanted():
            plain = functools.partial(_mix_plain, *everything[8:10], *ctx.how)
            return *double_backward.gradients(plain, everything[2:8], ctx.needs_input_grad[:6], grad), *(None,) * 6
        grads = _softmax_mix_backward(grad.contiguous(), *everything[:10], list(everything[10:]), *ctx.how, ctx.wants)
        needs = ctx.needs_input_grad[:6]
        return (*(found if need else None for found, need in zip(grads, needs, strict=True)), *(None,) * 6)


def _mix_plain(
    real: Tensor | None,
    mask: Tensor | None,
    shared: bool,
    causal: bool,
    scale: float,
    second_scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The mixture of the operands of `_SoftmaxMix`, for autograd to differentiate."""
    key = query if shared else key
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    return _whole_mix(terms, _only_real(value, real))


def _mix_parts_anywhere(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    real: Tensor | None,
    shared: bool,
    wants: Sequence[bool],
    fill: bool = True,
) -> list[Tensor]:
    """What the kernels make of the rows before they start, kept for the backward; nothing where there are no kernels."""
    if not _on_kernels(query, key, value, second_query, second_key):
        return []
    from holdfast.kernels import mix_launch

    rows = mix_launch.Rows(query, query if shared else key, value, second_query, second_key)
    with on_device_of(query):
        return mix_launch.take_all_apart(rows, real, mix_launch.Wants(*wants), fill=fill)


_ROWS = "Tensor query, Tensor key, Tensor value, Tensor? second_query, Tensor? second_key"
_HOW = "bool shared, bool causal, float scale, float second_scale"
_mix_parts = operator(
    f"mix_parts({_ROWS}, Tensor? real, bool shared, bool[] wants) -> Tensor[]",
    _mix_parts_anywhere,
    functools.partial(_mix_parts_anywhere, fill=False),
    devices=EVERYWHERE,
)


def _softmax_mix_anywhere(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: list[Tensor],
    shared: bool,
    causal: bool,
    scale: float,
    second_scale: float,
) -> tuple[Tensor, Tensor]:
    """`out`, and the logarithm of the total of the weights (G,N)."""
    if parts:
        from holdfast.kernels import mix_launch

        operands = mix_launch.Rows(query, query if shared else key, value, second_query, second_key)
        with on_device_of(query):
            return mix_launch.mix(operands, bias, real, mask, parts, causal, scale, second_scale)
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    value = _only_real(value, real).to(terms.query.dtype)
    out = query.new_empty(*query.shape[:2], value.shape[2], dtype=torch.float32)
    log_total = query.new_empty(query.shape[:2], dtype=torch.float32)
    with ieee_float32():
        for rows, columns in query_blocks(query, key, causal):
            scores = terms.scores(rows, columns)
            highest = finite_or_zero(scores.amax(-1, keepdim=True))
            weights = _exp(scores.sub_(highest))
            total = weights.sum(-1, keepdim=True)
            out[:, rows] = torch.bmm(weights, value[:, columns]) / total.clamp_min(torch.finfo(torch.float32).tiny)
            log_total[:, rows] = (highest + total.log()).squeeze(-1)
    return out, log_total


def _softmax_mix_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    return query.new_empty(*shape, value.shape[2], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


_LIMITS = "Tensor? bias, Tensor? real, Tensor? mask, Tensor[] parts"
_softmax_mix = operator(
    f"softmax_mix({_ROWS}, {_LIMITS}, {_HOW}) -> (Tensor, Tensor)",
    _softmax_mix_anywhere,
    _softmax_mix_fake,
    devices=EVERYWHERE,
)


def _softmax_mix_backward_anywhere(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    parts: list[Tensor],
    shared: bool,
    causal: bool,
    scale: float,
    second_scale: float,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients of the first six operands; one without elements where it is not wanted or there is no operand.

    Where keys are shared with queries, their gradient is in that of the queries.
    """
    if parts:
        from holdfast.kernels import mix_launch

        rows = mix_launch.Rows(query, query if shared else key, value, second_query, second_key)
        how = (bias, real, mask, parts, causal, scale, second_scale)
        with on_device_of(query):
            grads = mix_launch.mix_backward(grad, out, log_total, rows, *how, wants=mix_launch.Wants(*wants))
    else:
        terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
        grads = _blocked_backward(grad, out, log_total, terms, _only_real(value, real), shared)
    wanted = _wanted((query, key, value, second_query, second_key, bias), shared, wants)
    return [
        grad.new_empty(0) if operand is None or found is None else found.to(operand.dtype)
        for operand, found in zip(wanted, grads, strict=True)
    ]


def _wanted(operands: tuple[Tensor | None, ...], shared: bool, wants: Sequence[bool]) -> list[Tensor | None]:
    """Those of the first six operands that get a gradient of their own."""
    each = (wants[0], wants[1] and not shared, wants[2], wants[0], wants[1], wants[1])
    return [operand if want else None for operand, want in zip(operands, each, strict=True)]


def _softmax_mix_backward_fake(grad: Tensor, out: Tensor, log_total: Tensor, *rest: Any) -> list[Tensor]:
    wanted = _wanted(rest[:6], rest[9], rest[-1])
    return [grad.new_empty(0) if operand is None else operand.new_empty(operand.shape) for operand in wanted]


_softmax_mix_backward = operator(
    f"softmax_mix_backward(Tensor grad, Tensor out, Tensor log_total, {_ROWS}, {_LIMITS}, {_HOW}, bool[] wants) -> Tensor[]",
    _softmax_mix_backward_anywhere,
    _softmax_mix_backward_fake,
    devices=EVERYWHERE,
)


def _blocked_backward(
    grad: Tensor, out: Tensor, log_total: Tensor, terms: _Terms, value: Tensor, shared: bool
) -> tuple[Tensor | None, ...]:
    query, key, second_query, second_key, bias = terms[:5]
    grad, value = grad.to(query.dtype), value.to(query.dtype)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    grad_second_query = None if second_query is None else torch.empty_like(second_query)
    grad_second_key = None if second_key is None else torch.zeros_like(second_key)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    centre = (grad * out).sum(-1, keepdim=True)
    log_total = finite_or_zero(log_total).unsqueeze(-1)
    with ieee_float32():
        for rows, columns in query_blocks(query, key, terms.causal):
            scores = terms.scores(rows, columns)
            if terms.wide:  # float32 does not hold these totals
                weights = _shares(_exp(scores.sub_(finite_or_zero(scores.amax(-1, keepdim=True)))))
            else:
                weights = _exp(scores.sub_(log_total[:, rows]))
            grad_value[:, columns] += torch.bmm(weights.transpose(1, 2), grad[:, rows])
            slopes = torch.bmm(grad[:, rows], value[:, columns].transpose(1, 2))
            # Huge keys would blow up what rounding has left of a difference that is 0: there both sides come from float64.
            middle = (slopes * weights).sum(-1, keepdim=True) if terms.wide else centre[:, rows]
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
