"""The config.json of a changed model: what is written, and what is believed of one that is read.

    {"model_type": "holdfast",                       # plain transformers knows no such model: its Auto classes refuse
     "transformers_weights": NEEDS_HOLDFAST,         # a class that reads this level as its own config refuses the weights
     "model_config": {                               # the family's config, where the family's own class looks for it
        "model_type": "mixtral", ...,
        "holdfast": {"format": 2, "layers": {...}},  # the routers
        "quantization_config": {"quant_method": "holdfast"},   # calls `own_class` where Holdfast is imported
        "transformers_weights": NEEDS_HOLDFAST}}     # and refuses the weights where it is not

In format 1 the family's config is the upper level itself, with "holdfast" in it.


Checksums of a folder's weights, so that a file that was cut short or changed is noticed before it is believed.

Whether a folder is whole and its weights are those of the model: checked however the folder is opened.

The model card of a saved folder: what it is, and the two lines that load it.

What quantisers and offloaders leave on a model: marks that forbid saving, and weights that cannot be written.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from holdfast.files import LARGE, MIB, SMALL, read_json, require_regular, write_whole
from holdfast.kernels.quantised import is_quantised
from holdfast.model_size import require_sane_numbers

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


NAME = "holdfast.json"
FORMAT = 1


def write_manifest(folder: Path) -> None:
    """Write the checksums of the weights in `folder` and of what its config says about routers."""
    content = {"format": FORMAT, "description": _description(folder), "weights": _weights(folder)}
    write_whole(folder / NAME, json.dumps(content, indent=2) + "\n")


def check_manifest(folder: Path, *, weights: bool = True) -> None:
    """Refuse a folder whose description or weights are not those that were written.

    weights     False compares only the description: the checksums of large weights take long
    """
    try:
        content = read_json(folder / NAME)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {NAME}: it is not complete, or was not written by Holdfast.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("weights"), dict):
        raise ValueError(f"{folder / NAME} is in a format that this Holdfast does not read.")
    for name in content["weights"]:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its {NAME} lists: the folder is not complete.")
    if _description(folder) != content.get("description"):
        raise ValueError(f"{folder / 'config.json'} describes other routers than were saved: it was changed.")
    if not weights:
        return
    found = _weights(folder)
    for name in sorted(found.keys() | content["weights"].keys()):
        if found.get(name) != content["weights"].get(name):
            raise ValueError(
                f"{folder / name} is not the file that was saved (its checksum differs): it is damaged or changed."
            )


def _weights(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.glob("*.safetensors"))}


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    require_regular(file)  # to open a pipe would wait for ever
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _description(folder: Path) -> str:
    config: Any = read_json(folder / "config.json")
    return hashlib.sha256(json.dumps(description_of(config), sort_keys=True).encode()).hexdigest()


FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # what is fetched from a hub: no code, no pickles
INDEX = "*.safetensors.index*.json"
LARGEST = {  # bytes of a file by its name: the first pattern that fits; a model of 10^12 parameters has an index of 15 MB
    INDEX: 64 * MIB,
    "trainer_state.json": LARGE,  # holds the log of every step
    "*config.json": SMALL,
    "special_tokens_map.json": SMALL,
    "added_tokens.json": SMALL,
    "holdfast.json": SMALL,
    "tokenizer.json": LARGE,
    "vocab*.json": LARGE,
    "*.txt": LARGE,
    "*.model": LARGE,
    "*.jinja": SMALL,
    "*": None,  # weights, and what no library reads
}


def check_folder(folder: Path) -> dict[str, Any]:
    """Refuse a folder that is damaged, or names files that are not its own; return what its config.json says."""
    written = check_files(folder)
    if is_changed(written, folder):
        check_manifest(folder)
    return written


def check_files(folder: Path) -> dict[str, Any]:
    """As `check_folder`, but for the checksums: those of large weights take long."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter; load the model it belongs to, and put the adapter on with peft.")
    require_own_files(folder)
    written = read_config(folder)
    if is_changed(written, folder):
        check_manifest(folder, weights=False)
    require_sane_numbers(written, folder)
    _require_own_shards(folder)
    return written


def require_own_files(folder: Path) -> None:
    """Refuse a folder in which a file that a library would read is not regular, too large, or a link out of the folder."""
    for place in (folder, folder / "additional_chat_templates"):
        names = sorted(os.listdir(place)) if place.is_dir() else []
        for name in names:
            if any(fnmatch(name, pattern) for pattern in FILES):
                limit = next(size for pattern, size in LARGEST.items() if fnmatch(name, pattern))
                _require_own(place / name, folder, limit)


def _require_own(file: Path, folder: Path, limit: int | None) -> None:
    try:
        require_regular(file, limit=limit, inside=folder)
    except FileNotFoundError:
        raise ValueError(f"{file} is a link to a file that is not there: the folder is not complete.") from None


def _require_own_shards(folder: Path) -> None:
    """An index of shards may name any path; these must be safetensors in the folder itself."""
    for index in folder.glob(INDEX):
        content = read_json(index, limit=64 * MIB)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} does not say which file holds each weight: the folder is damaged.")
        for name in sorted(set(shards.values())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name!r}, which is no safetensors file of this folder.")
            if not (folder / name).is_file():
                raise ValueError(f"{folder} lacks {name}, which its {index.name} lists: the folder is not complete.")


def fetched(name: str, **options: Any) -> Path:
    """The folder of a model on a hub, without its code and pickles."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ValueError(
            f"{name} is no folder here, and no model of that name could be fetched from the hub ({reason})."
        ) from None


REPORTED = {"missing_keys": "lacks", "unexpected_keys": "has too many", "mismatched_keys": "reshapes"}


def require_all_used(found: Mapping[str, Any], model: Any, folder: object, *, layers: Iterable[str] | None = None) -> None:
    """Refuse what transformers has made up or left out (`found` is its loading info): all of it, or that of `layers`.

    A head that the folder does not have starts anew, and transformers says so. Another number of labels is the user's choice
    too (`ignore_mismatched_sizes`).
    """
    # What a folder has too much is named as there, the rest as in this model: with the base model's prefix or without.
    prefix = f"{model.base_model_prefix}."
    inside = tuple(f"{name.removeprefix(prefix)}." for name in layers or ())
    for key, what in REPORTED.items():
        names = sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in found.get(key) or ())
        everything = layers is None and key != "mismatched_keys"
        _refuse(folder, what, [name for name in names if everything or name.removeprefix(prefix).startswith(inside)])


def require_fitting_files(files: Iterable[str], model: Any, layers: Iterable[str]) -> None:
    """Refuse safetensors with other names than the changed `layers` have, or with other shapes than the model."""
    from safetensors import safe_open

    files = list(files)
    prefix = f"{model.base_model_prefix}."
    ours = {name.removeprefix(prefix): tuple(value.shape) for name, value in model.state_dict().items()}
    inside = tuple(f"{name.removeprefix(prefix)}." for name in layers)
    theirs: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            theirs |= {name.removeprefix(prefix): tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    found = {
        "missing_keys": [name for name in ours.keys() - theirs.keys() if name.startswith(inside)],
        "unexpected_keys": [name for name in theirs.keys() - ours.keys() if name.startswith(inside)],
        "mismatched_keys": [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]],
    }
    for key, what in REPORTED.items():
        _refuse(Path(files[0]).parent, what, sorted(found[key]))


def _refuse(folder: object, what: str, names: list[str]) -> None:
    if names:
        raise ValueError(f"{folder} {what} weights ({len(names)}, the first is {names[0]}): it does not fit its config.")


CARD = """---
library_name: holdfast
{base}tags:
- holdfast
- mixture-of-experts
---

# {title}

A {family} model whose mixture-of-experts layers are routed by {routers}. Its routers are part of the model: load it with
Holdfast, not with transformers alone.

```
pip install holdfast
```

```python
import holdfast

model = holdfast.load("path/to/this/folder")
```

After `import holdfast`, transformers opens it too: `AutoModelForCausalLM.from_pretrained`, `pipeline`, and what uses them.
A program that does not import Holdfast is started with it: `holdfast run -- lm_eval --model hf ...`.
"""


def write_card(folder: Path, description: Mapping[str, Any]) -> None:
    """Write README.md; one that is there already stays."""
    if (folder / "README.md").exists():
        return
    layers = description["layers"].values()
    routers = " and ".join(f"`{name}`" for name in dict.fromkeys(layer["router"] for layer in layers))
    base = description.get("base_model")
    text = CARD.format(
        base=f"base_model: {base}\n" if base else "",
        title=f"{base or description['model_type']}, routed by Holdfast",
        family=base or description["model_type"],
        routers=routers,
    )
    write_whole(folder / "README.md", text)


GGUF = "gguf"


def unmark_dequantised(model: Any) -> None:
    """Drop transformers' mark of a quantised model where GGUF weights were dequantised while loading.

    The mark forbids saving and training, but the weights are ordinary numbers.
    """
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    if getattr(method, "value", method) != GGUF or any(is_quantised(weight) for weight in model.parameters()):
        return
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)


def require_writable(model: Any) -> None:
    """Raise where weights were quantised or offloaded in memory: transformers cannot write those and fails half-way."""
    if not hasattr(model, "hf_device_map") and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            "the weights were offloaded in memory (cpu_offload, disk_offload), from where they cannot be saved; save the "
            "model before offloading it, or load it with a device_map."
        )
    if getattr(model, "hf_quantizer", None) is not None:  # loaded with a quantization_config, which knows how, or says so
        return
    for name, weight in model.named_parameters():
        if is_quantised(weight):
            by = type(weight).__module__.split(".")[0]
            raise ValueError(
                f"{name} was quantised in memory ({by}), which a folder cannot hold; save the model before quantising it, "
                "and load it with a quantization_config."
            )
