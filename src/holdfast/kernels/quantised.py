"""Quantised weights as floating-point numbers.

Routers read a few weights outside the forward of the module that owns them (an attention's output projection), and our
experts function reads those of experts. There the quantiser's own forward does not run, which would dequantise them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.torch_internals import constant_when_compiled

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INT8_STEPS = 127  # a row of bitsandbytes' 8-bit weights is integers times its largest absolute value over this


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight does not hold plain numbers: another library's tensor class, integers or 8-bit floats."""
    kind = type(weight)
    if kind is Tensor or kind is nn.Parameter:
        return weight.dtype not in FLOATS
    return weight.dtype not in FLOATS or not _is_of_torch(kind)


@constant_when_compiled
def _is_of_torch(kind: type) -> bool:
    """Return whether a class of tensors is PyTorch's own (DTensor, fake tensors): those are read as plain tensors."""
    return kind.__module__.split(".")[0] == "torch"


def as_float(module: Any, name: str, refusal: str) -> Tensor:
    """Return a weight of `module` as floating-point numbers; raise a ValueError that ends with `refusal` if its format is
    not known."""
    weight: Any = getattr(module, name, None)
    quantised: Any = getattr(module, f"q{name}", None)  # quanto quantises in the forward until the model is frozen
    if hasattr(quantised, "dequantize"):
        weight = quantised
    if isinstance(weight, Tensor) and not is_quantised(weight):
        return weight
    numbers = _dequantised(module, weight) if isinstance(weight, Tensor) else None
    if numbers is None:
        dtype = f" ({str(weight.dtype).removeprefix('torch.')})" if isinstance(weight, Tensor) else ""
        raise ValueError(f"the weights of a {type(module).__name__}{dtype} are quantised, and {refusal}.")
    return numbers


def _dequantised(module: Any, weight: Any) -> Tensor | None:
    kind = type(weight).__name__
    if kind == "Params4bit":
        import bitsandbytes

        state = weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):  # only its product can read this order: multiply the identity
            identity = torch.eye(state.shape[1], dtype=state.dtype, device=weight.device)
            return bitsandbytes.matmul_4bit(identity, weight.data, quant_state=state).t()
        return bitsandbytes.functional.dequantize_4bit(weight.data, state)
    if kind == "Int8Params":
        scales = getattr(weight, "SCB", None)
        scales = module.state.SCB if scales is None else scales  # the first forward moves them there
        if weight.dtype in FLOATS:  # not quantised yet
            return weight.data.as_subclass(Tensor)
        return None if scales is None else weight.data.float() * (scales.float() / INT8_STEPS).unsqueeze(1)
    if type(weight).dequantize is not Tensor.dequantize:  # torchao, quanto
        return weight.dequantize()
    return None
