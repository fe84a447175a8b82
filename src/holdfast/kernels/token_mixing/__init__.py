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
    HAS_TRITON,
    differentiable_gradients,
    is_differentiated,
    like_wanted,
    on_device_of,
    operator,
)
from holdfast.kernels.token_mixing.blocks import (
    ScoreTerms,
    expanded_mask,
    mix_at_once,
    mix_in_blocks,
    mix_in_blocks_backward,
    mix_one_query,
    only_real,
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


def softmax_mix(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return out (G,N,n), float32, differentiable in all operands except `mask` and `levels`; options as those of `_mix`."""
    return _mix(query, key, value, with_total=False, **options)[0]


def softmax_mix_with_total(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return out (G,N,n) and log_total (G,N), the logarithm of each query's sum of exp(score), both differentiable.

    log_total is -inf for a query without allowed keys. The options are those of `_mix`.
    """
    return _mix(query, key, value, with_total=True, **options)  # type: ignore[return-value]


def _mix(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    value: Tensor,  # (G,M,n)
    *,
    scale: float,
    with_total: bool,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # (G,N,M), or 1 in place of G or N
    second: SecondProduct | None = None,
    bias: Tensor | None = None,  # (G,M), added to the scores of a key
    levels: Levels | None = None,
    coarse: bool = False,
) -> tuple[Tensor, ...]:
    """Return `out` and `log_total`; one query without gradients has the second only with `with_total`.

    If keys equal queries, pass the same object as both: this saves work. With `coarse`, the caller rounds the gradients of
    queries and keys to bfloat16, so they are computed with that accuracy only.
    """
    second_query, second_key, second_scale = (None, None, 0.0) if second is None else second
    bias = None if bias is None else bias.float()
    rows = (query, key, value, second_query, second_key, bias)
    limits = (real, expanded_mask(mask, query, key), *((None, None) if levels is None else levels))
    if is_exporting():
        return mix_at_once(*_terms_and_value((*rows, *limits), causal, scale, second_scale))
    if query.shape[1] == 1 and not torch.is_grad_enabled():
        # One query is the last of its group, so that `causal` excludes no key. Keys of padding need not be 0, except where
        # large operands are looked for.
        zeroed = real if query.device.type == "cpu" else None
        terms, _ = _terms_and_value((*rows, zeroed, *limits[1:]), False, scale, second_scale)
        return mix_one_query(terms._replace(real=real), only_real(value, real), with_total)
    own_key = None if key is query else key
    options = (causal, scale, second_scale, coarse)
    return _SoftmaxMix.apply(query, own_key, *rows[2:], *limits, *options)


# The inputs of the operators and of the autograd function are six operands (query, key, value, second query, second key and
# bias) and four limits (real, mask, levels of queries and of keys). For the function, `key=None` means that keys equal
# queries. Its options are causal, scale, second_scale and coarse.
OPERANDS, INPUTS, OPTIONS = 6, 10, 4
Inputs = tuple[Any, ...]


def _terms_and_value(inputs: Inputs, causal: bool, scale: float, second_scale: float) -> tuple[ScoreTerms, Tensor]:
    """Return the terms of the scores, and the values without those of padding."""
    query, key, value, *others = inputs
    terms = ScoreTerms._make((query, key, *others, causal, scale, second_scale)).prepared()
    return terms, only_real(value, terms.real)


def parts_for_backward(parts: list[Tensor]) -> list[Tensor]:
    """Return the parts for the backward, which does not read the float16 parts of the values: they become empty."""
    return [part.new_empty(0) if at == VALUE_FP16_PARTS else part for at, part in enumerate(parts)]


class _SoftmaxMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, *rest):  # type: ignore[no-untyped-def]
        *settings, coarse = rest[-OPTIONS:]
        ctx.how = (key is None, *settings)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:OPERANDS]
        ctx.wants = [needs[0] or needs[3], needs[0 if key is None else 1] or needs[4] or needs[5], needs[2], coarse]
        inputs = (query, query if key is None else key, *rest[:-OPTIONS])
        real, has_levels = inputs[OPERANDS], inputs[OPERANDS + 2] is not None
        is_kept = query.shape[2] <= KEPT_WIDTH
        wants = ctx.wants if is_kept else [False, False, False, coarse]
        # The kernels do not read levels: without parts, the mixing runs in blocks.
        parts = [] if has_levels else _mix_parts(*inputs[: OPERANDS - 1], real, ctx.how[0], wants)
        ctx.splits_again = bool(parts) and not is_kept
        out, log_total = _softmax_mix(*inputs, parts, *ctx.how)
        ctx.save_for_backward(out, log_total, *inputs, *([] if ctx.splits_again else parts_for_backward(parts)))
        return out, log_total

    @staticmethod
    def backward(ctx, grad, grad_total):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read only once: activation checkpointing raises an error for a second read
        (out, log_total), inputs, parts = saved[:2], saved[2 : 2 + INPUTS], list(saved[2 + INPUTS :])
        needs, rest = ctx.needs_input_grad[:OPERANDS], (None,) * (INPUTS - OPERANDS + OPTIONS)
        grad = torch.zeros_like(out) if grad is None else grad
        if is_differentiated():
            reference = functools.partial(_mix_reference, inputs[OPERANDS:], ctx.how, grad_total is not None)
            grads = (grad,) if grad_total is None else (grad, grad_total)
            return *differentiable_gradients(reference, inputs[:OPERANDS], needs, grads), *rest
        if ctx.splits_again:
            parts = parts_for_backward(_mix_parts(*inputs[: OPERANDS - 1], inputs[OPERANDS], ctx.how[0], ctx.wants))
        grad_total = None if grad_total is None else grad_total.contiguous()
        gradients = _softmax_mix_backward(grad.contiguous(), grad_total, out, log_total, *inputs, parts, *ctx.how, ctx.wants)
        return *(each if need else None for each, need in zip(gradients, needs, strict=True)), *rest


def _mix_reference(limits: Inputs, how: tuple[Any, ...], with_total: bool, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """Return what the function returns, in operations that autograd can differentiate."""
    (query, key, *rest), (shared, *settings) = operands, how
    mixed = mix_at_once(*_terms_and_value((query, query if shared else key, *rest, *limits), *settings))
    return mixed if with_total else mixed[:1]


def _rows(inputs: Inputs, shared: bool) -> Any:
    """Return the first five inputs for the functions of launch.py; `shared`: keys equal queries."""
    from holdfast.kernels.token_mixing import launch

    query, key, *others = inputs[: OPERANDS - 1]
    return launch.Rows(query, query if shared else key, *others)


def _has_kernel(query: Tensor, *rest: Any) -> bool:
    """Return whether the Triton kernels support these rows; the last argument is whether keys equal queries."""
    if not (HAS_TRITON and query.is_cuda):
        return False
    from holdfast.kernels.token_mixing import launch

    return launch.supports(query, *rest)


def _mix_parts_anywhere(*arguments: Any, fill: bool = True) -> list[Tensor]:
    """Return the operands split into 16-bit parts, which the Triton kernels read; an empty list where they do not run.

    `fill=False` only allocates the parts.
    """
    *rows, real, shared, wants = arguments
    if not _has_kernel(*rows, shared):
        return []
    from holdfast.kernels.token_mixing import launch

    with on_device_of(rows[0]):
        return launch.split_operands(_rows((*rows,), shared), real, launch.WantedGradients(*wants), fill=fill)


_ROWS = "Tensor query, Tensor key, Tensor value, Tensor? second_query, Tensor? second_key"
_SETTINGS = "bool shared, bool causal, float scale, float second_scale"
_mix_parts = operator(  # `wants` are the fields of `launch.WantedGradients`
    f"mix_parts({_ROWS}, Tensor? real, bool shared, bool[] wants) -> Tensor[]",
    _mix_parts_anywhere,
    functools.partial(_mix_parts_anywhere, fill=False),
)


def _softmax_mix_anywhere(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return `out`, and the logarithm of each query's sum of exp(score) (G,N), which the backward reads."""
    inputs, (parts, shared, *settings) = arguments[:INPUTS], arguments[INPUTS:]
    if not parts:
        return mix_in_blocks(*_terms_and_value(inputs, *settings))
    from holdfast.kernels.token_mixing import launch

    with on_device_of(inputs[0]):
        limits = inputs[OPERANDS - 1 : OPERANDS + 2]
        return launch.mix(launch.Problem._make((_rows(inputs, shared), *limits, parts, *settings)))


_BIAS_MASKS_AND_PARTS = "Tensor? bias, Tensor? real, Tensor? mask, Tensor? query_level, Tensor? key_level, Tensor[] parts"
_softmax_mix = operator(
    f"softmax_mix({_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _softmax_mix_anywhere,
    lambda query, key, value, *_: (
        query.new_empty(*query.shape[:2], value.shape[2], dtype=torch.float32),
        query.new_empty(query.shape[:2], dtype=torch.float32),
    ),
)


def _softmax_mix_backward_anywhere(
    grad: Tensor, grad_total: Tensor | None, out: Tensor, log_total: Tensor, *rest: Any
) -> list[Tensor]:
    """Return the gradients of `query` to `bias`; an empty tensor for one that is not wanted or whose operand is None.

    With `shared`, keys equal queries, and the gradient of the keys is added to that of the queries.
    """
    inputs, (parts, shared, *settings, wants) = rest[:INPUTS], rest[INPUTS:]
    if parts:
        from holdfast.kernels.token_mixing import launch

        limits = inputs[OPERANDS - 1 : OPERANDS + 2]
        problem = launch.Problem._make((_rows(inputs, shared), *limits, parts, *settings))
        with on_device_of(grad):
            grads = launch.mix_backward(grad, out, log_total, problem, launch.WantedGradients(*wants), grad_total)
    else:
        terms, value = _terms_and_value(inputs, *settings)
        grads = mix_in_blocks_backward(grad, grad_total, out, log_total, terms, value, shared)
    return [
        gradient.to(operand.dtype) if want and operand is not None and gradient is not None else grad.new_empty(0)
        for operand, want, gradient in zip(inputs, _wanted_operands(shared, wants), grads, strict=False)
    ]


def _wanted_operands(shared: bool, wants: Sequence[bool]) -> tuple[bool, ...]:
    """Return which of the six operands get a gradient of their own."""
    return (wants[0], wants[1] and not shared, wants[2], wants[0], wants[1], wants[1])


_softmax_mix_backward = operator(
    "softmax_mix_backward(Tensor grad, Tensor? grad_total, Tensor out, Tensor log_total, "
    f"{_ROWS}, {_BIAS_MASKS_AND_PARTS}, {_SETTINGS}, bool[] wants) -> Tensor[]",
    _softmax_mix_backward_anywhere,
    # After the gradients and results come the inputs, the parts and `shared`.
    lambda grad, grad_total, out, log_total, *rest: list(
        like_wanted(grad, rest[:OPERANDS], _wanted_operands(rest[INPUTS + 1], rest[-1]))
    ),
)
