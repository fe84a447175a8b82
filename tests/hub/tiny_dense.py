"""Tiny random models of every dense family, and something to feed them."""

from typing import Any

import family_models
import torch

THREE_LAYERS = {"num_hidden_layers": 3}
CHANGES: dict[str, dict[str, Any]] = {"gpt2": {"n_layer": 3, "bos_token_id": 1, "eos_token_id": 2}, "swin": {}, "siglip": {}}
NAMES = ("llama", "qwen3", "phi3", "gpt2", "bert", "vit", "swin", "siglip")
CLASSES = {name: family_models.DENSE_MODELS[name][0] for name in NAMES}
CONFIGS = {name: {**family_models.DENSE_MODELS[name][1], **CHANGES.get(name, THREE_LAYERS)} for name in NAMES}
LAYERS = {"swin": 4, "siglip": 4}  # three elsewhere


def tiny_dense(model_type: str, seed: int = 0, **changes: Any) -> Any:
    return family_models.tiny_dense(model_type, seed, **{**CONFIGS[model_type], **changes})


def inputs(model_type: str, seed: int = 1) -> dict[str, Any]:
    """A batch with labels, where the model takes any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    pixels = torch.randn(2, 3, *[CONFIGS[model_type].get("image_size", 16)] * 2, generator=generator)
    if model_type == "siglip":
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}
    if model_type in ("vit", "swin"):
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def outputs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What the model says about a batch, as one tensor; padding left out."""
    out = model(**batch)
    logits: torch.Tensor = out.logits_per_image if hasattr(out, "logits_per_image") else out.logits
    return logits[batch["attention_mask"].bool()] if logits.dim() == 3 and "attention_mask" in batch else logits
