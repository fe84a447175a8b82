"""The k largest entries of each row, ties to the lower index, the same on every device."""

import torch
from torch import Tensor


def ordered_keys(values: Tensor) -> Tensor:
    """int64 keys whose order is the order of the float32 `values (..., E)`, an earlier index winning a tie.

    `torch.topk` leaves the order of equal values open, and devices differ. The keys are all different: the upper half
    is the value's bits made monotone, the lower half counts the index down. NaN sorts above everything, as in torch.
    """
    experts = values.shape[-1]
    bits = (values.detach().float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    monotone = torch.where(values.isnan(), 0x7FFFFFFF, monotone).long()
    countdown = torch.arange(experts - 1, -1, -1, device=values.device)
    return monotone * 2**32 + countdown


def exported_keys(values: Tensor) -> Tensor:
    """float64 keys in the order of the float32 `values (..., E)`, an earlier index winning a tie; up to 2^17 entries.

    ONNX can neither read the bits of a number nor sort stably. A float64 has 29 bits more than a float32: each value is
    lowered by its index times 2^-42 of itself, which is less than the distance to the next float32, and a 0 by its index
    times a number that is smaller than any float32.
    """
    wide = values.detach().double().clamp(-1e300, 1e300)  # infinite ones would become NaN below
    index = torch.arange(values.shape[-1], device=values.device, dtype=torch.float64)
    return wide - (wide.abs() * 2.0**-42 + 2.0**-200) * index


def top(values: Tensor, k: int) -> Tensor:
    """Indices `(..., k)` of the k largest, descending; the lower index first among equals."""
    if torch.compiler.is_exporting():
        return exported_keys(values).topk(k, dim=-1).indices
    keys = ordered_keys(values)
    return keys.argsort(dim=-1, descending=True) if k == values.shape[-1] else keys.topk(k, dim=-1).indices
