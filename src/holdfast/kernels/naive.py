"""The mathematics, as plain as it can be said: loops and whole matrices. The reference, never the fast path."""

from collections.abc import Callable

import torch
from torch import Tensor


def experts(
    tokens: Tensor,  # (T,d)
    chosen: Tensor,  # (T,K), the value E marks an unused slot
    weights: Tensor,  # (T,K)
    up: Tensor,  # (E,2H,d) when gated, else (E,H,d)
    down: Tensor,  # (E,d,H)
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    gated: bool,
) -> Tensor:
    """y_t = sum over used slots s of weight_ts * FFN_{expert_ts}(x_t)."""
    outputs = []
    for token, its_experts, its_weights in zip(tokens, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(token, dtype=torch.float32)
        for slot, expert in enumerate(its_experts):
            if expert == up.shape[0]:
                continue
            hidden = up[expert] @ token
            if up_bias is not None:
                hidden = hidden + up_bias[expert]
            if gated:
                gate, linear = hidden.chunk(2)
                hidden = activation(gate) * linear
            else:
                hidden = activation(hidden)
            output = down[expert] @ hidden
            if down_bias is not None:
                output = output + down_bias[expert]
            total = total + its_weights[slot].float() * output.float()
        outputs.append(total.to(token.dtype))
    return torch.stack(outputs) if outputs else tokens.new_zeros(tokens.shape)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows offsets[e-1] to offsets[e] times weight[e]^T; rows past the last offset are zero."""
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = rows[start:end] @ weight[expert].t()
        start = end
    return out


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The sum of left_r right_r^T over each expert's rows: (E,n,m)."""
    products = []
    start = 0
    for end in offsets.tolist():
        products.append(left[start:end].t() @ right[start:end])
        start = end
    return torch.stack(products)


def combine(rows: Tensor, slots: Tensor, weights: Tensor, used: int) -> Tensor:
    """y_t = sum_s weight_ts * rows[slot_ts] over the slots that point below `used`."""
    out = torch.zeros(slots.shape[0], rows.shape[1])
    for token, its_slots in enumerate(slots.tolist()):
        for position, slot in enumerate(its_slots):
            if slot < used:
                out[token] += weights[token, position] * rows[slot].float()
    return out.to(rows.dtype)


def top(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest, descending, the lower index first among equals, by sorting Python tuples."""
    rows = values.reshape(-1, values.shape[-1]).tolist()
    chosen = [sorted(range(len(row)), key=lambda index: (-row[index], index))[:k] for row in rows]
    return torch.tensor(chosen, dtype=torch.int64).view(*values.shape[:-1], k)


def mixing_weights(
    query: Tensor,  # (G,N,m)
    key: Tensor,  # (G,M,m)
    scale: float,
    causal: bool = False,
    real: Tensor | None = None,  # (G,M)
    mask: Tensor | None = None,  # broadcasts to (G,N,M): bool, or added
    second: tuple[Tensor, Tensor, float] | None = None,  # another product, and what it is multiplied with
    bias: Tensor | None = None,  # (G,M)
) -> Tensor:
    """(G,N,M): the softmax over the keys that each query may look at; 0 for a query that may look at none."""
    scores = scale * query @ key.transpose(1, 2)
    if second is not None:
        scores = scores + second[2] * second[0] @ second[1].transpose(1, 2)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        position = torch.arange(query.shape[1]) + key.shape[1] - query.shape[1]
        allowed = allowed & (torch.arange(key.shape[1]) <= position.unsqueeze(1))
    if real is not None:
        allowed = allowed & real.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores.masked_fill(~allowed, -1e30), -1) * allowed.any(-1, keepdim=True)
