"""The output projection of an attention, in the shape of an `nn.Linear`, whatever module it is.

The weight is that of the layer's forward: read through accelerate's hooks where it is offloaded, dequantised where it is
quantised, and with the adapters that are in force.
"""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.quantised import as_float, is_quantised
from holdfast.routing.offload import loaded
from holdfast.routing.records import Projection

INSTEAD = "use 'similarity', which reads no weights"


def as_linear(module: Any) -> nn.Linear | Projection:
    """Return the projection as weight and bias of a linear map; raise where its kind is not known.

    GPT-2's keep their weights transposed. PEFT's LoRA and DoRA change the weight of the layer that they wrap.
    """
    if type(module) is nn.Linear and not (module.weight.is_meta or is_quantised(module.weight)):
        return module
    with loaded(module):
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight = as_float(base, "weight", f"the attention router cannot read them; {INSTEAD}")
        if weight.is_meta:
            raise ValueError(
                f"the output projection's weights, which the attention router reads, are not in memory; {INSTEAD}."
            )

        weight = weight.t() if _is_transposed(base) else weight
        if base is module:
            return Projection(weight, base.bias)
        return _with_adapters(module, weight, base.bias)


def _is_transposed(base: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(base, Conv1D)


def _with_adapters(module: Any, weight: Tensor, bias: Tensor | None) -> Projection:
    """Return what the adapters in force make of the base layer's `weight (d,in)` and bias."""
    if module.disable_adapters or module.merged:
        return Projection(weight, bias)
    if not hasattr(module, "lora_A"):
        raise _unreadable(_kind(module))
    changed = weight
    for name in module.active_adapters:
        if name in module.lora_A:
            changed = changed + _change(module, name, weight)
            added = getattr(module.lora_B[name], "bias", None)  # LoraConfig(lora_bias=True)
            if added is not None:
                added = added * module.scaling[name]
                bias = added if bias is None else bias + added
    return Projection(changed, bias)


def _change(module: Any, name: str, weight: Tensor) -> Tensor:
    """Return what one adapter adds to `weight (d,in)`."""
    delta: Tensor = module.get_delta_weight(name)
    if getattr(module, "fan_in_fan_out", False):
        delta = delta.t()
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is None:
        return delta
    if type(variant).__name__ != "DoraLinearVariant":
        raise _unreadable(type(variant).__name__.removesuffix("LinearVariant"))
    # DoRA learns the length of each row; no gradient flows through the length that it had (section 4.3 of the paper).
    length = torch.linalg.vector_norm(weight + delta, dim=1).detach()
    factor = (module.lora_magnitude_vector[name].weight / length).unsqueeze(1)
    return (factor - 1) * weight + factor * delta


def _kind(module: Any) -> str:
    """Return the name of the method: PEFT keeps a package for each."""
    steps = type(module).__module__.split(".")
    return steps[2] if steps[:2] == ["peft", "tuners"] and len(steps) > 2 else type(module).__name__


def _unreadable(kind: str) -> ValueError:
    return ValueError(
        f"the attention router cannot read an adapter of kind {kind} on the output projection; merge it (merge_adapter), "
        f"leave that layer out of target_modules, or {INSTEAD}."
    )
