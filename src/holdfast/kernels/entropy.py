"""The entropy of attention weights, head by head, without an N x N matrix: which head looks at the fewest tokens.

    B sequences, H heads, N queries, M keys; weights and what is allowed are those of kernels/mix.py

On a GPU the kernels of kernels/entropy_kernels.py do this in tiles; here is what they are compared with, and what runs on a
CPU.
"""

import torch
from torch import Tensor

from holdfast.kernels.mix import expanded_mask, finite_or_zero, query_blocks, score_terms
from holdfast.kernels.precision import ieee_float32
from holdfast.kernels.triton_support import HAS_TRITON, on_device_of

BLOCK = 64  # queries side by side, where entropies of some of them are wanted


@torch.no_grad()
def attention_entropy(
    query: Tensor,  # (B,H,N,m)
    key: Tensor,  # (B,key heads,M,m)
    *,
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (B,M)
    mask: Tensor | None = None,  # (B,H,N,M), or 1 in place of B, H or N
    step: int = 1,
) -> Tensor:
    """Return the entropy in nats of each query's weights, (B,H,N), with no gradient; 0 for a query that may look at nothing.

    step    more than 1: only the queries of the `sampled` blocks, (B,H,n)
    """
    out: Tensor = _attention_entropy(query.detach(), key.detach(), real, mask, causal, scale, step)
    return out


def sampled(queries: int, step: int) -> list[slice]:
    """Return every `step`-th block of queries, starting at block `step // 2`."""
    return [slice(first, min(first + BLOCK, queries)) for first in range(step // 2 * BLOCK, queries, step * BLOCK)]


@torch.library.custom_op("holdfast::attention_entropy", mutates_args=())
def _attention_entropy(
    query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float, step: int
) -> Tensor:
    if HAS_TRITON and query.is_cuda:
        from holdfast.kernels import entropy_kernels

        if entropy_kernels.supports(query, key, scale):
            with on_device_of(query):
                return entropy_kernels.entropy(query, key, real, mask, causal, scale, step)
    if step == 1:
        return _entropies(query, key, real, mask, causal, scale)
    found = []
    for rows in sampled(query.shape[2], step):
        keys = slice(0, key.shape[2] - query.shape[2] + rows.stop if causal else key.shape[2])
        part = None if mask is None else mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
        seen = None if real is None else real[:, keys]
        found.append(_entropies(query[:, :, rows], key[:, :, keys], seen, part, causal, scale))
    return torch.cat(found, 2)


def _entropies(query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    heads, key_heads = query.shape[1], key.shape[1]
    entropy = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for head in range(heads):  # one at a time: a mask expanded to all heads would be a copy of N x N for each
        own, shared = query[:, head], key[:, head * key_heads // heads]
        part = None if mask is None else mask[:, head if mask.shape[1] > 1 else 0]
        terms = score_terms(own, shared, None, None, None, real, expanded_mask(part, own, shared), causal, scale, 0.0)
        with ieee_float32():
            for rows, columns in query_blocks(own, shared, causal):
                scores = terms.scores(rows, columns)
                log_weights = scores.sub_(finite_or_zero(scores.logsumexp(-1, keepdim=True)))
                entropy[:, head, rows] = -(log_weights.exp() * finite_or_zero(log_weights)).sum(-1)
    return entropy


@_attention_entropy.register_fake
def _(query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float, step: int) -> Tensor:
    rows = query.shape[2] if step == 1 else sum(block.stop - block.start for block in sampled(query.shape[2], step))
    return query.new_empty(*query.shape[:2], rows, dtype=torch.float32)
