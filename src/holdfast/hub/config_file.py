"""The config.json of a changed model: what is written, and what is believed of one that is read.

    {"model_type": "holdfast",                       # plain transformers knows no such model: its Auto classes refuse
     "transformers_weights": NEEDS_HOLDFAST,         # a class that reads this level as its own config refuses the weights
     "model_config": {                               # the family's config, where the family's own class looks for it
        "model_type": "mixtral", ...,
        "holdfast": {"format": 2, "layers": {...}},  # the routers
        "quantization_config": {"quant_method": "holdfast"},   # calls `own_class` where Holdfast is imported
        "transformers_weights": NEEDS_HOLDFAST}}     # and refuses the weights where it is not

In format 1 the family's config is the upper level itself, with "holdfast" in it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.reading import read_json

MODEL_TYPE = "holdfast"
SECTION = "model_config"
NEEDS_HOLDFAST = "this folder is read after `import holdfast`, or with holdfast.load"  # in the error message
NO_DTYPE = "this folder is read with holdfast.load"  # format 1's way of keeping others out

# What names code in a config: modules of the folder's own, or kernels to fetch from a hub.
CODE = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "custom_generate",
    "custom_pipelines",
    "kernel_config",
    "use_kernels",
    "distributed_config",
    "trust_remote_code",
)
UPPER = {"model_type", "transformers_version", "transformers_weights", SECTION, *CODE}  # code there is never looked at


def wrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json for the config `values` of a changed model."""
    quantised = values.get("quantization_config")
    calls_us = {"quant_method": MODEL_TYPE, **({} if quantised is None else {"quantization_config": quantised})}
    section = {**values, "quantization_config": calls_us, "transformers_weights": NEEDS_HOLDFAST}
    version = {name: values[name] for name in ("transformers_version",) if name in values}
    return {"model_type": MODEL_TYPE, **version, "transformers_weights": NEEDS_HOLDFAST, SECTION: section}


def description_of(written: Mapping[str, Any]) -> Any:
    """What a config.json says about routers, in either format; None where it says nothing."""
    section = written.get(SECTION)
    return section.get("holdfast") if isinstance(section, dict) else written.get("holdfast")


def is_changed(written: Mapping[str, Any], name: object) -> bool:
    """Whether this is the config of a changed model; a ValueError where it is half of one."""
    ours = written.get("model_type") == MODEL_TYPE
    if ours != (description_of(written) is not None):
        raise ValueError(f"{name}: its config does not say whether Holdfast wrote it; it was changed.")
    return ours


def family_values(written: Mapping[str, Any], name: object) -> dict[str, Any]:
    """The family's config in a config.json, of a changed model or not, without what names code or keeps others out."""
    values = _family_values(written, name)
    names = values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise ValueError(f"{name}: its config names no model class of transformers (architectures: {names}).")
    return values


def _family_values(written: Mapping[str, Any], name: object) -> dict[str, Any]:
    if not is_changed(written, name):
        return without_code(written)
    description, section = description_of(written), written.get(SECTION)
    own_type = description.get("model_type") if isinstance(description, dict) else None
    if isinstance(section, dict):
        other = sorted(name for name in set(written) - UPPER if not name.startswith("_"))  # transformers adds some of those
        if other:
            raise ValueError(
                f'{name}: its config says {other[0]!r} beside "{SECTION}", where it has no effect; put it inside.'
            )
        if section.get("model_type") != own_type:
            raise ValueError(f"{name}: its config is for {section.get('model_type')!r}, its routers for {own_type!r}.")
        return unwrapped(section)
    return {**unwrapped(written), "model_type": own_type}


def unwrapped(section: Mapping[str, Any]) -> dict[str, Any]:
    """A family's config as it was before `wrapped`, without what names code."""
    values = without_code(section)
    if values.get("transformers_weights") == NEEDS_HOLDFAST:
        del values["transformers_weights"]
    hook = values.get("quantization_config")
    if isinstance(hook, dict) and hook.get("quant_method") == MODEL_TYPE:
        del values["quantization_config"]
        if hook.get("quantization_config") is not None:
            values["quantization_config"] = hook["quantization_config"]
    return values


def without_code(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what names code, and without format 1's dtypes that there are not: for `load` and for `plan`."""
    return {name: _inner_without_code(value) for name, value in values.items() if name not in CODE and value != NO_DTYPE}


def _inner_without_code(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner_without_code(entry) for entry in value]
    return without_code(value) if isinstance(value, dict) else value


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json."""
    try:
        written = read_json(folder / "config.json", object_hook=special_float)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: it is no model folder, or not complete.") from None
    if not isinstance(written, dict):
        raise ValueError(f"{folder / 'config.json'} does not describe a model.")
    return written


def special_float(value: dict[str, Any]) -> Any:
    """The number that transformers writes as {"__float__": "Infinity"}, which JSON has no word for."""
    word = value.get("__float__")
    return float(word) if isinstance(word, str) and word in ("Infinity", "-Infinity", "NaN") else value


def config_class(own_type: Any, name: object) -> Any:
    """The family's config class."""
    from transformers import CONFIG_MAPPING

    if not isinstance(own_type, str) or own_type == MODEL_TYPE or own_type not in CONFIG_MAPPING:
        raise ValueError(f"{name}: this transformers knows no model of type {own_type!r}.")
    return CONFIG_MAPPING[own_type]
