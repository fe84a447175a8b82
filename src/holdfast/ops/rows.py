"""Moving rows between token order and expert order: Triton on a GPU, plain torch elsewhere.

tokens (T,d); rows (R,d), sorted by expert; slots (T,K), the row of each slot, `used` or more where a slot is unused
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels if `tensor` lives where they run, else None."""
    if not (HAS_TRITON and tensor.is_cuda):
        return None
    from holdfast.ops import kernels

    return kernels


def gather(tokens: Tensor, index: Tensor, used: Tensor) -> Tensor:
    """The token of each row. Rows past `used` are undefined."""
    kernels = kernels_for(tokens)
    if kernels is None or index.shape[0] == 0:
        return tokens.index_select(0, index)
    with torch.cuda.device(tokens.device):
        out: Tensor = kernels.gather(tokens, index, used)
    return out


def combine(rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor) -> Tensor:
    """y_t = sum_s weight_ts rows[slot_ts], summed in float32, slot after slot; an unused slot adds nothing."""
    kernels = kernels_for(rows)
    if kernels is not None and slots.numel() > 0:
        with torch.cuda.device(rows.device):
            out: Tensor = kernels.combine(rows, slots, weights, used)
        return out
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
    kernels = kernels_for(rows)
    if kernels is not None and rows.numel() > 0:
        with torch.cuda.device(rows.device):
            out: tuple[Tensor, Tensor, Tensor] = kernels.scale_and_dot(grad, rows, weights, used)
        return out
    scale = weights.unsqueeze(1)
    dots = (grad.float() * rows.float()).sum(1)
    return (grad * scale).to(grad.dtype), (rows * scale).to(rows.dtype), dots
