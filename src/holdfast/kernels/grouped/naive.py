"""Experts and grouped products as loops: the specification of the fast versions."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    tokens: Tensor,  # (T,d)
    chosen: Tensor,  # (T,K), the value E marks an unused slot
    weights: Tensor,  # (T,K)
    up: Tensor,  # (E,2H,d) when gated, else (E,H,d)
    down: Tensor,  # (E,out,H)
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    gated: bool,
) -> Tensor:
    """Return y_t = sum over used slots s of weight_ts * FFN_{expert_ts}(x_t)."""
    outputs = []
    for token, its_experts, its_weights in zip(tokens, chosen.tolist(), weights, strict=True):
        total = torch.zeros(down.shape[1])
        for slot, expert in enumerate(its_experts):
            if expert == up.shape[0]:
                continue
            hidden = F.linear(token, up[expert], None if up_bias is None else up_bias[expert])
            gate, factor = hidden.chunk(2) if gated else (hidden, 1.0)
            output = F.linear(activation(gate) * factor, down[expert], None if down_bias is None else down_bias[expert])
            total = total + its_weights[slot].float() * output.float()
        outputs.append(total.to(token.dtype))
    return torch.stack(outputs) if outputs else tokens.new_zeros(len(tokens), down.shape[1])


def combine_rows(rows: Tensor, slots: Tensor, weights: Tensor, used: int) -> Tensor:
    """Return y_t = sum_s weight_ts * rows[slot_ts] over the slots that point below `used`."""
    values = torch.cat([rows[:used].float(), torch.zeros(1, rows.shape[1])])[slots.clamp_max(used)]
    return (values * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return rows offsets[e-1] to offsets[e] times weight[e]^T; rows past the last offset are zero."""
    *owned, unused = rows.tensor_split(offsets.tolist())
    products = [part @ matrix.t() for part, matrix in zip(owned, weight, strict=True)]
    return torch.cat([*products, unused.new_zeros(unused.shape[0], weight.shape[1])])


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of left_r right_r^T over each expert's rows: (E,n,m)."""
    ends = offsets.tolist()
    pairs = zip(left.tensor_split(ends)[:-1], right.tensor_split(ends)[:-1], strict=True)
    return torch.stack([one.t() @ other for one, other in pairs])
