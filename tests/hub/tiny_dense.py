"""Tiny random models of every dense family, and something to feed them."""

from typing import Any

import torch
import transformers

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "qwen3": {**TEXT, "head_dim": 8},
    "phi3": TEXT,
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bert": {**TEXT, "num_key_value_heads": None},
    "vit": {**VISION, "num_attention_heads": 4, "num_labels": 5},
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": 5,
    },
    "siglip": {
        "text_config": {**TOWER, "vocab_size": 96, "max_position_embeddings": 16, "projection_size": 32},
        "vision_config": {**TOWER, "image_size": 16, "patch_size": 4},
    },
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
    "siglip": "SiglipModel",
}
LAYERS = {"swin": 4, "siglip": 4}  # three elsewhere


def tiny_dense(model_type: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})
    model = getattr(transformers, CLASSES[model_type])(config)
    with torch.no_grad():  # weights large enough for a wrong one to show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


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
