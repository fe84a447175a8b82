"""What quantisers and offloaders leave on a model: marks that forbid saving, and weights that cannot be written."""

from typing import Any

from holdfast.kernels.quantised import is_quantised

GGUF = "gguf"


def unmark_dequantised(model: Any) -> None:
    """Drop transformers' mark of a quantised model where GGUF weights were dequantised while loading.

    The mark forbids saving and training, but the weights are ordinary numbers.
    """
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    if getattr(method, "value", method) != GGUF or any(is_quantised(weight) for weight in model.parameters()):
        return
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)


def require_writable(model: Any) -> None:
    """Raise where weights were quantised or offloaded in memory: transformers cannot write those and fails half-way."""
    if not hasattr(model, "hf_device_map") and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            "the weights were offloaded in memory (cpu_offload, disk_offload), from where they cannot be saved; save the "
            "model before offloading it, or load it with a device_map."
        )
    if getattr(model, "hf_quantizer", None) is not None:  # loaded with a quantization_config, which knows how, or says so
        return
    for name, weight in model.named_parameters():
        if is_quantised(weight):
            by = type(weight).__module__.split(".")[0]
            raise ValueError(
                f"{name} was quantised in memory ({by}), which a folder cannot hold; save the model before quantising it, "
                "and load it with a quantization_config."
            )
