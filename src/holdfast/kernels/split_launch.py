"""Launching the kernels of exact products: in how many parts, in tiles of what size. Imported only where Triton can run."""

# mypy: ignore-errors
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import split_kernels
from holdfast.kernels.clusters import TILE
from holdfast.kernels.sizes import cdiv
from holdfast.kernels.split_kernels import PART

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
DEPTH = 64  # features that tokens and weights are multiplied in at a time
WIDE = 512  # from here on a float32 sum may be off by 2^-15 of its terms


class Clusters(NamedTuple):
    """Tokens in the order of their clusters, as kernels/clusters.py has it, and every cluster's scales."""

    order: Tensor
    owners: Tensor
    bounds: Tensor
    scales: Tensor


def _tiles(count: int, clusters: Clusters | None) -> int:
    return cdiv(count, TILE) if clusters is None else clusters.owners.shape[0]


def in_parts(values: Tensor, count: int) -> Tensor:
    """(count, m, n) bfloat16: the first parts of `values (m,n)`; the values themselves where one part is all of them."""
    if count == 1:
        return values.contiguous()
    height, width = values.shape
    out = torch.empty(count, height, width, dtype=torch.bfloat16, device=values.device)
    grid = (cdiv(height * width, 1024),)
    split_kernels.split_all[grid](values, out, height * width, width, *values.stride(), COUNT=count, BLOCK=1024)
    return out


def _scaled_parts(weight: Tensor) -> int:
    """Of a weight times scales. Two have 17 bits: of a bfloat16 weight, which was rounded to 2^-9 of it, that is enough
    where the sum itself is no more exact."""
    return 2 if weight.dtype == torch.bfloat16 and weight.shape[1] >= WIDE else 3


def linear(
    tokens: Tensor,
    weight: Tensor,
    clusters: Clusters | None,
) -> Tensor:
    """`tokens (T,d)` times `weight (n,d)` transposed: (T,n), float32."""
    (count, inner), width = tokens.shape, weight.shape[0]
    out = torch.empty(count, width, dtype=torch.float32, device=tokens.device)
    parts = PARTS[weight.dtype] if clusters is None else _scaled_parts(weight)
    light = parts == PARTS[tokens.dtype] == 1
    outputs = 128 if light and width > 64 else 64  # for which tokens are read once
    split_kernels.linear[(_tiles(count, clusters), cdiv(width, outputs))](
        tokens,
        in_parts(weight, parts) if clusters is None else weight.contiguous(),
        *((tokens,) * 3 if clusters is None else (clusters.order, clusters.owners, clusters.scales)),
        out,
        count,
        inner,
        width,
        width * inner,
        1.0,
        TOKEN_PARTS=PARTS[tokens.dtype],
        WEIGHT_PARTS=parts,
        CLUSTERED=clusters is not None,
        EVEN=inner % DEPTH == 0,
        PART=PART,
        TILE=TILE,
        WIDTH=outputs,
        DEPTH=DEPTH,
        num_warps=4,
        # Few enough stages and registers that the programs of 16384 tokens all fit on a large GPU at a time.
        num_stages=4 if light else 2 if tokens.dtype == torch.float32 else 3,
        maxnreg=None if clusters is None else 168,
    )
    return out


def grad_tokens(
    grad_parts: Tensor,
    like: Tensor,
    weight: Tensor,
    clusters: Clusters | None,
    features: int | None = None,
    share: int = 512,
) -> Tensor:
    """The gradient of the logits, (T,n) in parts, times `weight (n,d)`, in the dtype of `like (T,d)`."""
    (count, inner), width = like.shape, weight.shape[0]
    out = torch.empty_like(like)
    wide = like.dtype != torch.float32
    features = features or (128 if wide else 64)
    grad_count = gradient_count(like.dtype)
    parts = min(PARTS[weight.dtype], grad_count)
    split_kernels.grad_tokens[(_tiles(count, clusters) * cdiv(inner, share),)](
        grad_parts,
        in_parts(weight, parts),
        *((out,) * 3 if clusters is None else (clusters.order, clusters.owners, clusters.scales)),
        out,
        count,
        inner,
        width,
        share,
        count * width,
        width * inner,
        1.0,
        GRAD_PARTS=grad_count,
        WEIGHT_PARTS=parts,
        CLUSTERED=clusters is not None,
        NARROW=width <= 64,
        PART=PART,
        TILE=TILE,
        WIDTH=features,
        DEPTH=64,
        num_warps=4,
        num_stages=3 if clusters is not None and wide else 2,
    )
    return out


def grad_weight(
    grad_parts: Tensor,
    tokens: Tensor,
    like: Tensor,
    clusters: Clusters | None,
) -> Tensor:
    """The gradient of the logits, (T,n) in parts, transposed times `tokens (T,d)`, in the dtype of `like (n,d)`."""
    (count, inner), width = tokens.shape, like.shape[0]
    wide = clusters is None and tokens.dtype != torch.float32
    features, programs = (128, 256) if wide else (64, 512)
    across, up = cdiv(inner, features), cdiv(width, 64)
    splits = max(1, min(programs // (across * up), cdiv(count, 4 * TILE)))
    out = torch.empty(splits, width, inner, dtype=torch.float32, device=tokens.device)
    split_kernels.grad_weight[(across, up, splits)](
        grad_parts,
        tokens,
        *(clusters or (out,) * 4),
        out,
        count,
        0 if clusters is None else clusters.bounds.shape[0] - 1,
        inner,
        width,
        count * width,
        1.0,
        GRAD_PARTS=gradient_count(like.dtype),
        TOKEN_PARTS=PARTS[tokens.dtype],
        CLUSTERED=clusters is not None,
        PART=PART,
        TILE=TILE,
        HEIGHT=64,
        WIDTH=features,
        num_warps=4,
        num_stages=2 if tokens.dtype == torch.float32 else 3,
    )
    total = torch.empty(width, inner, dtype=like.dtype, device=tokens.device)
    split_kernels.fold[(cdiv(width * inner, 1024),)](out, total, splits, width * inner, BLOCK=1024)
    return total


def gradient_count(out: torch.dtype) -> int:
    """Of parts of the gradient of the logits that one of dtype `out` is made of."""
    return 3 if out == torch.float32 else 2


def gradient_parts(grad: Tensor, *likes: Tensor) -> Tensor:
    """`grad (T,n)` in as many parts as gradients of tensors like these need."""
    return in_parts(grad, max(gradient_count(like.dtype) for like in likes))
