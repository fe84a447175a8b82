"""What routers read from attention: the entropy of its weights, one head of many, and norms of projected values.

    B sequences, H heads, N queries, M keys, D width of a head, d width of the model

Weights, and the keys that a query may attend to, are those of kernels/token_mixing. On a GPU Triton kernels do the work.
They are compared with the PyTorch code here, which runs elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.fp32_linear import HALF_DTYPES, ieee_float32, linear_float32, matmul_float32
from holdfast.kernels.operators import HAS_TRITON, has_kernels, is_differentiated, on_device_of, on_gpu, operator
from holdfast.kernels.token_mixing.blocks import ScoreTerms, expanded_mask, finite_or_zero, query_blocks, sampled_count
from holdfast.kernels.token_mixing.blocks import sampled as sampled
from holdfast.kernels.torch_internals import is_exporting

WIDEST_VALUE = 256  # columns of v that fit into a tile of the kernel for norms


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
    """Return the entropy in nats of each query's weights, (B,H,N), without gradient; 0 for a query that attends to nothing.

    step    more than 1: only the queries of the `sampled` blocks, (B,H,n)
    """
    return _attention_entropy(query.detach(), key.detach(), real, mask, causal, scale, step)


def _attention_entropy_anywhere(
    query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float, step: int
) -> Tensor:
    if HAS_TRITON and query.is_cuda:
        from holdfast.kernels.attention import triton

        if triton.supports_entropy(query, key, scale):
            with on_device_of(query):
                return triton.entropy(query, key, real, mask, causal, scale, step)
    if step == 1:
        return _entropies(query, key, real, mask, causal, scale)
    found = []
    for rows in sampled(query.shape[2], step):
        keys = slice(0, key.shape[2] - query.shape[2] + rows.stop if causal else key.shape[2])
        part = None if mask is None else mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
        seen = None if real is None else real[:, keys]
        found.append(_entropies(query[:, :, rows], key[:, :, keys], seen, part, causal, scale))
    return torch.cat(found, 2)


_attention_entropy = operator(
    "attention_entropy(Tensor query, Tensor key, Tensor? real, Tensor? mask, bool causal, float scale, int step) -> Tensor",
    _attention_entropy_anywhere,
    lambda query, *rest: query.new_empty(*query.shape[:2], sampled_count(query.shape[2], rest[-1]), dtype=torch.float32),
)


def _entropies(query: Tensor, key: Tensor, real: Tensor | None, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    heads, key_heads = query.shape[1], key.shape[1]
    entropy = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for head in range(heads):  # one at a time: a mask expanded to all heads would be a copy of N x N for each
        own, shared = query[:, head], key[:, head * key_heads // heads]
        part = None if mask is None else mask[:, head if mask.shape[1] > 1 else 0]
        part = expanded_mask(part, own, shared)
        terms = ScoreTerms(own, shared, None, None, None, real, part, None, None, causal, scale, 0.0).prepared()
        with ieee_float32():
            for rows, columns in query_blocks(own, shared, causal):
                scores = terms.scores(rows, columns)
                log_weights = scores.sub_(finite_or_zero(scores.logsumexp(-1, keepdim=True)))
                entropy[:, head, rows] = -(log_weights.exp() * finite_or_zero(log_weights)).sum(-1)
    return entropy


def take_heads(rows: Sequence[Tensor], head: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return, for each of `rows (B, its heads, N, D)`, (B,N,D): the head that head number `head (1,)` of `heads` reads.

    Where rows have fewer heads than `heads`, each of theirs is read by a group of neighbouring heads. The index stays on the
    device; on a GPU one launch copies from all rows.
    """
    if is_exporting():
        return tuple(_index_heads(rows, head, heads))
    return _TakeHeads.apply(head, heads, *rows)


class _TakeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, heads, *rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(head)
        ctx.heads, ctx.own = heads, [each.shape[1] for each in rows]
        return tuple(_take_heads(rows, head, heads))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        (head,) = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        put_head = _place_head if is_differentiated() else _put_head
        put = [
            put_head(grad.contiguous(), head, ctx.heads, own) if need else None
            for grad, own, need in zip(grads, ctx.own, needs, strict=True)
        ]
        return None, None, *put


_take_heads_on_gpu, _put_head_on_gpu = on_gpu(__name__, "take_heads"), on_gpu(__name__, "put_head")


def _index_heads(rows: Sequence[Tensor], head: Tensor, heads: int) -> list[Tensor]:
    return [each.index_select(1, head * each.shape[1] // heads).squeeze(1) for each in rows]


def _place_head(rows: Tensor, head: Tensor, heads: int, own: int) -> Tensor:
    """Return (B,own,N,D): `rows (B,N,D)` as the head that head `head` of `heads` reads, 0 in the others."""
    out = rows.new_zeros(rows.shape[0], own, *rows.shape[1:])
    return out.index_copy(1, head * own // heads, rows.unsqueeze(1))


_take_heads = operator(
    "take_heads(Tensor[] rows, Tensor head, int heads) -> Tensor[]",
    lambda rows, head, heads: (
        _take_heads_on_gpu(head, rows, heads) if all(map(has_kernels, rows)) else _index_heads(rows, head, heads)
    ),
    lambda rows, head, heads: [each.new_empty(each.shape[0], *each.shape[2:]) for each in rows],
)
_put_head = operator(
    "put_head(Tensor rows, Tensor head, int heads, int own) -> Tensor",
    lambda rows, *where: (_put_head_on_gpu if has_kernels(rows) else _place_head)(rows, *where),
    lambda rows, head, heads, own: rows.new_empty(rows.shape[0], own, *rows.shape[1:]),
)


def projected_norms(value: Tensor, across: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Return |heads W v + bias|^2 of many values v, (T,) float32; gradients in the dtypes of the inputs.

    v (T,D), W (d,D) given as `across (D,d)`, bias (d,) or None. The projected vectors, as wide as the model, are never
    stored: W^T W, which is D x D, gives their norms; on a GPU, for half-precision numbers, a kernel squares them as it
    computes them.
    """
    is_half = value.dtype in HALF_DTYPES and value.dtype == across.dtype
    if is_half and value.shape[1] <= WIDEST_VALUE and has_kernels(value):
        return _ProjectedNorms.apply(value, across, bias, heads)
    products = heads**2 * linear_float32(value, linear_float32(across, across))
    if bias is not None:
        products = products + 2 * heads * linear_float32(bias.unsqueeze(0), across)
    norms = (products * value).sum(-1)
    return norms if bias is None else norms + bias.float().square().sum()


class _ProjectedNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, across, bias, heads):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(value, across, bias)
        ctx.heads = heads
        return _projected_norms(value, across, bias, heads)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """With o = heads W v + bias: the gradients of v, W and bias are 2 g heads W^T o, 2 g heads o v^T and 2 g o."""
        value, across, bias = ctx.saved_tensors
        wants_value, wants_across, wants_bias, _ = ctx.needs_input_grad
        of_value = of_across = of_bias = None
        weighted = 2 * ctx.heads * grad.unsqueeze(1) * value.float()  # (T,D)
        if wants_value:
            seen = ctx.heads * linear_float32(value, linear_float32(across, across))
            seen = seen if bias is None else seen + linear_float32(bias.unsqueeze(0), across)
            of_value = (2 * ctx.heads * grad.unsqueeze(1) * seen).to(value.dtype)
        if wants_across:
            of_across = matmul_float32(ctx.heads * matmul_float32(weighted.t(), value), across)
            of_across = of_across if bias is None else of_across + weighted.sum(0).unsqueeze(1) * bias.float()
            of_across = of_across.to(across.dtype)
        if wants_bias:
            of_bias = matmul_float32(weighted.sum(0).unsqueeze(0), across).squeeze(0) + 2 * grad.sum() * bias.float()
            of_bias = of_bias.to(bias.dtype)
        return of_value, of_across, of_bias, None


_projected_norms = operator(
    "projected_norms(Tensor value, Tensor across, Tensor? bias, int heads) -> Tensor",
    on_gpu(__name__, "projected_norms"),
    lambda value, *_: value.new_empty(value.shape[0], dtype=torch.float32),
)
