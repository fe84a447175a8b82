"""A Hugging Face folder (config, safetensors, generation config) that also describes routers and holds their state."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import unknown
from holdfast.hub.engines import as_if_whole, is_spread, on_first_process, whole_state
from holdfast.hub.folder_files import (
    check_files,
    check_manifest,
    config_class,
    family_values,
    fetched,
    is_changed,
    require_all_used,
)
from holdfast.hub.model_classes import FETCHING, SAFE, changed, changed_config, with_options
from holdfast.layers import name_layers
from holdfast.model_size import require_sane_choice, require_sane_size
from holdfast.replacing import replace_folder, restore

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


NOT_FOR_SAVE = {"self", "save_directory", "kwargs", "push_to_hub", "token"}  # of save_pretrained's parameters


def save(
    model: "nn.Module", path: str | os.PathLike[str], *, tokenizer: Any = None, force: bool = False, **options: Any
) -> Path:
    """Write the model, its routers and their state (and a tokenizer or processor) to a folder, whole or not at all.

    `options` are those of `save_pretrained` (`max_shard_size`, `variant`, ...).

    A folder that is there already is replaced only with `force`. Of a model whose weights are spread over processes (FSDP2,
    `shard_experts`) every process calls this, and the first one writes; of any other, only those that call it write.
    """
    _require_known(model, options)
    given, target = Path(path), Path(path).resolve()  # the path as given may be a link: to where the folder lies
    if not is_spread(model):
        _require_free(target, force)
        _write(model, target, tokenizer, options)
        return given
    on_first_process(lambda: _require_free(target, force))
    state = whole_state(model)
    with as_if_whole(model):
        on_first_process(lambda: _write(model, target, tokenizer, {"state_dict": state, **options}))
    return given


def _require_known(model: Any, options: dict[str, Any]) -> None:
    """`save_pretrained` takes any option, and passes over those it does not know."""
    from transformers import PreTrainedModel

    known = set(inspect.signature(PreTrainedModel.save_pretrained).parameters) - NOT_FOR_SAVE
    for name in options:
        if name not in known:
            raise ValueError(unknown("option of save_pretrained", name, sorted(known)))


def _require_free(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder.")
    if Path.cwd().is_relative_to(target):
        raise ValueError(f"{target} is the folder this process works in, and cannot be replaced; give one inside it.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ValueError(f"{target} exists and is not empty; choose another folder, or force=True to replace it.")


def _write(model: Any, target: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    def fill(folder: Path) -> None:
        model.save_pretrained(folder, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    replace_folder(target, fill)


def load(path: str | os.PathLike[str], **options: Any) -> "PreTrainedModel":
    """A model from a folder that `save` or a Trainer wrote, from a plain Hugging Face folder, or from a hub.

    No code from the folder is run, and only safetensors are read. `options` are those of `from_pretrained` (dtype,
    device_map, attn_implementation, any value of the config, ...).
    """
    name, folder = str(path), Path(path)
    if not folder.is_dir() and not restore(folder):
        where = {option: options.pop(option) for option in FETCHING if option in options}
        folder = fetched(name, **where)
    written = check_files(folder)
    ours = is_changed(written, folder)
    config, options = _config(folder, written, options)
    kind = _model_class(folder, config)
    require_sane_choice(config, folder)
    require_sane_size(folder, changed(kind) if ours else kind, config, options)
    if ours:
        check_manifest(folder)
    model = _open(changed(kind).from_checked if ours else kind.from_pretrained, folder, config, options)
    name_layers(model)
    return model


def _config(folder: Path, written: dict[str, Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, and the options that are not for it."""
    values = family_values(written, folder)
    kind = config_class(values.get("model_type"), folder)
    kind = changed_config(kind) if is_changed(written, folder) else kind
    try:
        return with_options(kind, values, options)
    except Exception as problem:  # a config's own checks raise what they like
        family = values.get("model_type")
        raise ValueError(f"{folder / 'config.json'} does not fit {family}: {_first_line(problem)}") from None


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


def _open(opens: Callable[..., Any], folder: Path, config: Any, options: dict[str, Any]) -> Any:
    """What `opens` makes of the folder, with one sentence for whatever it raises."""
    settings = {**options, **SAFE, "output_loading_info": True}
    try:
        model, found = opens(folder, config=config, **settings)
    except Exception as problem:  # a folder may hold anything, and what trips over it raises what it likes
        if "ignore_mismatched_sizes" in str(problem):
            raise ValueError(f"{folder} has weights of other shapes than its config says.") from None
        if type(problem) is ValueError and str(problem).startswith(str(folder)):
            raise problem from None
        raise ValueError(f"{folder} cannot be loaded: {_first_line(problem)}") from None
    require_all_used(found, model, folder)
    return model


def _first_line(problem: Exception) -> str:
    lines = (str(problem).strip() or type(problem).__name__).splitlines()
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
