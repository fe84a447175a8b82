"""A tiny random model of every MoE family of transformers, built from its config: nothing is downloaded."""

import warnings
from typing import Any

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
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 4}  # attention with latent keys: `head_dim` is that of rotary positions
LINEAR = {
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
DELTA = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**TOWER, "image_size": 16, "patch_size": 4}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}

# By the folder in transformers: the config entries that differ from SMALL; None leaves one out.
MOE_MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria": {"moe_num_experts": 8, "moe_topk": 2},
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {},
    "beam": {**SPARSE, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "cohere2_moe": {},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "deepseek_ocr2": {**SPARSE, "num_key_value_heads": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 16},
    "deepseek_v4": {},
    "diffusion_gemma": {"top_k_experts": 2, "per_layer_config": {}},
    "dots1": {},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 16],
        "moe_num_experts": 8,
        "moe_k": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "gemma4": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "per_layer_config": {},
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "mrope_section": [1, 1, 2],
        }
    },
    "glm5_next": {
        **DELTA,
        **SPARSE,
        "num_key_value_heads": 4,
        "head_dim": 0,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 8,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "indexer_types": ["full", "full", "full"],
    },
    "glm_moe_dsa": {**LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 16},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention"],
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 2,
        "mamba_chunk_size": 4,
    },
    "granitemoeshared": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "hy_v3": {},
    "hy_v4": {},
    "inkling": {},
    "jamba": {},
    "jetmoe": {},
    "kimi_linear": {**LATENT, **DELTA, **SPARSE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {},
    "longcat_flash": {**LATENT, "num_layers": 2, "moe_topk": 2, "zero_expert_num": 2, "ffn_hidden_size": 16},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "mistral4": LATENT,
    "mistral_large4": {
        "text_config": {
            name: value
            for name, value in {**SMALL, **LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 16}.items()
            if name not in ("num_experts", "num_local_experts", "shared_expert_intermediate_size", "num_shared_experts")
        },
        "vision_config": {**VISION, "head_dim": 8},
    },
    "mixtral": {},
    "muse_spark": {},
    "nemotron_h": {},
    "nllb_moe": {"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    "olmoe": {},
    "openai_privacy_filter": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": LINEAR,
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "qwen3_omni_moe": {},
    "qwen3_vl_moe": {},
    "qwen4_exp": {
        **LINEAR,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "solar_open": {},
    "step3p7": {**SPARSE, "share_expert_dim": 16, "sliding_window": 8, "layer_types": ["full_attention"] * 3},
    "switch_transformers": {"d_model": 32, "d_kv": 8, "d_ff": 16, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 4},
    "unlimited_ocr": {**SPARSE, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
MODEL_TYPES = {"nllb_moe": "nllb-moe", "step3p7": "step3p5", "mistral_large4": "mistral_large4"}  # if not FOLDER(_text)
CLASSES = {  # that no Auto class knows
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "step3p7": "Step3p7TextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
}


def is_installed(folder: str) -> bool:
    """Whether this version of transformers has the family."""
    return model_type(folder) in transformers.CONFIG_MAPPING


def model_type(folder: str) -> str:
    """Return the model type of the family's text model."""
    text = f"{folder}_text" if f"{folder}_text" in transformers.CONFIG_MAPPING else folder
    return MODEL_TYPES.get(folder, text)


def tiny_moe(folder: str, seed: int = 0) -> Any:
    """Return a model with three layers, of which at least one is an MoE layer, in evaluation mode."""
    kind = transformers.CONFIG_MAPPING[model_type(folder)]
    known = kind()
    values = {name: value for name, value in SMALL.items() if _has(known, name)}
    values = {**values, **MOE_MODELS[folder]}
    config = kind(**values)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model_class(folder, config)(config)
    with torch.no_grad():  # several families start their routers at zero, where every token ties
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # configs whose entries differ between layers raise errors of their own
        return True


def _model_class(folder: str, config: Any) -> Any:
    if folder in CLASSES:
        module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["*"])
        return getattr(module, CLASSES[folder])
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"no Auto class has {folder}.")


TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {**TEXT, "num_key_value_heads": None}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
TRANSLATION = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

DENSE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # by model type: the class, and the config
    "llama": ("LlamaForCausalLM", TEXT),
    "qwen3": ("Qwen3ForCausalLM", {**TEXT, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", TEXT),
    "qwen2": ("Qwen2ForCausalLM", TEXT),
    "gemma": ("GemmaForCausalLM", {**TEXT, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**TEXT, "head_dim": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", {**TEXT, "head_dim": 8}),
    "phi": ("PhiForCausalLM", TEXT),
    "phi3": ("Phi3ForCausalLM", TEXT),
    "olmo2": ("Olmo2ForCausalLM", TEXT),
    "smollm3": ("SmolLM3ForCausalLM", TEXT),
    "granite": ("GraniteForCausalLM", TEXT),
    "cohere": ("CohereForCausalLM", TEXT),
    "stablelm": ("StableLmForCausalLM", TEXT),
    "falcon": ("FalconForCausalLM", {**TEXT, "ffn_hidden_size": 48}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "gptj": (
        "GPTJForCausalLM",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    ),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ENCODER),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "modernbert": ("ModernBertForMaskedLM", ENCODER),
    "deberta-v2": ("DebertaV2ForMaskedLM", ENCODER),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "mpnet": ("MPNetForMaskedLM", ENCODER),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": ("BartForConditionalGeneration", {**TRANSLATION, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**TRANSLATION, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    "vit": ("ViTForImageClassification", {**VISION, "num_labels": 5}),
    "deit": ("DeiTForImageClassification", {**VISION, "num_labels": 5}),
    "swin": ("SwinForImageClassification", {**WINDOWS, "num_labels": 5}),
    "swinv2": ("Swinv2ForImageClassification", {**WINDOWS, "num_labels": 5}),
    "dinov2": ("Dinov2ForImageClassification", {**VISION, "num_labels": 5}),
    "siglip": (
        "SiglipModel",
        {
            "text_config": {**TOWER, "vocab_size": 96, "max_position_embeddings": 16, "projection_size": 32},
            "vision_config": VISION,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**TOWER, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 16,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **TOWER,
            "vocab_size": 32,
            "conv_dim": [16, 16],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
    ),
}
SPEECH = ("wav2vec2", "whisper")


def tiny_dense(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Return a dense model with two layers (in each part of it), in evaluation mode."""
    name, values = DENSE_MODELS[model_type]
    torch.manual_seed(seed)
    model: Any = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **{**values, **changes}))
    with torch.no_grad():  # weights large enough for a wrong one to show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def dense_inputs(model_type: str) -> dict[str, Any]:
    """Return a batch with labels where the model takes any; texts have padding."""
    generator = torch.Generator().manual_seed(1)
    values = DENSE_MODELS[model_type][1]
    ids = torch.randint(3, 96, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if model_type == "wav2vec2":
        return {"input_values": torch.randn(2, 320, generator=generator), "labels": torch.randint(3, 32, (2, 4))}
    if model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": labels}
    if "image_size" in values or "vision_config" in values:
        pixels = torch.randn(2, 3, *[values.get("image_size", 16)] * 2, generator=generator)
        if "vision_config" in values:
            return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
