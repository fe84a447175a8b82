"""The files of a saved folder: how each is written, and how an untrusted one is checked before it is used.

config.json of a changed model:

    {"model_type": MODEL_TYPE,                       # unknown to transformers without Holdfast: its Auto classes show it
     "transformers_weights": NEEDS_HOLDFAST,         # a model class that reads this level as its config finds no weights
     "model_config": {                               # the family's config, which the family's own class reads
        "model_type": "mixtral", ...,
        "holdfast": {"format": 2, "layers": {...}},  # the routers
        "quantization_config": {"quant_method": "holdfast"},   # with Holdfast imported, calls `AppliesChanges`
        "transformers_weights": NEEDS_HOLDFAST}}     # without Holdfast, no file of weights is found

Weights have the names and shapes of the family's checkpoints (one entry for each expert, in most families), which
transformers converts when it saves and loads. Router state is beside them.

holdfast.json is a manifest with checksums of the weights and of the description of routers: a file that is damaged or was
changed raises an error before it is loaded. `check_folder` checks a folder; `require_all_used` and
`require_fitting_files` check that its weights are those of the model.

README.md is a model card with code that opens the folder (`write_card`).
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from holdfast.errors import INSTALL
from holdfast.files import LARGE, MIB, SMALL, read_json, require_possible_model, require_regular, write_atomically
from holdfast.kernels.quantised import is_quantised
from holdfast.model_size import require_sane_numbers
from holdfast.plugins import plugins_of, registered_without_plugin
from holdfast.routing.presets import preset_names

# Transformers without Holdfast shows this in its error, before its advice to update Transformers.
MODEL_TYPE = "holdfast (install it as README.md says, then import holdfast; updating Transformers does not help)"
QUANT_METHOD = "holdfast"
SECTION = "model_config"
# In place of the name of a file of weights; transformers shows it in its error message.
NEEDS_HOLDFAST = "this folder is read after `import holdfast`, or with holdfast.load"

# Entries of a config that name code: kernels to download, and modules in the folder.
IMPLEMENTATIONS = [f"{prefix}{kind}_implementation" for prefix in ("", "_") for kind in ("attn", "experts")]
IMPLEMENTATIONS += [f"_{kind}_implementation_internal" for kind in ("attn", "experts")]
CODE = ["auto_map", "custom_generate", "custom_pipelines", "kernel_config", "use_kernels", "distributed_config"]
CODE += ["trust_remote_code", *IMPLEMENTATIONS]
UPPER = {"model_type", "transformers_version", "transformers_weights", SECTION, *CODE}  # entries of the upper level
PROCESSOR = "preprocessor_config.json"
MANIFEST, MANIFEST_FORMAT = "holdfast.json", 1
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # downloaded from a hub: no code, no pickles
INDEX = "*.safetensors.index*.json"
LONGEST_NAME = 255  # bytes, of a file on usual file systems
# Largest size of a file in bytes; the first pattern that matches its name counts.
LARGEST = {
    INDEX: 64 * MIB,  # a model of 10^12 parameters has an index of 15 MB
    "trainer_state.json": LARGE,  # has the log of every step
    "*config.json": SMALL,
    "special_tokens_map.json": SMALL,
    "added_tokens.json": SMALL,
    "holdfast.json": SMALL,
    "tokenizer.json": LARGE,
    "vocab*.json": LARGE,
    "*.txt": LARGE,
    "*.model": LARGE,
    "*.jinja": SMALL,
    "*": None,  # weights, and files that no library reads
}


def wrapped_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for the config `values` of a changed model."""
    quantised = values.get("quantization_config")
    load_hook = {"quant_method": QUANT_METHOD, **({} if quantised is None else {"quantization_config": quantised})}
    section = {**values, "quantization_config": load_hook, "transformers_weights": NEEDS_HOLDFAST}
    version = {"transformers_version": values["transformers_version"]} if "transformers_version" in values else {}
    return {"model_type": MODEL_TYPE, **version, "transformers_weights": NEEDS_HOLDFAST, SECTION: section}


def description_of(written: Mapping[str, Any]) -> Any:
    """Return the description of routers in a config.json; None if it has none."""
    section = written.get(SECTION)
    return section.get("holdfast") if isinstance(section, dict) else None


def is_modified(written: Mapping[str, Any], name: object) -> bool:
    """Whether this is the config of a changed model. Raise ValueError if its entries contradict each other."""
    is_holdfast = written.get("model_type") == MODEL_TYPE
    # Before the release, formats had a shorter model type, and the first one its description beside the family's entries.
    if is_holdfast != (description_of(written) is not None or "holdfast" in written):
        raise ValueError(
            f"{name}: its config was edited, or written by another version of Holdfast: its model_type and the description "
            "of routers contradict each other."
        )
    return is_holdfast


def family_values(written: Mapping[str, Any], name: object) -> dict[str, Any]:
    """Return the family's config from any config.json, without entries that name code or make a load fail."""
    if is_modified(written, name):
        description, section = description_of(written), written[SECTION]
        described = description.get("model_type") if isinstance(description, dict) else None
        beside = sorted(name for name in set(written) - UPPER if not name.startswith("_"))  # transformers adds some with "_"
        if beside:
            raise ValueError(f'{name}: its config has {beside[0]!r} beside "{SECTION}", without effect; move it there.')
        if section.get("model_type") != described:
            raise ValueError(f"{name}: its config is for {section.get('model_type')!r}, its routers for {described!r}.")
        values = unwrapped_config(section)
    else:
        values = without_code(written)
    names = values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise ValueError(f"{name}: its config names no model class of transformers (architectures: {names}).")
    return values


def unwrapped_config(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's config as it was before `wrapped_config`, without entries that name code."""
    values = without_code(section)
    if values.get("transformers_weights") == NEEDS_HOLDFAST:
        del values["transformers_weights"]
    hook = values.get("quantization_config")
    if isinstance(hook, dict) and hook.get("quant_method") == QUANT_METHOD:
        del values["quantization_config"]
        if hook.get("quantization_config") is not None:
            values["quantization_config"] = hook["quantization_config"]
    return values


def without_code(value: Any) -> Any:
    """Return a config, or a value in it, without entries that name code."""
    if isinstance(value, list):
        return [without_code(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    return {name: without_code(entry) for name, entry in value.items() if name not in CODE}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json."""
    try:
        written = read_json(folder / "config.json", object_hook=special_float)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: it is not a model folder, or not complete.") from None
    if not isinstance(written, dict):
        raise ValueError(f"{folder / 'config.json'} is not a JSON object, so it does not describe a model.")
    return written


def special_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}: JSON has no infinity."""
    word = value.get("__float__")
    return float(word) if isinstance(word, str) and word in ("Infinity", "-Infinity", "NaN") else value


def config_class(own_type: Any, name: object) -> Any:
    """Return transformers' config class for a model type."""
    from transformers import CONFIG_MAPPING

    if not isinstance(own_type, str) or own_type == MODEL_TYPE or own_type not in CONFIG_MAPPING:
        raise ValueError(f"{name}: the installed transformers has no model of type {own_type!r}.")
    return CONFIG_MAPPING[own_type]


def write_manifest(folder: Path) -> None:
    """Write the checksums of the weights in `folder` and of its description of routers."""
    content = {"format": MANIFEST_FORMAT, "description": _description(folder), "weights": _weights(folder)}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def check_manifest(folder: Path, *, weights: bool = True) -> None:
    """Raise ValueError if the description of routers or the weights are not those that were written.

    weights     False checks only the description: the checksums of large weights take long
    """
    try:
        content = read_json(folder / MANIFEST)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}: it is not complete, or was not written by Holdfast.") from None
    is_known = isinstance(content, dict) and content.get("format") == MANIFEST_FORMAT
    if not is_known or not isinstance(content.get("weights"), dict):
        raise ValueError(f"{folder / MANIFEST} is in a format that this Holdfast does not read.")
    for name in content["weights"]:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its {MANIFEST} lists: the folder is not complete.")
    if _description(folder) != content.get("description"):
        raise ValueError(f"{folder / 'config.json'} describes other routers than those that were saved: it was changed.")
    if not weights:
        return
    found = _weights(folder)
    for name in sorted(found.keys() | content["weights"].keys()):
        if found.get(name) != content["weights"].get(name):
            raise ValueError(f"{folder / name} is not the file that was saved (another checksum): it is damaged or changed.")


def _weights(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.glob("*.safetensors"))}


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    require_regular(file)  # opening a named pipe would block
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _description(folder: Path) -> str:
    config: Any = read_json(folder / "config.json")
    return hashlib.sha256(json.dumps(description_of(config), sort_keys=True).encode()).hexdigest()


def check_folder(folder: Path) -> dict[str, Any]:
    """Raise ValueError if a folder is damaged or refers to files outside of it; return the content of its config.json."""
    written = check_files(folder)
    if is_modified(written, folder):
        check_manifest(folder)
    return written


def check_files(folder: Path) -> dict[str, Any]:
    """Check a folder as `check_folder` does, without the checksums of weights, which take long if they are large."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} is an adapter; load the model it belongs to, and add the adapter with peft.")
    require_own_files(folder)
    written = read_config(folder)
    if is_modified(written, folder):
        check_manifest(folder, weights=False)
    require_sane_numbers(written, folder)
    for index in folder.glob(INDEX):  # it may list only safetensors in the folder itself
        content = read_json(index, limit=64 * MIB)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} does not say which file holds each weight: the folder is damaged.")
        for name in sorted(set(shards.values())):
            if Path(name).name != name or not name.endswith(".safetensors") or len(name.encode()) > LONGEST_NAME:
                raise ValueError(f"{index} names {name[:80]!r}, which is not a safetensors file of this folder.")
            if not (folder / name).is_file():
                raise ValueError(f"{folder} lacks {name}, which its {index.name} lists: the folder is not complete.")
    return written


def require_own_files(folder: Path) -> None:
    """Raise ValueError if a file that a library would read is not a regular file, too large, or links out of the folder."""
    for place in (folder, folder / "additional_chat_templates"):
        names = sorted(os.listdir(place)) if place.is_dir() else []
        for name in names:
            if any(fnmatch(name, pattern) for pattern in FILES):
                file, limit = place / name, next(size for pattern, size in LARGEST.items() if fnmatch(name, pattern))
                try:
                    require_regular(file, limit=limit, inside=folder)
                except FileNotFoundError:
                    raise ValueError(f"{file} is a broken link: the folder is not complete.") from None


def downloaded_folder(name: str, **options: Any) -> Path:
    """Download a model from the Hugging Face hub, without code and pickles, and return its folder."""
    require_possible_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        raise ValueError(f"there is no folder {name}, and no such model on the hub ({first_line(problem)}).") from None


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's message, with the second one if the first ends in a colon."""
    lines = (str(problem).strip() or type(problem).__name__).splitlines()
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


Shapes = dict[str, tuple[int, ...]]  # of weights, by name
REPORTED = {"missing_keys": "lacks", "unexpected_keys": "has unexpected", "mismatched_keys": "reshapes"}


def require_all_used(found: Mapping[str, Any], model: Any, folder: object, *, layers: Iterable[str] | None = None) -> None:
    """Raise ValueError for weights that transformers initialised or skipped (`found` is its loading info).

    With `layers`, only the weights of these layers are checked. Others may differ: transformers initialises a head that is
    not in the folder, with a warning, and users may choose another number of labels (`ignore_mismatched_sizes`).
    """
    # Remove the base model's prefix: unexpected weights have their names in the folder, the others those in the model.
    prefix = f"{model.base_model_prefix}."
    inside = tuple(f"{name.removeprefix(prefix)}." for name in layers or ())
    for key, what in REPORTED.items():
        names = sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in found.get(key) or ())
        everything = layers is None and key != "mismatched_keys"
        _refuse(folder, what, [name for name in names if everything or name.removeprefix(prefix).startswith(inside)])


def split_head_weights(found: Mapping[str, Any], model: Any, folder: object) -> dict[str, list[str]]:
    """Return the head's weights that are new ("new"), and those of another head that the folder has ("unused").

    The head is what lies outside of the base model, and a pooler. Raise ValueError if any other weight is missing, has
    another shape or is not used (`found` is transformers' loading info).
    """
    names = {
        key: sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in found.get(key) or ()) for key in REPORTED
    }
    base = model.base_model
    prefix, inside = f"{model.base_model_prefix}.", {name for name, _ in base.named_children()}

    def is_head(name: str) -> bool:
        parts = name.removeprefix(prefix).split(".")
        return "pooler" in parts or (base is not model and not name.startswith(prefix) and parts[0] not in inside)

    for key, what in REPORTED.items():
        _refuse(folder, what, [name for name in names[key] if not is_head(name)])
    return {"new": sorted(names["missing_keys"] + names["mismatched_keys"]), "unused": names["unexpected_keys"]}


def require_fitting_files(files: Iterable[str], model: Any, layers: Iterable[str]) -> None:
    """Raise ValueError if safetensors lack or add weights in the changed `layers`, or differ in shape from the model.

    Weights have the names and shapes of the family's checkpoints or, in a Trainer's checkpoint, those of the model.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion

    files = list(files)
    prefix = f"{model.base_model_prefix}."
    in_files: Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            in_files |= {name.removeprefix(prefix): tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118

    def shapes(state: Mapping[str, Any]) -> Shapes:
        return {name.removeprefix(prefix): tuple(value.shape) for name, value in state.items()}

    everything = model.state_dict()
    layers = list(layers)
    parts = [{name: everything[name] for name in everything if name.startswith(f"{layer}.")} for layer in layers]
    if not all(shapes(part).items() <= in_files.items() for part in parts):
        everything, *parts = (revert_weight_conversion(model, part) for part in (everything, *parts))
    expected, changed = shapes(everything), [shapes(part) for part in parts]
    # The family's name of a layer may differ from that in the model (block_sparse_moe, mlp), but it has as many steps.
    steps = [layer.removeprefix(prefix).count(".") + 1 for layer in layers]
    inside = tuple({f"{'.'.join(name.split('.')[:n])}." for n, part in zip(steps, changed, strict=True) for name in part})
    found = {
        "missing_keys": [name for part in changed for name in part if name not in in_files],
        "unexpected_keys": [name for name in in_files if name.startswith(inside) and name not in expected],
        "mismatched_keys": [name for name in in_files if in_files[name] != expected.get(name, in_files[name])],
    }
    for key, what in REPORTED.items():
        _refuse(Path(files[0]).parent, what, sorted(found[key]))


def _refuse(folder: object, what: str, names: list[str]) -> None:
    if not names:
        return
    config = Path(str(folder)) / "config.json"
    older = config.is_file() and "hierarchical" in str(description_of(read_json(config, object_hook=special_float)))
    hint = " What was saved as `hierarchical` when that had one gate is the router `grouped` now." if older else ""
    raise ValueError(f"{folder} {what} weights ({len(names)}, the first is {names[0]}): it does not fit its config.{hint}")


GGUF = "gguf"


def unmark_dequantised(model: Any) -> None:
    """Remove the attributes that mark a model as quantised if its GGUF weights were dequantised while loading.

    With these attributes transformers refuses to save and train, but the weights are no longer quantised.
    """
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    if getattr(method, "value", method) != GGUF or any(is_quantised(weight) for weight in model.parameters()):
        return
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)


def require_writable(model: Any) -> None:
    """Raise ValueError if weights were quantised or offloaded in memory: transformers would fail while writing them."""
    if not hasattr(model, "hf_device_map") and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            "the weights were offloaded in memory (cpu_offload, disk_offload) and cannot be saved from there; save the "
            "model before offloading it, or load it with a device_map."
        )
    if getattr(model, "hf_quantizer", None) is not None:  # transformers' quantizer saves it, or raises its own error
        return
    for name, weight in model.named_parameters():
        if is_quantised(weight):
            by = type(weight).__module__.split(".")[0]
            raise ValueError(
                f"{name} was quantised in memory ({by}), which cannot be saved; save the model before quantising it, "
                "and load it with a quantization_config."
            )


CARD = """---
library_name: holdfast
{base}tags:
{tags}
---

# {title}

A {family} model whose mixture-of-experts layers are routed by {routers}. Its routers are part of the model: load it with
Holdfast, not with transformers alone.

To install Holdfast, run {install}.
{needs}
The code below runs in this folder. Elsewhere, write the folder's path, or the model's name on a hub, in place of ".".

```python
import holdfast

{loads}model = holdfast.load(".")
```
{further}
Start a program that does not import Holdfast with `holdfast run {options}-- PROGRAM`.
"""
NEEDS_FILE = """
It needs the plugin `{name}` (SHA-256 {checksum}) for {routers}. Saving does not write that file: put it beside
this card, or write its path in the code below. It runs with your rights, so use it only if you trust its author.
"""
NEEDS_PACKAGE = """
It needs the package `{name}` for {routers}: install it, and Holdfast imports it.
"""
NEEDS_MODULE = """
Code that is neither of Holdfast nor a plugin registers {routers}: import the module that does so before you load the model.
"""
WITH_TRANSFORMERS = """
{sentence}

```python
import holdfast
from transformers import {name}

{loads}{line}
```
"""
# Auto classes that a pipeline uses, with the pipeline's task and the file that the folder must have for it.
PIPELINES = {
    "AutoModelForImageTextToText": ("image-text-to-text", "processor_config.json"),
    "AutoModelForCausalLM": ("text-generation", "tokenizer_config.json"),
    "AutoModelForMaskedLM": ("fill-mask", "tokenizer_config.json"),
    "AutoModelForSequenceClassification": ("text-classification", "tokenizer_config.json"),
    "AutoModelForTokenClassification": ("token-classification", "tokenizer_config.json"),
    "AutoModelForImageClassification": ("image-classification", PROCESSOR),
    "AutoModel": ("feature-extraction", "tokenizer_config.json"),
}
GENERATED = "This model card has been automatically generated."  # in the card that transformers writes for an upload


def write_card(folder: Path, model: Any) -> None:
    """Write the model card to README.md, unless there is one that transformers did not generate."""
    file, tags = folder / "README.md", ["holdfast", "mixture-of-experts"]
    if file.exists():
        if GENERATED not in file.read_text(encoding="utf-8"):
            return
        from huggingface_hub import ModelCard

        tags += [tag for tag in ModelCard.load(file).data.tags or () if tag not in tags]  # those that the user named
    description = model.config.holdfast
    layers, base = description["layers"].values(), description.get("base_model")
    routers = list(dict.fromkeys(layer["router"] for layer in layers))
    needs, plugin_files = _needs({name: None for router in routers for name in preset_names(router)})
    loads = "".join(f'holdfast.load_plugin("{file}")\n' for file in plugin_files)
    text = CARD.format(
        base=f"base_model: {base}\n" if base else "",
        tags="\n".join(f"- {tag}" for tag in tags),
        title=f"{base or description['model_type']}, routed by Holdfast",
        family=base or description["model_type"],
        routers=_listed(routers),
        install=INSTALL,
        needs=needs,
        loads=loads,
        further=_with_transformers(folder, model, loads),
        options="--plugin FILE " * len(plugin_files),
    )
    write_atomically(file, text)


def _needs(names: Collection[str]) -> tuple[str, list[str]]:
    """Return the part of a model card about what registers these names outside Holdfast, and the escaped plugin files."""
    text, files = "", []
    for plugin in plugins_of(routers=names):
        name, is_file = _escaped(plugin["name"]), plugin["checksum"] is not None
        files += [name] if is_file else []
        needed = NEEDS_FILE if is_file else NEEDS_PACKAGE
        text += needed.format(name=name, checksum=plugin["checksum"], routers=_listed(plugin["routers"]))
    others = registered_without_plugin("routers", names)
    return text + (NEEDS_MODULE.format(routers=_listed(others)) if others else ""), files


def _escaped(name: str) -> str:
    """Return a name as it can be written between the quotes of a Python string and of a code span of Markdown."""
    return name.encode("unicode_escape").decode("ascii").replace('"', r"\x22").replace("`", r"\x60")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _with_transformers(folder: Path, model: Any, loads: str) -> str:
    """Return the part of a model card about classes of transformers that open this folder.

    loads   the lines of its code that load plugins
    """
    from transformers.models.auto import modeling_auto

    autos = []  # the Auto classes that give a model of this class
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and type(model.config) in mapping:
            autos += [name] if mapping[type(model.config)] is type(model) else []
    if not autos:
        return ""
    auto = next((name for name in PIPELINES if name in autos), autos[0])
    after = "After `import holdfast`, transformers loads it too:"
    text = WITH_TRANSFORMERS.format(sentence=after, name=auto, loads=loads, line=f'model = {auto}.from_pretrained(".")')
    task, needed = PIPELINES.get(auto, ("", ""))
    if not needed or not (folder / needed).is_file():
        return text
    if needed == PROCESSOR and getattr(model.config, "num_channels", 3) != 3:  # a pipeline makes RGB of every image
        name, line = "AutoImageProcessor", 'processor = AutoImageProcessor.from_pretrained(".")'
        sentence = 'It reads grey images. Its processor reads them: `processor(image.convert("L"), return_tensors="pt")`:'
    else:
        name, line, sentence = "pipeline", f'run = pipeline("{task}", ".")', "Or as a pipeline:"
    return text + WITH_TRANSFORMERS.format(sentence=sentence, name=name, loads=loads, line=line)
