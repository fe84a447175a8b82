"""Attention-like mixing without an N x N matrix: a block of queries at a time, forward and backward, in true float32.

    G groups (sequences, or sequences x heads), N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + bias_ij) over the allowed j;  out_i = sum_j weight_ij v_j

What is allowed: j <= i if `causal`, `real[j]` if given, and what `mask` says: bool, True where allowed, or a bias to add. A
query that may look at nothing gets 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast.ops.precision import ieee_float32

BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # scores held at a time: 16 MiB; on a GPU, where small ones wait, 128
FEWEST_ROWS = 16  # queries in a block, however many keys there are


def softmax_mix(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    value: Tensor,  # (G,M,n)
    *,
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # (G,N,M), or 1 in place of G or N
) -> Tensor:
    """out (G,N,n), float32, differentiable in query, key and value; a bias in `mask` gets no gradient."""
    out, _ = _softmax_mix(query, key, value, real, _expanded(mask, query, key), causal, scale)
    return out


@torch.no_grad()
def attention_entropy(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """(G,N): the entropy in nats of each query's weights; 0 for a query that may look at nothing. No gradient."""
    out: Tensor = _attention_entropy(query.detach(), key.detach(), real, _expanded(mask, query, key), causal, scale)
    return out


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A view of the mask with a row for each query and a column for each key."""
    return None if mask is None else mask.expand(-1, query.shape[1], key.shape[1])


def _only_real(rows: Tensor, real: Tensor | None) -> Tensor:
    """float32, and 0 in padding: a weight of 0 times NaN is NaN."""
    return rows.float() if real is None else rows.float().masked_fill(~real.unsqueeze(-1), 0.0)


def _blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Which queries go together, and how many keys they may see."""
    groups, queries, _ = query.shape
    keys = key.shape[1]
    elements = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS["cpu"])
    rows = max(FEWEST_ROWS, elements // max(groups * keys, 1))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        yield slice(start, end), slice(0, keys - queries + end if causal else keys)


def _scores(
    query: Tensor,
    key: Tensor,
    at: tuple[slice, slice],
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """(G, block, keys), -inf where not allowed."""
    rows, columns = at
    scores = torch.bmm(query[:, rows], key[:, columns].transpose(1, 2)).mul_(scale)
    if mask is not None:
        part = mask[:, rows, columns]
        scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
    if real is not None:
        scores.masked_fill_(~real[:, None, columns], -torch.inf)
    if causal:
        position = torch.arange(rows.start, rows.stop, device=query.device) + key.shape[1] - query.shape[1]
        later = torch.arange(columns.stop, device=query.device) > position.unsqueeze(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _exp(log_weights: Tensor) -> Tensor:
    """In place. Below -80 a weight is 0: beside a total of at least 1 it is nothing, and denormals cost a CPU dearly."""
    return torch.threshold_(log_weights, -80.0, -torch.inf).exp_()


def _finite(values: Tensor) -> Tensor:
    return values.where(values > -torch.inf, 0.0)


@torch.library.custom_op("holdfast::softmax_mix", mutates_args=())
def _softmax_mix(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = query.float(), _only_real(key, real), _only_real(value, real)
    out = query.new_empty(*query.shape[:2], value.shape[2])
    log_total = query.new_empty(query.shape[:2])
    with ieee_float32():
        for at in _blocks(query, key, causal):
            scores = _scores(query, key, at, real, mask, causal, scale)
            highest = _finite(scores.amax(-1, keepdim=True))
            weights = _exp(scores.sub_(highest))
            total = weights.sum(-1, keepdim=True)
            out[:, at[0]] = torch.bmm(weights, value[:, at[1]]) / total.clamp_min(torch.finfo(torch.float32).tiny)
            log_total[:, at[0]] = (highest + total.log()).squeeze(-1)
    return out, log_total


@_softmax_mix.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    return query.new_empty(*shape, value.shape[2], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("holdfast::softmax_mix_backward", mutates_args=())
def _softmax_mix_backward(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_query, wide_key, wide_value = query.float(), _only_real(key, real), _only_real(value, real)
    grad_query = torch.empty_like(wide_query)
    grad_key, grad_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    centre = (grad * out).sum(-1, keepdim=True)
    log_total = _finite(log_total).unsqueeze(-1)
    with ieee_float32():
        for at in _blocks(wide_query, wide_key, causal):
            rows, columns = at
            weights = _exp(_scores(wide_query, wide_key, at, real, mask, causal, scale).sub_(log_total[:, rows]))
            grad_value[:, columns] += torch.bmm(weights.transpose(1, 2), grad[:, rows])
            grad_scores = torch.bmm(grad[:, rows], wide_value[:, columns].transpose(1, 2))
            grad_scores = grad_scores.sub_(centre[:, rows]).mul_(weights).mul_(scale)
            grad_query[:, rows] = torch.bmm(grad_scores, wide_key[:, columns])
            grad_key[:, columns] += torch.bmm(grad_scores.transpose(1, 2), wide_query[:, rows])
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


@_softmax_mix_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    log_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Tensor | bool | float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def, type-arg]
    query, key, value, real, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*output, query, key, value, real, mask)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: Tensor | None, _grad_log_total: Tensor | None) -> tuple:  # type: ignore[no-untyped-def, type-arg]
    if grad is None:
        return (None,) * 7
    grads = _softmax_mix_backward(grad.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.scale)
    return (*grads, None, None, None, None)


_softmax_mix.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("holdfast::attention_entropy", mutates_args=())
def _attention_entropy(
    query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    query, key = query.float(), _only_real(key, real)
    entropy = query.new_empty(query.shape[:2])
    with ieee_float32():
        for at in _blocks(query, key, causal):
            scores = _scores(query, key, at, real, mask, causal, scale)
            log_weights = scores.sub_(_finite(scores.logsumexp(-1, keepdim=True)))
            entropy[:, at[0]] = -(log_weights.exp() * _finite(log_weights)).sum(-1)
    return entropy


@_attention_entropy.register_fake
def _(query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    return query.new_empty(query.shape[:2], dtype=torch.float32)
