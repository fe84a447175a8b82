"""A Hugging Face folder (config, safetensors, generation config) that also describes routers and holds their state."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from holdfast.hub.changed import MODEL_TYPE, NO_DTYPE, ChangedConfig, changed
from holdfast.hub.gathering import as_if_whole, is_spread, on_first_process, whole_state
from holdfast.hub.manifest import check_manifest
from holdfast.hub.sites import sites
from holdfast.hub.subclasses import with_mixin
from holdfast.hub.surgery import require_runnable
from holdfast.moe import name_layers

# What names code in a config: modules of the folder's own, or kernels to fetch from a hub.
CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # what is fetched from a hub: no code, no pickles


def save(model: Any, path: str | os.PathLike[str], *, tokenizer: Any = None, force: bool = False) -> Path:
    """Write the model, its routers and their state (and a tokenizer or processor) to a folder, whole or not at all.

    A folder that is there already is replaced only with `force`. Of a model whose weights are spread over processes (FSDP2,
    `shard_experts`) every process calls this, and the first one writes; of any other, only those that call it write.
    """
    given, target = Path(path), Path(path).resolve()  # through links, to where the folder lies
    if not is_spread(model):
        _require_free(target, force)
        _write(model, target, tokenizer, {})
        return given
    on_first_process(lambda: _require_free(target, force))
    state = whole_state(model)
    with as_if_whole(model):
        on_first_process(lambda: _write(model, target, tokenizer, {"state_dict": state}))
    return given


def _require_free(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder.")
    if Path.cwd().is_relative_to(target):
        raise ValueError(f"{target} is the folder this process works in, and cannot be replaced; give one inside it.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ValueError(f"{target} exists and is not empty; choose another folder, or force=True to replace it.")


def _write(model: Any, target: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        model.save_pretrained(scratch / "new", **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch / "new")
        if target.exists():
            target.rename(scratch / "old")
        (scratch / "new").rename(target)
    finally:
        if (scratch / "old").exists() and not target.exists():
            (scratch / "old").rename(target)
        shutil.rmtree(scratch)


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """A model from a folder that `save` or a Trainer wrote, from a plain Hugging Face folder, or from a hub.

    No code from the folder is run, and only safetensors are read. `options` are those of `from_pretrained` (dtype,
    device_map, attn_implementation, ...).
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _fetched(str(path))
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter; load the model it belongs to, and put the adapter on with peft.")
    written = _read_config(folder)
    description = written.get("holdfast")
    if (written.get("model_type") == MODEL_TYPE) != (description is not None):
        raise ValueError(f"{folder}: its config does not say whether Holdfast wrote it; it was changed.")
    if description is not None:
        check_manifest(folder)
    _require_own_shards(folder)
    config = _config(folder, written)
    kind = _model_class(folder, config)
    if description is not None:
        kind = changed(kind)
        config.__class__ = with_mixin(type(config), ChangedConfig)
    model = _from_pretrained(kind, folder, config, options)
    for name in model.__dict__.pop("_frozen", ()):  # loading makes all of them trainable
        model.get_parameter(name).requires_grad_(False)
    if description is not None:  # the names of this file say nothing about those that a restored model is saved under
        model.__dict__.pop("_weight_conversions", None)
        for site in sites(model):  # `distributed_config` acts after the routers are in
            require_runnable(site, site.router)
    name_layers(model)
    return model


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ValueError(
            f"{name} is no folder here, and no model of that name could be fetched from the hub ({reason})."
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        written = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: it is no model folder, or not complete.") from None
    except (OSError, ValueError):
        raise ValueError(f"{folder / 'config.json'} cannot be read: the folder is damaged.") from None
    if not isinstance(written, dict):
        raise ValueError(f"{folder / 'config.json'} does not describe a model.")
    return written


def _require_own_shards(folder: Path) -> None:
    """An index of shards may name any path; these must be safetensors in the folder itself."""
    for index in folder.glob("*.safetensors.index*.json"):
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} cannot be read: the folder is damaged.") from None
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name!r}, which is no safetensors file of this folder.")
            if not (folder / name).is_file():
                raise ValueError(f"{folder} lacks {name}, which its {index.name} lists: the folder is not complete.")


def _config(folder: Path, written: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    description = written.get("holdfast")
    own_type = description.get("model_type") if isinstance(description, dict) else written.get("model_type")
    if not isinstance(own_type, str) or own_type not in CONFIG_MAPPING:
        raise ValueError(f"{folder}: this transformers knows no model of type {own_type!r}.")
    try:
        return CONFIG_MAPPING[own_type].from_dict({**_without_code(written), "model_type": own_type})
    except Exception as problem:  # a config's own checks raise what they like
        raise ValueError(f"{folder / 'config.json'} does not fit {own_type}: {_first_line(problem)}") from None


def _without_code(written: dict[str, Any]) -> dict[str, Any]:
    """A config without what names code, and without what keeps other loaders out."""
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in written.items()
        if name not in CODE and value != NO_DTYPE
    }


def _model_class(folder: Path, config: Any) -> Any:
    import transformers

    names = config.architectures
    kind: Any = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{folder}: its config names no model class of transformers (architectures: {names}).")
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise ValueError(f"{folder}: its config is for {config.model_type}, but its model class is {names[0]}.")
    return kind


def _from_pretrained(kind: Any, folder: Path, config: Any, options: dict[str, Any]) -> Any:
    settings = {"dtype": "auto", **options, "output_loading_info": True, "use_safetensors": True, "trust_remote_code": False}
    try:
        model, found = kind.from_pretrained(folder, config=config, **settings)
    except Exception as problem:  # a folder may hold anything, and what trips over it raises what it likes
        if "ignore_mismatched_sizes" in str(problem):
            raise ValueError(f"{folder} has weights of other shapes than its config says.") from None
        raise ValueError(f"{folder} cannot be loaded: {_first_line(problem)}") from None
    for key, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has too many"),
        ("mismatched_keys", "reshapes"),
    ):
        if found.get(key):
            names = sorted(str(name) for name in found[key])
            raise ValueError(f"{folder} {what} weights ({len(names)}, the first is {names[0]}): it does not fit its config.")
    return model


def _first_line(problem: Exception) -> str:
    lines = (str(problem).strip() or type(problem).__name__).splitlines()
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
