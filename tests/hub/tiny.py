"""A tiny random model of every MoE family, built from its config: nothing is downloaded."""

from typing import Any

import family_models
import torch
import transformers


def sizes(*names: str) -> dict[str, Any]:
    return {name: family_models.SMALL[name] for name in names}


SMALL = {
    **sizes("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    **sizes("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
    **sizes("pad_token_id", "bos_token_id", "eos_token_id"),
}
GROUPED = sizes("n_routed_experts", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group")
GROUPED |= sizes("first_k_dense_replace")
LATENT = sizes("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {**GROUPED, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": {**GROUPED, "head_dim": 8},
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


def with_checkpointing(model: Any, enabled: bool = True, *, reentrant: bool = False) -> Any:
    """The model, with activation checkpointing if `enabled`."""
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model
