"""Mix values as attention does, forward and backward, without storing an N x M matrix and with float32 accuracy.

    G groups (sequences), N queries, M keys; the queries are at the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + bias_ij) over the allowed j;  out_i = sum_j weight_ij v_j

A key j is allowed for query i if all of these are true: j is not after i (only with `causal`), `real[j]` (if given), and
`mask[i, j]` (if it is bool). A mask of numbers is added to the scores. The output of a query without allowed keys is 0.

Products of tokens with entries of 1e19 and more overflow float32. On a CPU such operands are mixed in float64. On a GPU a
check for them would wait for the device, so the result is NaN, which a router in training reports.

On a GPU, Triton kernels compute tile by tile (triton.py, started by launch.py). On other devices, PyTorch computes block by
block (blocks.py).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.backward import differentiable_gradients, is_differentiated
from holdfast.kernels.launching import EVERYWHERE, HAS_TRITON, is_exporting, on_device_of, operator
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
    """A second product of other queries and keys, which is added to the scores."""

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
    """Return out (G,N,n), float32, differentiable in all operands except `mask`.

    If keys equal queries, pass the same object as both: this saves work. With `coarse`, the caller rounds the gradients of
    queries and keys to bfloat16, so they are computed with that accuracy only.
    """
    other_query, other_key, other_scale = (None, None, 0.0) if second is None else second
    bias = None if bias is None else bias.float()
    if is_exporting():
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
    """Return whether the Triton kernels support these operands."""
    if not (HAS_TRITON and query.is_cuda):
        return False
    from holdfast.kernels.token_mixing import launch

    return launch.supports(query, key, value, second_query, second_key)


def parts_for_backward(parts: list[Tensor]) -> list[Tensor]:
    """Return the parts for the backward, which does not read the float16 parts of the values: they become empty."""
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
        inputs = (query, key, value, second_query, second_key, bias, real, mask)
        out, log_total = _softmax_mix(*inputs, parts, *ctx.how)
        ctx.save_for_backward(out, log_total, *inputs, *parts_for_backward(parts))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read only once: activation checkpointing raises an error for a second read
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
    """Return what `_SoftmaxMix` returns, in operations that autograd can differentiate; `shared`: keys equal queries."""
    key = query if shared else key
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    return mix_at_once(terms, only_real(value, real))


def _mix_parts_on_any_device(
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
    """Return the operands split into 16-bit parts, which the Triton kernels read; an empty list where they do not run.

    `shared`: keys equal queries. `wants`: the fields of `launch.WantedGradients`. `fill=False` only allocates the parts.
    """
    if not _has_kernel(query, key, value, second_query, second_key):
        return []
    from holdfast.kernels.token_mixing import launch

    rows = launch.Rows(query, query if shared else key, value, second_query, second_key)
    with on_device_of(query):
        return launch.split_operands(rows, real, launch.WantedGradients(*wants), fill=fill)


_ROWS = "Tensor query, Tensor key, Tensor value, Tensor? second_query, Tensor? second_key"
_SETTINGS = "bool shared, bool causal, float scale, float second_scale"
_mix_parts = operator(
    f"mix_parts({_ROWS}, Tensor? real, bool shared, bool[] wants) -> Tensor[]",
    _mix_parts_on_any_device,
    functools.partial(_mix_parts_on_any_device, fill=False),
    devices=EVERYWHERE,
)


def _softmax_mix_on_any_device(
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
    """Return `out`, and the logarithm of each query's sum of exp(score) (G,N), which the backward reads."""
    if parts:
        from holdfast.kernels.token_mixing import launch

        rows = launch.Rows(query, query if shared else key, value, second_query, second_key)
        with on_device_of(query):
            return launch.mix(rows, bias, real, mask, parts, causal, scale, second_scale)
    terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
    return mix_in_blocks(terms, only_real(value, real))


def _softmax_mix_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    return query.new_empty(*shape, value.shape[2], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


_BIAS_MASKS_AND_PARTS = "Tensor? bias, Tensor? real, Tensor? mask, Tensor[] parts"
_softmax_mix = operator(
    f"softmax_mix({_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _softmax_mix_on_any_device,
    _softmax_mix_fake,
    devices=EVERYWHERE,
)


def _softmax_mix_backward_on_any_device(
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
    """Return the gradients of `query` to `bias`; an empty tensor for one that is not wanted or whose operand is None.

    With `shared`, keys equal queries, and the gradient of the keys is added to that of the queries.
    """
    if parts:
        from holdfast.kernels.token_mixing import launch

        rows = launch.Rows(query, query if shared else key, value, second_query, second_key)
        settings = (bias, real, mask, parts, causal, scale, second_scale)
        with on_device_of(query):
            grads = launch.mix_backward(grad, out, log_total, rows, *settings, wants=launch.WantedGradients(*wants))
    else:
        terms = score_terms(query, key, second_query, second_key, bias, real, mask, causal, scale, second_scale)
        grads = mix_in_blocks_backward(grad, out, log_total, terms, only_real(value, real), shared)
    wanted = _operands_with_gradient((query, key, value, second_query, second_key, bias), shared, wants)
    return [
        grad.new_empty(0) if operand is None or found is None else found.to(operand.dtype)
        for operand, found in zip(wanted, grads, strict=True)
    ]


def _operands_with_gradient(operands: tuple[Tensor | None, ...], shared: bool, wants: Sequence[bool]) -> list[Tensor | None]:
    """Return the six operands `query` to `bias`, with None in place of those that get no gradient of their own."""
    each = (wants[0], wants[1] and not shared, wants[2], wants[0], wants[1], wants[1])
    return [operand if want else None for operand, want in zip(operands, each, strict=True)]


def _softmax_mix_backward_fake(grad: Tensor, out: Tensor, log_total: Tensor, *rest: Any) -> list[Tensor]:
    wanted = _operands_with_gradient(rest[:6], rest[9], rest[-1])
    return [grad.new_empty(0) if operand is None else operand.new_empty(operand.shape) for operand in wanted]


_softmax_mix_backward = operator(
    f"softmax_mix_backward(Tensor grad, Tensor out, Tensor log_total, {_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}, "
    "bool[] wants) -> Tensor[]",
    _softmax_mix_backward_on_any_device,
    _softmax_mix_backward_fake,
    devices=EVERYWHERE,
)
