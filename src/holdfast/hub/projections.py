"""The output projection of an attention, in the shape of an `nn.Linear`, whatever module it is."""

from typing import Any

from torch import Tensor, nn

from holdfast.routing.records import Projection


def as_linear(module: Any) -> nn.Linear | Projection | None:
    """GPT-2's keep their weights transposed; an adapter (PEFT's LoRA) adds to those that it wraps. None: no such shape."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module
    base, weight = module, module.weight
    if hasattr(module, "get_base_layer"):
        added = _added(module)
        if added is None:
            return None
        base, weight = module.get_base_layer(), weight + added
    return Projection(weight.t() if isinstance(base, Conv1D) else weight, base.bias)


def _added(module: Any) -> Tensor | int | None:
    """What the adapters in force add to the weight; None where they do something else than add (DoRA)."""
    if module.disable_adapters or module.merged:
        return 0
    if not hasattr(module, "lora_A"):
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if any(name in getattr(module, "lora_variant", {}) for name in active):
        return None
    added: Tensor | int = sum(module.get_delta_weight(name) for name in active)
    return added
