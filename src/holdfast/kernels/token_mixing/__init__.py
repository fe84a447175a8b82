"""Attention-like mixing without an N x N matrix, forward and backward, in true float32.

    G groups (sequences), N queries, M keys; the queries are the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + bias_ij) over the allowed j;  out_i = sum_j weight_ij v_j

Allowed are j <= i if `causal`, `real[j]` if given, and what `mask` says: bool, True where allowed, or a bias to add. A query
that may attend to nothing gets 0.

Products of tokens of 1e19 and more overflow float32. On a CPU such operands are mixed in float64; on a GPU, where finding
out would wait, the result is NaN, which a router in training reports.

On a GPU Triton kernels do this in tiles (triton.py, started by launch.py), elsewhere PyTorch in blocks (blocks.py).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.backward import differentiable_gradients, is_differentiated
from holdfast.kernels.launching import EVERYWHERE, HAS_TRITON, on_device_of, operator
from holdfast.kernels.token_mixing.blocks import (
    expanded_mask,
    mix_at_once,
    mix_in_blocks,
    mix_in_blocks_backward,
    only_real,
    score_terms,
)

VALUE_FP16_PARTS = 6  # the index of the values' float16 parts in the list of `launch.split_operands`


class SecondProduct(NamedTuple):
    """Another product of queries and keys, which is added to the scores."""

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
    second: SecondProduct | None = None,
    bias: Tensor | None = None,  # (G,M), added to the scores of a key
    coarse: bool = False,
) -> Tensor:
    """Return out (G,N,n), float32, differentiable in everything but a bias in `mask`.

    `key is query` saves work. `coarse`: gradients of queries and keys will be rounded to bfloat16, and may be as inexact.
    """
    other_query, other_key, other_scale = (None, None, 0.0) if second is None else second
    bias = None if bias is None else bias.float()
    if torch.compiler.is_exporting():
        terms = score_terms(
            query, key, other_query, other_key, bias, real, expanded_mask(mask, query, key), causal, scale, other_scale
        )
        return mix_at_once(terms, only_real(value, real))
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


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None) -> bool:
    """Return whether the Triton kernels can take these."""
    if not (HAS_TRITON and query.is_cuda):
        return False
    from holdfast.kernels.token_mixing import launch

    return launch.supports(query, key, value, second_query, second_key)


def parts_for_backward(parts: list[Tensor]) -> list[Tensor]:
    """Return the parts that the backward reads: all but the float16 parts of the values, which become empty."""
    return [part.new_empty(0) if at == VALUE_FP16_PARTS else part for at, part in enumerate(parts)]


class _SoftmaxMix(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query, key, value, second_query, second_key, bias, real, mask, causal, scale, second_scale, coarse
    ):
        """`key=None` means that keys equal queries."""
        ctx.how = (key is None, causal, scale, second_scale)
        needs = ctx.needs_input_grad[:6]
        ctx.wants = [needs[0] or needs[3], needs[0 if key is None else 1] or needs[4] or needs[5], needs[2], coarse]
        key = query if key is None else key
        parts = _mix_parts(query, key, value, second_query, second_key, real, ctx.how[0], ctx.wants)
        rows = (query, key, value, second_query, second_key, bias, real, mask)
        out, log_total = _softmax_mix(*rows, parts, *ctx.how)
        ctx.save_for_backward(out, log_total, *rows, *parts_for_backward(parts))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: activation checkpointing does not allow a second time
        if is_differentiated():
            reference = functools.partial(_mix_reference, *saved[8:10], *ctx.how)
            return *differentiable_gradients(reference, saved[2:8], ctx.needs_input_grad[:6], grad), *(None,) * 6
        grads = _softmax_mix_backward(grad.contiguous(), *saved[:10], list(saved[10:]), *ctx.how, ctx.wants)
        needs = ctx.needs_input_grad[:6]
        return (*(found if need else None for found, need in zip(grads, needs, strict=True)), *(None,) * 6)


def _mix_reference(
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
    """Compute `_SoftmaxMix` in operations that autograd can differentiate."""
    key = query if shared else key
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    return mix_at_once(terms, only_real(value, real))


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
    """Return the rows in 16-bit parts, which the kernels read, forward and backward; empty where the kernels do not run."""
    if not _has_kernel(query, key, value, second_query, second_key):
        return []
    from holdfast.kernels.token_mixing import launch

    rows = launch.Rows(query, query if shared else key, value, second_query, second_key)
    with on_device_of(query):
        return launch.split_operands(rows, real, launch.WantedGradients(*wants), fill=fill)


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
    """Return `out`, and the logarithm of the total of the weights (G,N)."""
    if parts:
        from holdfast.kernels.token_mixing import launch

        operands = launch.Rows(query, query if shared else key, value, second_query, second_key)
        with on_device_of(query):
            return launch.mix(operands, bias, real, mask, parts, causal, scale, second_scale)
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    return mix_in_blocks(terms, only_real(value, real))


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
    """Return the gradients of the first six operands; an empty one where it is not wanted or there is no operand.

    With `shared`, keys are the queries, and their gradient is added to that of the queries.
    """
    if parts:
        from holdfast.kernels.token_mixing import launch

        rows = launch.Rows(query, query if shared else key, value, second_query, second_key)
        how = (bias, real, mask, parts, causal, scale, second_scale)
        with on_device_of(query):
            grads = launch.mix_backward(grad, out, log_total, rows, *how, wants=launch.WantedGradients(*wants))
    else:
        terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
        grads = mix_in_blocks_backward(grad, out, log_total, terms, only_real(value, real), shared)
    wanted = _wanted((query, key, value, second_query, second_key, bias), shared, wants)
    return [
        grad.new_empty(0) if operand is None or found is None else found.to(operand.dtype)
        for operand, found in zip(wanted, grads, strict=True)
    ]


def _wanted(operands: tuple[Tensor | None, ...], shared: bool, wants: Sequence[bool]) -> list[Tensor | None]:
    """Return those of the first six operands that get a gradient of their own, None in the other places."""
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
