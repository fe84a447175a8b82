"""Quantised weights, as the numbers that act in a forward.

Routers read a few weights outside the forward of the module that owns them (an attention's output projection), and our
experts function reads those of experts: there no quantiser's own forward dequantises them.
"""

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INT8_STEPS = 127  # a row of bitsandbytes' 8-bit weights is integers times its largest absolute value over this


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is something else than its numbers: another library's tensor class, integers or 8-bit floats."""
    return weight.dtype not in FLOATS or type(weight).__module__.split(".")[0] != "torch"


def as_float(module: Any, name: str, refusal: str) -> Tensor:
    """Return a weight of `module` as floating-point numbers, or raise where its format is not known; `refusal` ends the
    sentence."""
    weight: Any = getattr(module, name, None)
    quantised: Any = getattr(module, f"q{name}", None)  # quanto quantises in the forward until the model is frozen
    if hasattr(quantised, "dequantize"):
        weight = quantised
    if isinstance(weight, Tensor) and not is_quantised(weight):
        if weight.is_meta:
            raise ValueError(f"the weights of a {type(module).__name__} are not in memory, and {refusal}.")
        return weight
    numbers = _dequantised(module, weight) if isinstance(weight, Tensor) else None
    if numbers is None:
        kind = type(module).__name__ if not isinstance(weight, Tensor) else f"{type(module).__name__} ({_format(weight)})"
        raise ValueError(f"the weights of a {kind} are quantised, and {refusal}.")
    return numbers


def _dequantised(module: Any, weight: Any) -> Tensor | None:
    kind = type(weight).__name__
    if kind == "Params4bit":  # bitsandbytes
        from bitsandbytes.functional import dequantize_4bit

        whole: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return whole
    if kind == "Int8Params":
        scales = getattr(weight, "SCB", None)
        scales = module.state.SCB if scales is None else scales  # the first forward moves them there
        if weight.dtype in FLOATS:  # not quantised yet
            return weight.data.as_subclass(Tensor)
        return None if scales is None else weight.data.float() * (scales.float() / INT8_STEPS).unsqueeze(1)
    if type(weight).dequantize is not Tensor.dequantize:  # torchao, quanto
        numbers: Tensor = weight.dequantize()
        return numbers
    return None


def _format(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")
