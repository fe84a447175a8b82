"""A tiny random model of every MoE family, built from its config: nothing is downloaded."""

from typing import Any

import family_models
import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        **DEEPSEEK,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**DEEPSEEK, "head_dim": 8, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8},
    "phimoe": {"num_local_experts": 8},
    "granitemoe": {"num_local_experts": 8},
}
HYBRIDS: dict[str, dict[str, Any]] = {  # only the last layer has attention
    "qwen3_next": {**family_models.LINEAR, **EXTRA["qwen2_moe"], "head_dim": 8},
    "qwen3_5_moe_text": {**family_models.LINEAR, **EXTRA["qwen2_moe"], "head_dim": 8},
    "granitemoehybrid": {**family_models.MOE_MODELS["granitemoehybrid"], "num_local_experts": 8},
}
MOE_LAYERS = {"deepseek_v3": 2, "glm4_moe": 2}  # the first layer of these is dense; all three are MoE elsewhere


def tiny(model_type: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **(EXTRA | HYBRIDS)[model_type], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # several families start their routers at zero, where every token ties
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()
