"""Tiny random vision-language models: LLaVA with several towers and language models, Qwen2.5-VL and SmolVLM."""

from typing import Any

import torch
import transformers

IMAGE, PARTS = 90, ("vision", "connector", "language")  # the id of an image token
TOWERS = {
    "siglip": transformers.SiglipVisionConfig,
    "clip": transformers.CLIPVisionConfig,
    "vit": transformers.ViTConfig,
    "dinov2": transformers.Dinov2Config,
    "pixtral": transformers.PixtralVisionConfig,
}
TEXTS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "phi3": transformers.Phi3Config,
    "phi": transformers.PhiConfig,
    "mistral": transformers.MistralConfig,
    "gemma2": transformers.Gemma2Config,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_EXPERTS = {"mixtral": {"num_local_experts": 4}, "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16}}
QWEN = {
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
    },
    "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


def llava(tower: str = "siglip", text: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """LLaVA; the images have 4 x 4 patches."""
    entries = {**TEXT, **OF_EXPERTS.get(text, {})}
    config = transformers.LlavaConfig(
        vision_config=TOWERS[tower](**TOWER, image_size=16, patch_size=4),
        text_config=TEXTS[text](**entries),
        image_seq_length=16,
        **{
            "image_token_id": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full"
            if tower == "siglip"
            else "default",  # the first token of others is no patch
            **changes,
        },
    )
    return with_weights(transformers.LlavaForConditionalGeneration, config, seed)


def qwen(*, seed: int = 0) -> Any:
    config = transformers.Qwen2_5_VLConfig(**QWEN)
    return with_weights(transformers.Qwen2_5_VLForConditionalGeneration, config, seed)


def smolvlm(*, seed: int = 0) -> Any:
    config = transformers.SmolVLMConfig(
        vision_config={**TOWER, "image_size": 16, "patch_size": 4},
        text_config={**TEXT, "model_type": "llama"},
        scale_factor=2,
        image_token_id=IMAGE,
    )
    return with_weights(transformers.SmolVLMForConditionalGeneration, config, seed)


def with_weights(kind: Any, config: Any, seed: int) -> Any:
    """A model with weights that are large enough for a wrong one to show, in evaluation mode."""
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def batch(family: str = "llava", seed: int = 1) -> dict[str, Any]:
    """Two texts of different lengths, each with an image; those of Qwen2.5-VL and SmolVLM have different sizes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    if family == "qwen":
        sizes = [(4, 8), (8, 4)]  # in patches; four of them become one token
        ids[0, 3], ids[0, 4:12], ids[0, 12] = 92, IMAGE, 93
        ids[1, 4], ids[1, 5:13], ids[1, 13] = 92, IMAGE, 93
        given = {
            "pixel_values": torch.randn(sum(h * w for h, w in sizes), 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": torch.tensor([[1, h, w] for h, w in sizes]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    elif family == "smolvlm":
        ids[0, 4:8], ids[1, 5:9] = IMAGE, IMAGE
        pixels = torch.randn(2, 1, 3, 16, 16, generator=generator)
        real = torch.ones(2, 1, 16, 16, dtype=torch.bool)
        real[1, :, 8:], real[1, :, :, 12:] = False, False  # the second image is smaller
        given = {"pixel_values": pixels * real.unsqueeze(2), "pixel_attention_mask": real}
    else:
        ids[0, 4:20], ids[1, 5:21] = IMAGE, IMAGE
        given = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids[0, :2], mask[0, :2] = 0, 0  # padding on the left
    return {"input_ids": ids, "attention_mask": mask, **given}
