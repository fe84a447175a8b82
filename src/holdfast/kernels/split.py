"""True float32 products on tensor cores, and without float32 copies of half-precision tokens.

tokens (T,d) and weight (n,d) bfloat16, float16 or float32; split_kernels.py says how. On a GPU only.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import double_backward
from holdfast.kernels.clusters import TILE, Groups
from holdfast.kernels.operators import operator
from holdfast.kernels.triton_support import has_kernels, on_device_of

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


def applies(tokens: Tensor, weight: Tensor) -> bool:
    """On a GPU that has bfloat16 tensor cores."""
    return (
        tokens.dtype in DTYPES
        and weight.dtype in DTYPES
        and has_kernels(tokens)
        and torch.cuda.get_device_capability(tokens.device) >= (8, 0)
    )


def linear(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens weight^T: (T,n), float32; gradients in the dtypes of the inputs."""
    out: Tensor = _Linear.apply(tokens.contiguous(), weight, None, None, None, None)  # type: ignore[no-untyped-call]
    return out


def clustered_linear(tokens: Tensor, weight: Tensor, groups: Groups, scales: Tensor) -> Tensor:
    """(x * m_c) weight^T with `scales (C+1,d)` the m of each cluster, the last for tokens without one; no gradient for m."""
    where = groups.order, groups.owners, groups.bounds, scales
    out: Tensor = _Linear.apply(tokens.contiguous(), weight, *where)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, *clusters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(tokens, weight, *clusters)
        return _linear(tokens, weight, *clusters)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        tokens, weight, *clusters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if double_backward.is_wanted():
            return tuple(double_backward.gradients(_linear_plain, ctx.saved_tensors, ctx.needs_input_grad, grad))
        grad_tokens, grad_weight = _linear_backward(grad, tokens, weight, *clusters, *wanted)
        return grad_tokens if wanted[0] else None, grad_weight if wanted[1] else None, *(None,) * 4


def _linear_plain(
    tokens: Tensor,
    weight: Tensor,
    order: Tensor | None,
    owners: Tensor | None,
    bounds: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """The same, for autograd to differentiate."""
    from holdfast.kernels.precision import matmul_float32  # which imports this module

    rows = tokens.float()
    if order is not None and owners is not None and scales is not None:
        count = tokens.shape[0]
        cluster = owners.long().repeat_interleave(TILE)
        places = order.long().where(cluster >= 0, count)  # the order of a tile that is not needed is uninitialised
        cluster_of = cluster.new_zeros(count + 1).scatter(0, places, cluster.clamp_min(0))[:count]
        rows = rows * scales[cluster_of]
    return matmul_float32(rows, weight.t())


def _linear_on_gpu(tokens: Tensor, weight: Tensor, *clusters: Tensor | None) -> Tensor:
    from holdfast.kernels import split_launch

    with on_device_of(tokens):
        return split_launch.linear(tokens, weight, _clusters(*clusters))


def _clusters(*clusters: Tensor | None) -> Any:
    """All four, or none."""
    from holdfast.kernels.split_launch import Clusters

    return None if clusters[0] is None else Clusters(*clusters)  # type: ignore[arg-type]


def _linear_backward_on_gpu(
    grad: Tensor,
    tokens: Tensor,
    weight: Tensor,
    order: Tensor | None,
    owners: Tensor | None,
    bounds: Tensor | None,
    scales: Tensor | None,
    want_tokens: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    from holdfast.kernels import split_launch

    clusters = _clusters(order, owners, bounds, scales)
    grad_tokens, grad_weight = grad.new_empty(0), grad.new_empty(0)
    with on_device_of(tokens):
        parts = split_launch.gradient_parts(grad, tokens, weight)
        if want_tokens:
            grad_tokens = split_launch.grad_tokens(parts, tokens, weight, clusters)
        if want_weight:
            grad_weight = split_launch.grad_weight(parts, tokens, weight, clusters)
    return grad_tokens, grad_weight


def _linear_backward_fake(
    grad: Tensor, tokens: Tensor, weight: Tensor, *clusters_and_wants: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    want_tokens, want_weight = clusters_and_wants[-2:]
    return (
        torch.empty_like(tokens) if want_tokens else grad.new_empty(0),
        weight.new_empty(weight.shape) if want_weight else grad.new_empty(0),
    )


_CLUSTERS = "Tensor? order, Tensor? owners, Tensor? bounds, Tensor? scales"
_linear = operator(
    f"split_linear(Tensor tokens, Tensor weight, {_CLUSTERS}) -> Tensor",
    _linear_on_gpu,
    lambda tokens, weight, *_: tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=torch.float32),
)
_linear_backward = operator(
    f"split_linear_backward(Tensor grad, Tensor tokens, Tensor weight, {_CLUSTERS}, bool want_tokens, bool want_weight)"
    " -> (Tensor, Tensor)",
    _linear_backward_on_gpu,
    _linear_backward_fake,
)
