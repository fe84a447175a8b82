"""Moving rows between token order and expert order: Triton on a GPU, plain torch elsewhere.

tokens (T,d); rows (R,d), sorted by expert; slots (T,K), the row of each slot, `used` or more where a slot is unused
"""

import torch
from torch import Tensor

from holdfast.ops.triton_support import HAS_TRITON, on_device_of


def gather(tokens: Tensor, index: Tensor, used: Tensor) -> Tensor:
    """The token of each row. Rows past `used` are undefined."""
    if not (HAS_TRITON and tokens.is_cuda) or index.shape[0] == 0:
        return tokens.index_select(0, index)
    from holdfast.ops import kernels

    with on_device_of(tokens):
        return kernels.gather(tokens, index, used)


def combine(rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor) -> Tensor:
    """y_t = sum_s weight_ts rows[slot_ts], summed in float32, slot after slot; an unused slot adds nothing."""
    if HAS_TRITON and rows.is_cuda and slots.numel() > 0:
        from holdfast.ops import kernels

        with on_device_of(rows):
            return kernels.combine(rows, slots, weights, used)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    in_use = slots < used
    for slot in range(slots.shape[1]):
        if not in_use[:, slot].any():
            continue
        if in_use[:, slot].all():
            values = rows.index_select(0, slots[:, slot]).float()
        else:
            padded = slots[:, slot].where(in_use[:, slot], 0)
            values = rows.index_select(0, padded).float().masked_fill_(~in_use[:, slot, None], 0.0)
        if weights is None:
            total += values
        else:
            total.addcmul_(values, weights[:, slot, None])
    return total.to(rows.dtype)


def scale_and_dot(grad: Tensor, rows: Tensor, weights: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight_r grad_r, weight_r rows_r and grad_r . rows_r in one pass. Rows past `used` are undefined."""
    if HAS_TRITON and rows.is_cuda and rows.numel() > 0:
        from holdfast.ops import kernels

        with on_device_of(rows):
            return kernels.scale_and_dot(grad, rows, weights, used)
    scale = weights.unsqueeze(1)
    dots = (grad.float() * rows.float()).sum(1)
    return (grad * scale).to(grad.dtype), (rows * scale).to(rows.dtype), dots
