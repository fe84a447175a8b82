"""A model as its config says, without weights: on the `meta` device, changed by the functions that change real models.

So parameters and state are counted, not computed again: what is counted is what `sparsify` and `reroute` make.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import unknown
from holdfast.files import read_json, require_regular
from holdfast.hub import reroute
from holdfast.hub.convert import Layers, choose
from holdfast.hub.families import DENSE_FAMILIES, MOE_FAMILIES, dense_family, layers_of
from holdfast.hub.folder_files import family_values, special_float
from holdfast.hub.layers import NATIVE, LayerSpec, names_in_model, read
from holdfast.hub.model_classes import apply_specs
from holdfast.model_size import (
    MOST_PARAMETERS,
    count_parameters,
    require_filled,
    require_sane_choice,
    require_sane_numbers,
    stored_bytes,
)
from holdfast.routing.presets import REGISTRY

CONFIG = "config.json"
FAMILIES = sorted(DENSE_FAMILIES | MOE_FAMILIES)
UNDECLARED = ("head_dim",)  # models read it off configs whose class does not know it
UNPLANNED = {
    "swin": "its layers see different numbers of tokens",
    "siglip": "it has two towers and pools with an attention of its own",
    "siglip_text_model": "it is half of a model with two towers",
    "siglip_vision_model": "it pools with an attention of its own",
    **{name: "it has layers without attention" for name, family in MOE_FAMILIES.items() if family.recurrent is not None},
}


@dataclass(frozen=True)
class Choice:
    """A router to plan for, as it is written and as it is built."""

    label: str
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, written: str) -> "Choice":
        """Return the choice that `similarity[tau=2]` names."""
        return cls(written, written) if written == NATIVE else cls(written, *REGISTRY.resolve(written))


@dataclass(frozen=True)
class Change:
    """What becomes of the model, whatever the router: of a dense one experts are made."""

    experts: int | None = None
    k: int | None = None
    layers: Layers = "all"
    hidden: int | None = None


def read_config(model: str, sizes: Mapping[str, Any] | None = None) -> Any:
    """The config of a folder, of a file, of a name on the hub, or of a family, with `sizes` in place of its own.

    Nothing but config.json is read, no weights and no code, and a family that Holdfast does not know is an error.
    """
    written = _description(model)
    require_sane_numbers({**written, **(sizes or {})}, model)
    description = family_values(written, model)
    model_type = description.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"the {CONFIG} of {model} says no model_type: it is not the config of a Hugging Face model.")
    if model_type not in FAMILIES:
        raise ValueError(f"{unknown('model family', model_type, FAMILIES)} A new one is a row in holdfast/hub/families.py.")
    if model_type in UNPLANNED:
        raise ValueError(f"{model_type} is not planned for: {UNPLANNED[model_type]}. Other families are.")
    config = _configured(model, model_type, description, sizes or {})
    require_sane_choice(config, model)
    return config


def require_own_weights(model: str, config: Any) -> None:
    """Refuse the config of a folder whose weight files are far too small for it; no weights are read."""
    stored = stored_bytes(Path(model)) if Path(model).is_dir() else None
    if stored is not None:
        with torch.device("meta"):
            require_filled(model, count_parameters(_build(config)), stored)


def planned(config: Any, choice: Choice, change: Change) -> Any:
    """The config's model on `meta`, with the router in it."""
    with torch.device("meta"):
        model = _build(config)
        described = getattr(config, "holdfast", None)
        if config.model_type in DENSE_FAMILIES and described is None:
            _sparsify(model, choice, change)
        else:
            _require_reroutable(config, change)
            reroute(model, choice.router, k=change.k, layers=change.layers, **choice.options)
    return model


def _sparsify(model: Any, choice: Choice, change: Change) -> None:
    """As `holdfast.sparsify` would, which copies weights and so needs some."""
    family = dense_family(model)
    if change.experts is None:
        raise ValueError(f"{family.model_type} is dense; say how many experts its networks should become (--experts 16).")
    if choice.router == NATIVE:
        raise ValueError("a dense model has no native router; name one of holdfast.list_routers().")
    found = [f"{name}.{family.place}".lstrip(".") for name, _ in layers_of(family, model)]
    if not found:
        raise ValueError(f"this {family.model_type} model has no feed-forward network to sparsify.")
    k = 2 if change.k is None else change.k
    spec = LayerSpec(choice.router, k, choice.options, {}, True, change.experts, change.hidden, "softmax")
    apply_specs(model, {found[index]: spec for index in choose(change.layers, len(found))})


def _require_reroutable(config: Any, change: Change) -> None:
    for name in ("experts", "hidden"):
        if getattr(change, name) is not None:
            raise ValueError(f"this {config.model_type} model has experts already; --{name} is for dense ones.")


def _description(model: str) -> dict[str, Any]:
    """config.json as plain data."""
    path = Path(model)
    if path.is_dir() and not (path / CONFIG).exists():
        raise ValueError(f"{path} holds no {CONFIG}: it is not the folder of a Hugging Face model.")
    if not path.exists():
        if model in FAMILIES:
            return {"model_type": model}
        path = _from_hub(model)
    if path.is_dir():
        require_regular(path / CONFIG, inside=path)
        path = path / CONFIG
    description = read_json(path, object_hook=special_float)
    if not isinstance(description, dict):
        raise ValueError(f"{path} is not the config of a Hugging Face model.")
    return description


def _from_hub(model: str) -> Path:
    """Where the hub's config.json is now; only that file is fetched."""
    from transformers.utils import cached_file

    missing = f"there is no folder or file {model}"
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"{missing}.")
    if "/" not in model:
        raise ValueError(f"{missing}, names on the hub have an owner/, and {unknown('family', model, FAMILIES)}")
    try:
        found = cached_file(model, CONFIG)
    except (OSError, ValueError):
        found = None
    if found is None:
        raise ValueError(f"{missing}, and the hub gave no {CONFIG} of that name.")
    return Path(found)


def _configured(model: str, model_type: str, description: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(model_type))
    plain = {key: value for key, value in description.items() if key not in ("model_type", "auto_map")}
    usual = kind()
    known = [name for name, value in usual.to_dict().items() if type(value) is int]
    for name in sizes:
        if not hasattr(usual, name) and name not in UNDECLARED:
            raise ValueError(f"{unknown('size', name, known)[:-1]} in the config of {model_type}.")
    try:
        # Into the description rather than the config: other sizes follow from them (the width of a head).
        return kind.from_dict({**plain, **sizes})
    except Exception as problem:  # whatever a config's own checks raise, it is about these values
        raise ValueError(f"the config of {model} is not one of a {model_type} model: {_one_line(problem)}") from None


def _build(config: Any) -> Any:
    """The config's model, with the changes that it describes."""
    config = copy.deepcopy(config)
    kind = _class(config)
    described = getattr(config, "holdfast", None)
    if described is not None:
        del config.holdfast
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # that is an error below
            model = kind(config)
    except Exception as problem:  # sizes that do not go together fail wherever they meet first
        raise ValueError(f"no {kind.__name__} has these sizes: {_one_line(problem)}") from None
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise ValueError(f"{name} would be {' x '.join(map(str, parameter.shape))}; no size may be 0.")
    if described is not None:
        apply_specs(model, names_in_model(model, read(described)))
    if count_parameters(model) > MOST_PARAMETERS:
        raise ValueError(f"this model would have {count_parameters(model):,} parameters; no model has more than 10^15.")
    return model


def _class(config: Any) -> Any:
    """The class that the config names, if it is one of transformers' for this config; else what its family is trained as."""
    import transformers

    for name in config.architectures or ():
        kind = getattr(transformers, name, None) if isinstance(name, str) else None
        if kind is not None and getattr(kind, "config_class", None) is type(config):
            return kind
    for mapping in (
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    return transformers.MODEL_MAPPING[type(config)]


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


def default_routers(config: Any, k: int | None = None) -> Sequence[str]:
    """The plain router, which for another k than the model's own is not its native one, and the five robust ones."""
    native = config.model_type in MOE_FAMILIES and k is None
    return (NATIVE if native else "smoe", "symphony", "similarity", "attention", "ac", "smooth")
