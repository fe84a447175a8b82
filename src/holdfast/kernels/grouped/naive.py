"""Experts and grouped products as loops: the specification of the fast versions."""

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
    """Return y_t = sum over used slots s of weight_ts * FFN_{expert_ts}(x_t)."""
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


def combine_rows(rows: Tensor, slots: Tensor, weights: Tensor, used: int) -> Tensor:
    """Return y_t = sum_s weight_ts * rows[slot_ts] over the slots that point below `used`."""
    out = torch.zeros(slots.shape[0], rows.shape[1])
    for token, its_slots in enumerate(slots.tolist()):
        for position, slot in enumerate(its_slots):
            if slot < used:
                out[token] += weights[token, position] * rows[slot].float()
    return out.to(rows.dtype)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return rows offsets[e-1] to offsets[e] times weight[e]^T; rows past the last offset are zero."""
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = rows[start:end] @ weight[expert].t()
        start = end
    return out


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of left_r right_r^T over each expert's rows: (E,n,m)."""
    products = []
    start = 0
    for end in offsets.tolist():
        products.append(left[start:end].t() @ right[start:end])
        start = end
    return torch.stack(products)
