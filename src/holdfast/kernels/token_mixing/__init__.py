"""Mix values as attention does, forward and backward, without storing an N x M matrix and with float32 accuracy.

    G groups (sequences), N queries, M keys; the queries are at the last N of the M positions
    weight_ij is proportional to exp(scale q_i.k_j + bias_ij) over the allowed j;  out_i = sum_j weight_ij v_j

A key j is allowed for query i if all of these are true: j is not after i (only with `causal`), `real[j]` (if given),
`mask[i, j]` (if it is bool), and `levels.key[j] <= levels.query[i]` (if given). A mask of numbers is added to the scores.
The output of a query without allowed keys is 0.

Products of tokens with entries of 1e19 and more overflow float32. On a CPU such operands are mixed in float64. On a GPU a
check for them would wait for the device, so the result is NaN, which a router in training reports.

On a GPU, Triton kernels compute tile by tile (triton.py, started by launch.py); vectors of more than 256 numbers in chunks,
up to 8192 numbers, if keys equal queries and there is no second product. Otherwise, on other devices, and with levels,
PyTorch computes block by block (blocks.py). One query without gradients, a step of decoding, is mixed in PyTorch on every
device.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import (
    EVERYWHERE,
    HAS_TRITON,
    differentiable_gradients,
    is_differentiated,
    on_device_of,
    operator,
)
from holdfast.kernels.token_mixing.blocks import (
    expanded_mask,
    mix_at_once,
    mix_in_blocks,
    mix_in_blocks_backward,
    mix_one_query,
    only_real,
    score_terms,
)
from holdfast.kernels.torch_internals import is_exporting

KEPT_WIDTH = 256  # parts of wider vectors are not kept for the backward, which splits them again: they take much memory
VALUE_FP16_PARTS = 6  # the index of the values' float16 parts in the list of `launch.split_operands`


class SecondProduct(NamedTuple):
    """A second product of other queries and keys, which is added to the scores."""

    query: Tensor  # (G,N,m')
    key: Tensor  # (G,M,m')
    scale: float


class Levels(NamedTuple):
    """A query may attend only to keys whose level is not above its own. There is no gradient through levels."""

    query: Tensor  # (G,N)
    key: Tensor  # (G,M)


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
    levels: Levels | None = None,
    coarse: bool = False,
) -> Tensor:
    """Return out (G,N,n), float32, differentiable in all operands except `mask` and `levels`.

    If keys equal queries, pass the same object as both: this saves work. With `coarse`, the caller rounds the gradients of
    queries and keys to bfloat16, so they are computed with that accuracy only.
    """
    operands = (query, key, value, second, bias, real, mask, levels)
    out: Tensor = _mix(*operands, causal=causal, scale=scale, coarse=coarse, with_total=False)[0]
    return out


def softmax_mix_with_total(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,
    mask: Tensor | None = None,
    second: SecondProduct | None = None,
    bias: Tensor | None = None,
    levels: Levels | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (G,N,n) and log_total (G,N), the logarithm of each query's sum of exp(score), both differentiable.

    log_total is -inf for a query without allowed keys. The arguments are those of `softmax_mix`.
    """
    operands = (query, key, value, second, bias, real, mask, levels)
    out, log_total = _mix(*operands, causal=causal, scale=scale, coarse=False, with_total=True)
    return out, log_total


def _mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second: SecondProduct | None,
    bias: Tensor | None,
    real: Tensor | None,
    mask: Tensor | None,
    levels: Levels | None,
    *,
    causal: bool,
    scale: float,
    coarse: bool,
    with_total: bool,
) -> tuple[Tensor, ...]:
    """Return `out` and, with `with_total`, `log_total`: of one of the two autograd functions below, where it is needed."""
    other_query, other_key, other_scale = (None, None, 0.0) if second is None else second
    bias = None if bias is None else bias.float()
    query_level, key_level = (None, None) if levels is None else levels
    limits = (real, expanded_mask(mask, query, key), query_level, key_level)
    if is_exporting():
        terms = score_terms(query, key, other_query, other_key, bias, *limits, causal, scale, other_scale)
        return mix_at_once(terms, only_real(value, real))
    if query.shape[1] == 1 and not torch.is_grad_enabled():
        # One query is the last of its group, so that `causal` excludes no key. Keys of padding need not be 0, except where
        # large operands are looked for.
        zeroed = real if query.device.type == "cpu" else None
        rows = (query, key, other_query, other_key, bias)
        terms = score_terms(*rows, zeroed, *limits[1:], False, scale, other_scale)._replace(real=real)
        return mix_one_query(terms, only_real(value, real), with_total)
    own_key = None if key is query else key
    function: Any = _SoftmaxMixWithTotal if with_total else _SoftmaxMix
    found = function.apply(query, own_key, value, other_query, other_key, bias, *limits, causal, scale, other_scale, coarse)
    return found if isinstance(found, tuple) else (found,)


def _has_kernel(
    query: Tensor, key: Tensor, value: Tensor, second_query: Tensor | None, second_key: Tensor | None, shared: bool
) -> bool:
    """Return whether the Triton kernels support these operands; `shared`: keys equal queries."""
    if not (HAS_TRITON and query.is_cuda):
        return False
    from holdfast.kernels.token_mixing import launch

    return launch.supports(query, key, value, second_query, second_key, shared)


def parts_for_backward(parts: list[Tensor]) -> list[Tensor]:
    """Return the parts for the backward, which does not read the float16 parts of the values: they become empty."""
    return [part.new_empty(0) if at == VALUE_FP16_PARTS else part for at, part in enumerate(parts)]


# The arguments of the autograd functions: operands (query to bias), limits (real, mask, levels of queries and of keys) and
# options (causal, scale, second_scale, coarse). `key=None` means that keys equal queries.
OPERANDS, LIMITS, OPTIONS = 6, 4, 4


class _SoftmaxMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):  # type: ignore[no-untyped-def]
        return _mix_forward(ctx, *arguments)[0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _mix_gradients(ctx, grad, None)


class _SoftmaxMixWithTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):  # type: ignore[no-untyped-def]
        return _mix_forward(ctx, *arguments)

    @staticmethod
    def backward(ctx, grad, grad_total):  # type: ignore[no-untyped-def]
        return _mix_gradients(ctx, grad, grad_total)


def _mix_forward(ctx, query, key, value, second_query, second_key, bias, *rest):  # type: ignore[no-untyped-def]
    """Return out and log_total; save what the backward reads."""
    limits, (*settings, coarse) = rest[:LIMITS], rest[LIMITS:]
    ctx.how = (key is None, *settings)
    needs = ctx.needs_input_grad[:OPERANDS]
    ctx.wants = [needs[0] or needs[3], needs[0 if key is None else 1] or needs[4] or needs[5], needs[2], coarse]
    key = query if key is None else key
    rows = (query, key, value, second_query, second_key)
    is_kept = max(each.shape[2] for each in (query, second_query) if each is not None) <= KEPT_WIDTH
    wants = ctx.wants if is_kept else [False, False, False, coarse]
    # The kernels do not read levels: without parts, the mixing runs in blocks.
    parts = _mix_parts(*rows, limits[0], ctx.how[0], wants) if limits[2] is None else []
    ctx.splits_again = bool(parts) and not is_kept
    inputs = (*rows, bias, *limits)
    out, log_total = _softmax_mix(*inputs, parts, *ctx.how)
    ctx.save_for_backward(out, log_total, *inputs, *([] if ctx.splits_again else parts_for_backward(parts)))
    return out, log_total


def _mix_gradients(ctx, grad, grad_total):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read only once: activation checkpointing raises an error for a second read
    (out, log_total), inputs, parts = saved[:2], saved[2 : 2 + OPERANDS + LIMITS], list(saved[2 + OPERANDS + LIMITS :])
    needs = ctx.needs_input_grad[:OPERANDS]
    rest = (None,) * (LIMITS + OPTIONS)
    if is_differentiated():
        fixed: list[Any] = [*inputs[OPERANDS:], *ctx.how, grad_total is not None]
        reference = functools.partial(_mix_reference, *fixed)
        grads = (grad,) if grad_total is None else (grad, grad_total)
        return *differentiable_gradients(reference, inputs[:OPERANDS], needs, grads), *rest
    if ctx.splits_again:
        parts = parts_for_backward(_mix_parts(*inputs[: OPERANDS - 1], inputs[OPERANDS], ctx.how[0], ctx.wants))
    grad_total = None if grad_total is None else grad_total.contiguous()
    found = _softmax_mix_backward(grad.contiguous(), grad_total, out, log_total, *inputs, parts, *ctx.how, ctx.wants)
    return *(each if need else None for each, need in zip(found, needs, strict=True)), *rest


def _mix_reference(
    real: Tensor | None,
    mask: Tensor | None,
    query_level: Tensor | None,
    key_level: Tensor | None,
    shared: bool,
    causal: bool,
    scale: float,
    second_scale: float,
    with_total: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    second_query: Tensor | None,
    second_key: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return what the two functions return, in operations that autograd can differentiate; `shared`: keys equal queries."""
    key = query if shared else key
    limits = (real, mask, query_level, key_level)
    terms = score_terms(query, key, second_query, second_key, bias, *limits, causal, scale, second_scale)
    found = mix_at_once(terms, only_real(value, real))
    return found if with_total else found[:1]


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
    if not _has_kernel(query, key, value, second_query, second_key, shared):
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
    query_level: Tensor | None,
    key_level: Tensor | None,
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
    limits = (real, mask, query_level, key_level)
    terms = score_terms(query, key, second_query, second_key, bias, *limits, causal, scale, second_scale)
    return mix_in_blocks(terms, only_real(value, real))


def _softmax_mix_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    return query.new_empty(*shape, value.shape[2], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


_BIAS_MASKS_AND_PARTS = "Tensor? bias, Tensor? real, Tensor? mask, Tensor? query_level, Tensor? key_level, Tensor[] parts"
_softmax_mix = operator(
    f"softmax_mix({_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _softmax_mix_on_any_device,
    _softmax_mix_fake,
    devices=EVERYWHERE,
)


def _softmax_mix_backward_on_any_device(
    grad: Tensor,
    grad_total: Tensor | None,
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
    query_level: Tensor | None,
    key_level: Tensor | None,
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
            wanted = launch.WantedGradients(*wants)
            grads = launch.mix_backward(grad, out, log_total, rows, *settings, wants=wanted, grad_total=grad_total)
    else:
        limits = (real, mask, query_level, key_level)
        terms = score_terms(query, key, second_query, second_key, bias, *limits, causal, scale, second_scale)
        grads = mix_in_blocks_backward(grad, grad_total, out, log_total, terms, only_real(value, real), shared)
    operands = _operands_with_gradient((query, key, value, second_query, second_key, bias), shared, wants)
    return [
        grad.new_empty(0) if operand is None or found is None else found.to(operand.dtype)
        for operand, found in zip(operands, grads, strict=True)
    ]


def _operands_with_gradient(operands: tuple[Tensor | None, ...], shared: bool, wants: Sequence[bool]) -> list[Tensor | None]:
    """Return the six operands `query` to `bias`, with None in place of those that get no gradient of their own."""
    each = (wants[0], wants[1] and not shared, wants[2], wants[0], wants[1], wants[1])
    return [operand if want else None for operand, want in zip(operands, each, strict=True)]


def _softmax_mix_backward_fake(
    grad: Tensor, grad_total: Tensor | None, out: Tensor, log_total: Tensor, *rest: Any
) -> list[Tensor]:
    shared = rest[OPERANDS + LIMITS + 1]  # after the parts
    wanted = _operands_with_gradient(rest[:OPERANDS], shared, rest[-1])
    return [grad.new_empty(0) if operand is None else operand.new_empty(operand.shape) for operand in wanted]


_softmax_mix_backward = operator(
    "softmax_mix_backward(Tensor grad, Tensor? grad_total, Tensor out, Tensor log_total, "
    f"{_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}, bool[] wants) -> Tensor[]",
    _softmax_mix_backward_on_any_device,
    _softmax_mix_backward_fake,
    devices=EVERYWHERE,
)
