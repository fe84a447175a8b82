"""Moving rows between token order and expert order, and what is done to them there: Triton on a GPU, plain torch elsewhere.

tokens (T,d); rows (R,d), sorted by expert; order (R,), the slot of each row; slots (T,K), the row of each slot, `used` or
more where a slot is unused. Rows past `used` are undefined.
"""

import torch
from torch import Tensor

from holdfast.kernels.triton_support import has_kernels, on_device_of

GLUS = ("silu", "gelu", "gelu_tanh", "relu")  # gated activations, `activation(gate) * up`, that the kernels know


def fuses(name: str | None, rows: Tensor) -> bool:
    """Is there a kernel for rows that hold gate and up side by side?"""
    return name in GLUS and has_kernels(rows)


def gather(tokens: Tensor, order: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """The token of each row."""
    if not has_kernels(tokens) or order.shape[0] == 0:
        return tokens.index_select(0, order // max(slots.shape[1], 1))
    from holdfast.kernels import kernels

    with on_device_of(tokens):
        return kernels.gather(tokens, slots, used, order.shape[0])


def combine(rows: Tensor, slots: Tensor, weights: Tensor | None, used: Tensor) -> Tensor:
    """y_t = sum_s weight_ts rows[slot_ts], summed in float32, slot after slot; an unused slot adds nothing."""
    if has_kernels(slots):
        from holdfast.kernels import kernels

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


def scale_and_dot(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, slots: Tensor, used: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """weight_r grad_r, weight_r rows_r, and for each slot (T,K) grad_r . rows_r of its row, 0 if it is unused.

    A kernel writes over `grad`.
    """
    if has_kernels(rows):
        from holdfast.kernels import kernels

        with on_device_of(rows):
            return kernels.scale_and_dot(grad, rows, weights, order, used)
    scale = weights.flatten()[order].unsqueeze(1)
    dots = (grad.float() * rows.float()).sum(1)
    return (grad * scale).to(grad.dtype), (rows * scale).to(rows.dtype), _to_slots(dots, slots, used)


def _to_slots(values: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """A value per row as a value per slot (T,K), 0 in unused slots."""
    if values.shape[0] == 0:
        return values.new_zeros(slots.shape)
    in_use = slots < used
    return values[slots.where(in_use, 0)].where(in_use, 0.0)


def glu(gate_up: Tensor, used: Tensor, name: str) -> Tensor:
    """activation(gate) * up of rows (R,2H): (R,H)."""
    from holdfast.kernels import kernels

    with on_device_of(gate_up):
        return kernels.glu(gate_up, used, name)


def glu_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor, slots: Tensor, used: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """With h = glu(gate_up): the gradient of gate_up from that of h, weight_r grad_r; weight_r h_r; grad_r . h_r by slot.

    It writes over `grad`.
    """
    from holdfast.kernels import kernels

    with on_device_of(grad):
        return kernels.glu_backward(grad, gate_up, weights, order, used, name)
