"""Build a model from its config on the `meta` device, without weights, and put routers into it.

The functions that change real models (`sparsify`, `reroute`) change it, so parameters and state are counted from the result.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.errors import unknown_name
from holdfast.files import read_json, require_regular
from holdfast.hub import reroute, sparsify
from holdfast.hub.convert import Layers
from holdfast.hub.families import DENSE_FAMILIES, MOE_FAMILIES
from holdfast.hub.folder_files import family_values, special_float
from holdfast.hub.model_classes import apply_specs
from holdfast.hub.specs import NATIVE, names_in_model, read_specs
from holdfast.model_size import (
    MOST_PARAMETERS,
    build_or_refuse,
    count_parameters,
    require_enough_weights,
    require_sane_numbers,
    require_sane_top_k,
    stored_bytes,
)
from holdfast.routing.presets import shared_k

CONFIG = "config.json"
RECOGNISED = (  # MoE families without a row whose planned FLOPs equal those that torch counts (tests/planning)
    "afmoe",
    "aria_text",
    "axk1",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mistral4",
    "qwen3_vl_moe_text",
    "solar_open",
)
FAMILIES = sorted({*DENSE_FAMILIES, *MOE_FAMILIES, *RECOGNISED})
UNDECLARED_SIZES = ("head_dim",)  # models read it from configs whose class does not declare it
UNSUPPORTED = {
    "siglip": "it has two towers and pools with an attention of its own",
    "siglip_text_model": "it is half of a model with two towers",
    "siglip_vision_model": "it pools with an attention of its own",
    **dict.fromkeys(("swin", "swinv2"), "its layers see different numbers of tokens"),
    **dict.fromkeys(("clip", "clip_text_model", "clip_vision_model"), "it is a model with two towers, or half of one"),
    **dict.fromkeys(("t5", "bart", "whisper"), "it has an encoder and a decoder"),
    **dict.fromkeys(("deit", "dinov2", "wav2vec2"), "the length of its sequences does not follow from its config alone"),
    **dict.fromkeys(("bloom", "deberta-v2", "mpnet"), "the sizes of its attention are not in its attention modules"),
    **{name: "it has layers without attention" for name, family in MOE_FAMILIES.items() if family.recurrent is not None},
}


def read_config(model: str, sizes: Mapping[str, Any] | None = None) -> Any:
    """Return the config of a folder, a file, a name on the hub, or a family, with its fields replaced by `sizes`.

    Only config.json is read, no weights and no code. Raise ValueError for a family that Holdfast does not support.
    """
    written = _read_description(model)
    require_sane_numbers({**written, **(sizes or {})}, model)
    description = family_values(written, model)
    model_type = description.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"the {CONFIG} of {model} has no model_type: it is not the config of a Hugging Face model.")
    if model_type not in FAMILIES:
        raise ValueError(
            f"plan does not support {model_type}: its costs have not been compared with measurements. Supported are "
            f"{', '.join(name for name in FAMILIES if name not in UNSUPPORTED)}."
        )
    if model_type in UNSUPPORTED:
        raise ValueError(f"plan does not support {model_type}: {UNSUPPORTED[model_type]}.")
    config = _build_config(model, model_type, description, sizes or {})
    require_sane_top_k(config, model)
    return config


def require_own_weights(model: str, config: Any) -> None:
    """Raise ValueError if the weight files of a folder are far too small for its config; no weights are read."""
    stored = stored_bytes(Path(model)) if Path(model).is_dir() else None
    if stored is not None:
        with torch.device("meta"):
            require_enough_weights(model, count_parameters(_build(config)), stored)


def build_on_meta(config: Any, router: str, *, k: int | None = None, layers: Layers = "all", **sizes: Any) -> Any:
    """Return the config's model on `meta`, with the router in it; the options are those of `plan`."""
    k, is_dense = shared_k(router, k), config.model_type in DENSE_FAMILIES and not hasattr(config, "holdfast")
    with torch.device("meta"):
        model = _build(config)
        if not is_dense:
            for name, value in sizes.items():
                if value is not None:
                    raise ValueError(f"this {config.model_type} model has experts already; --{name} is for dense ones.")
            return reroute(model, router, k=k, layers=layers)
        if sizes.get("experts") is None:
            raise ValueError(f"{config.model_type} is dense; give the number of experts per layer (--experts 16).")
        if router == NATIVE:
            raise ValueError("a dense model has no native router; name one of holdfast.list_routers().")
        init: Literal["copy", "random"] = "copy" if sizes.get("hidden") is None else "random"  # a copy keeps the width
        return sparsify(model, router=router, k=k, layers=layers, init=init, **sizes)


def _read_description(model: str) -> dict[str, Any]:
    """Return config.json as plain data."""
    from transformers.utils import cached_file

    path = Path(model)
    if path.is_dir() and not (path / CONFIG).exists():
        raise ValueError(f"{path} contains no {CONFIG}: it is not the folder of a Hugging Face model.")
    if not path.exists():
        if model in FAMILIES:
            return {"model_type": model}
        missing = f"there is no folder or file {model}"
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(f"{missing}.")
        if "/" not in model:
            raise ValueError(f"{missing}, names on the hub have an owner/, and {unknown_name('family', model, FAMILIES)}")
        try:
            path = Path(cached_file(model, CONFIG))  # no other file is downloaded
        except (OSError, TypeError, ValueError):
            raise ValueError(f"{missing}, and the hub has no {CONFIG} under that name, or cannot be reached.") from None
    if path.is_dir():
        require_regular(path / CONFIG, inside=path)
        path = path / CONFIG
    description = read_json(path, object_hook=special_float)
    if not isinstance(description, dict):
        raise ValueError(f"{path} is not the config of a Hugging Face model.")
    return description


def _build_config(model: str, model_type: str, description: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config_class = type(AutoConfig.for_model(model_type))
    plain = {key: value for key, value in description.items() if key not in ("model_type", "auto_map")}
    defaults = config_class()
    known = [name for name, value in defaults.to_dict().items() if type(value) is int]
    for name in sizes:
        if not hasattr(defaults, name) and name not in UNDECLARED_SIZES:
            raise ValueError(f"{unknown_name('size', name, known)[:-1]} in the config of {model_type}.")
    try:
        # Sizes go into the description, not into the config, because other sizes follow from them (the width of a head).
        return config_class.from_dict({**plain, **sizes})
    except Exception as problem:  # whatever the config's own checks raise, it is caused by these values
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ValueError(f"the config of {model} is not one of a {model_type} model: {reason}") from None


def _build(config: Any) -> Any:
    """Return the config's model, with the changes that its `holdfast` entry describes."""
    config = copy.deepcopy(config)
    model_class = _model_class(config)
    described = getattr(config, "holdfast", None)
    if described is not None:
        del config.holdfast
    model = build_or_refuse(lambda: model_class(config), model_class.__name__)
    if described is not None:
        apply_specs(model, names_in_model(model, read_specs(described)))
    if count_parameters(model) > MOST_PARAMETERS:
        raise ValueError(f"this model would have {count_parameters(model):,} parameters; no model has more than 10^15.")
    return model


def _model_class(config: Any) -> Any:
    """Return the class that the config names if transformers has it for this config; else the usual class of its family."""
    import transformers

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None) if isinstance(name, str) else None
        if model_class is not None and getattr(model_class, "config_class", None) is type(config):
            return model_class
    for mapping in (
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    return transformers.MODEL_MAPPING[type(config)]


def default_routers(config: Any, k: int | None = None) -> Sequence[str]:
    """Return the plain router and the five robust ones; a native gate is the plain router if k is the model's own."""
    native = config.model_type not in DENSE_FAMILIES and k is None
    return (NATIVE if native else "smoe", "symphony", "similarity", "attention", "ac", "smooth")
