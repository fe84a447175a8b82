"""What quantisers leave on a model: marks of weights that are numbers again, and weights that no file can hold."""

from typing import Any

from holdfast.ops.quantised import is_quantised

GGUF = "gguf"


def unmark_dequantised(model: Any) -> None:
    """Drop transformers' mark of a quantised model where GGUF weights were dequantised while loading.

    The mark forbids saving and training, but the weights are ordinary numbers.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if str(getattr(method, "value", method)) != GGUF or any(is_quantised(weight) for weight in model.parameters()):
        return
    quantizer.remove_quantization_config(model)  # type: ignore[union-attr]


def require_writable(model: Any) -> None:
    """Raise where weights were quantised in memory: transformers cannot write those, and fails in the middle."""
    if getattr(model, "hf_quantizer", None) is not None:  # loaded with a quantization_config, which knows how, or says so
        return
    for name, weight in model.named_parameters():
        if is_quantised(weight):
            by = type(weight).__module__.split(".")[0]
            raise ValueError(
                f"{name} was quantised in memory ({by}), which a folder cannot hold; save the model before quantising it, "
                "and load it with a quantization_config."
            )
