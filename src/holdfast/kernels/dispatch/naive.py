"""Combining rows as a loop: the specification of the fast version."""

import torch
from torch import Tensor


def combine(rows: Tensor, slots: Tensor, weights: Tensor, used: int) -> Tensor:
    """Return y_t = sum_s weight_ts * rows[slot_ts] over the slots that point below `used`."""
    out = torch.zeros(slots.shape[0], rows.shape[1])
    for token, its_slots in enumerate(slots.tolist()):
        for position, slot in enumerate(its_slots):
            if slot < used:
                out[token] += weights[token, position] * rows[slot].float()
    return out.to(rows.dtype)
