"""Save a model to a folder and open it: with `holdfast.load`, with transformers' Auto classes, or with a family's class.

A folder is a Hugging Face folder (config, safetensors, generation config) that also describes routers and holds their state.

After `import holdfast`, transformers opens such folders: it has four entries of ours in its registries (`REGISTRIES`), each
added when the module of that registry is imported (holdfast/registration.py).

    AutoConfig       the model type of our folders gives the config of the changed model (`FolderConfig`)
    Auto classes     such a config gives the changed model (`register_models`, model_classes.py)
    quantisers       `MixtralForCausalLM.from_pretrained` finds a `quantization_config` that names Holdfast. Transformers
                     lets such a method change the modules of a fresh model before the weights are read; ours installs
                     routers, quantises nothing, and removes itself from the model (`AppliesChanges`). Where Holdfast is not
                     imported, the method is unknown, and the entry `transformers_weights` stops the load
    Trainer          every Trainer has our callback (engines.py)
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.errors import require_known
from holdfast.files import recover_folder, replace_folder
from holdfast.hub.adapters import with_mixin
from holdfast.hub.engines import callback_class, is_sharded, on_first_rank
from holdfast.hub.folder_files import (
    CODE,
    IMPLEMENTATIONS,
    MODEL_TYPE,
    NEEDS_HOLDFAST,
    QUANT_METHOD,
    check_files,
    check_folder,
    check_manifest,
    config_class,
    downloaded_folder,
    family_values,
    first_line,
    is_modified,
    require_all_used,
    require_fitting_files,
    split_head_weights,
)
from holdfast.hub.model_classes import (
    HUB_OPTIONS,
    SAFE_OPTIONS,
    ModifiedModel,
    apply_saved_changes,
    config_and_options,
    finish_loading,
    initialise_head,
    modified_class,
    modified_config_class,
    modified_configs,
    register_models,
    saved_specs,
)
from holdfast.layers import name_layers
from holdfast.model_size import require_sane_numbers, require_sane_size, require_sane_top_k

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


NOT_FOR_SAVE = {"self", "save_directory", "kwargs", "push_to_hub", "token"}  # parameters of save_pretrained


def save(
    model: "nn.Module", path: str | os.PathLike[str], *, tokenizer: Any = None, force: bool = False, **options: Any
) -> Path:
    """Write the model, its routers and their state (and a tokenizer or processor) to a folder, atomically.

    Weights have the names and shapes of the family's checkpoints.

    `options` are those of `save_pretrained` (`max_shard_size`, `variant`, ...).

    An existing folder is replaced only with `force`. If the weights are sharded over ranks (FSDP2, `shard_experts`), every
    rank calls this, and the first one writes; otherwise every rank that calls it writes.
    """
    from transformers import PreTrainedModel

    if not hasattr(model, "save_pretrained"):
        kind = type(model).__name__
        if hasattr(getattr(model, "module", None), "save_pretrained"):
            raise ValueError(f"this {kind} wraps the model; save the one inside, model.module.")
        raise ValueError(f"{kind} is not a Hugging Face model: it has no save_pretrained.")
    known = set(inspect.signature(PreTrainedModel.save_pretrained).parameters) - NOT_FOR_SAVE
    for name in options:  # `save_pretrained` would ignore an unknown one without an error
        require_known("option of save_pretrained", name, known)
    given, target = Path(path), Path(path).resolve()  # the given path may be a link to the folder
    if not is_sharded(model):
        _require_free(target, force)
        _write(model, target, tokenizer, options)
        return given
    on_first_rank(lambda: _require_free(target, force))
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # Full weights on the first rank, and {} on the others. Every rank must call it.
    state = dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    whole = {"state_dict": state, "save_original_format": True, **options}
    config: Any = model.config
    # Only the first rank calls `save_pretrained`, which must not gather weights: it would wait for the other ranks for ever.
    plan = config.__dict__.pop("distributed_config", None)
    try:
        on_first_rank(lambda: _write(model, target, tokenizer, whole))
    finally:
        if plan is not None:
            config.distributed_config = plan
    return given


def _require_free(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder.")
    if Path.cwd().is_relative_to(target):
        raise ValueError(f"{target} is the working directory or contains it, and cannot be replaced; give one inside it.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ValueError(f"{target} exists and is not empty; choose another folder, or force=True to replace it.")


def _write(model: Any, target: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    def fill(folder: Path) -> None:
        if tokenizer is not None:  # first, because the model card says what the folder has
            tokenizer.save_pretrained(folder)
        model.save_pretrained(folder, **options)

    replace_folder(target, fill)


def load(path: str | os.PathLike[str], **options: Any) -> "PreTrainedModel":
    """Return a model from a folder of `save` or a Trainer, from any other Hugging Face folder, or from the hub.

    No code from the folder is run, and only safetensors are read. `options` are those of `from_pretrained` (dtype,
    device_map, attn_implementation, any value of the config, ...).
    """
    where = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
    folder = local_folder(path, **where)
    written = check_files(folder)
    config, options = config_and_options(folder, written, options)
    kind = _model_class(folder, config)
    kind = modified_class(kind) if is_modified(written, folder) else kind
    require_sane_top_k(config, folder)
    require_sane_size(folder, kind, config, options)
    model, found = _open(kind, folder, config, options)
    require_all_used(found, model, folder)
    name_layers(model)
    return model


def local_folder(path: str | os.PathLike[str], **where: Any) -> Path:
    """Return the folder of a model; one on the hub is downloaded first, without code and pickles."""
    folder = Path(path)
    return folder if folder.is_dir() or recover_folder(folder) else downloaded_folder(str(path), **where)


def load_with_head(
    folder: Path, auto: str, values: Mapping[str, Any], *, new_head: bool = False
) -> tuple["PreTrainedModel", dict[str, list[str]]]:
    """Return the folder's model in float32 with the head of an Auto class, and which of its head's weights differ.

    auto        the name of the Auto class in transformers
    values      entries of the config that replace those of the folder
    new_head    give the head new weights even if the folder has some that fit

    The second value has the names of weights that are new ("new"), and of weights of another head that the folder has and
    the model has not ("unused"). Raise ValueError for any other weight that is missing, of another shape or not used. Under
    `torch.device("meta")`, return the model without values; its weights are not read.
    """
    import torch
    import transformers

    written = check_files(folder)
    config, unknown = config_and_options(folder, written, values)
    if unknown:
        raise ValueError(f"the config of a {config.model_type} model has no entry {next(iter(unknown))!r}.")
    mapping = getattr(transformers, auto)._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"{folder} is a {config.model_type} model, and transformers has no {auto} for it.")
    kind = mapping[type(config)]
    options: dict[str, Any] = {"dtype": torch.float32}
    require_sane_top_k(config, folder)
    require_sane_size(folder, kind, config, options)
    if torch.get_default_device().type == "meta":
        return kind(config), {"new": [], "unused": []}
    options["ignore_mismatched_sizes"] = True  # only of the head: see below
    model, found = _open(kind, folder, config, options)
    report = split_head_weights(found, model, folder)
    if new_head:
        report["new"] = sorted({*report["new"], *initialise_head(model)})
    name_layers(model)
    return model, report


def _model_class(folder: Path, config: Any) -> Any:
    """Return the class of transformers that the config names, checked to fit the config."""
    import transformers

    names = config.architectures
    kind: Any = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{folder}: its config names no model class of transformers (architectures: {names}).")
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise ValueError(f"{folder}: its config is for {config.model_type}, but its model class is {names[0]}.")
    return kind


def _open(kind: Any, folder: Path, config: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the loaded model and transformers' loading info; turn any exception into a one-line ValueError."""
    is_ours = issubclass(kind, ModifiedModel)
    if is_ours:
        check_manifest(folder)
    from_pretrained = kind.from_checked if is_ours else kind.from_pretrained
    settings = {**options, **SAFE_OPTIONS, "output_loading_info": True}
    try:
        model, found = from_pretrained(folder, config=config, **settings)
        return model, found
    except Exception as problem:  # an untrusted folder may cause any kind of exception
        if "ignore_mismatched_sizes" in str(problem):
            raise ValueError(f"{folder} has weights of other shapes than its config says.") from None
        if type(problem) is ValueError and str(problem).startswith(str(folder)):
            raise problem from None
        raise ValueError(f"{folder} cannot be loaded: {first_line(problem)}") from None


class FolderConfig:
    """Mixin for `PreTrainedConfig`: the class of the model type of our folders; `from_dict` returns a changed config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        name = options.get("name_or_path") or "this folder"
        require_sane_numbers(config_dict, name)
        values = family_values(config_dict, name)
        return modified_config_class(config_class(values.get("model_type"), name)).from_dict(values, **options)


class HoldfastRouters:
    """Mixin for `QuantizationConfigMixin`: a folder's `quantization_config` that names Holdfast as the method."""

    def __init__(self, quantization_config: Any = None, **ignored: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.quantization_config = quantization_config

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class AppliesChanges:
    """Mixin for `HfQuantizer`: applies the changes that a config describes to a fresh model of the family's class."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)  # type: ignore[call-arg]
        self.pre_quantized = False  # the weights are to be read like those of a model that is not quantised

    def validate_environment(self, *arguments: Any, weights_only: bool = True, **options: Any) -> None:
        """Raise ValueError if the folder cannot be opened in this way."""
        if self.quantization_config.quantization_config is not None:
            raise ValueError("this model is quantised; open its folder with holdfast.load or an Auto class.")
        if not weights_only:
            raise ValueError("weights_only=False would run code from a pickle; this folder has safetensors.")

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the entry that stops the load without Holdfast, and everything that names code.

        Transformers calls this after it has read the config and before it uses it.
        """
        if getattr(config, "holdfast", None) is None:
            raise ValueError('its config has no "holdfast" section that names layers.')
        if getattr(config, "transformers_weights", None) == NEEDS_HOLDFAST:
            del config.transformers_weights
        for name in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(config, name, "")):
                raise ValueError(f"{getattr(config, name)} is a kernel to download; open this folder with holdfast.load.")
        for name in {*CODE} - {*IMPLEMENTATIONS}:
            config.__dict__.pop(name, None)
        return config

    update_tp_plan = update_attn_implementation  # the name that transformers 5.17 calls

    def preprocess_model(self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **options: Any) -> None:
        """Check the folder and apply its changes to the fresh model, before the weights are read."""
        files = [str(file) for file in checkpoint_files or ()]
        folder = Path(files[0]).parent if files else Path(model.config.name_or_path)
        if not files or any(not file.endswith(".safetensors") for file in files):
            raise ValueError(f"{folder} has no safetensors; other formats are not read.")
        check_folder(folder)
        _remove_quantizer_marks(model)
        apply_saved_changes(model)
        require_fitting_files(files, model, saved_specs(model))

    def postprocess_model(self, model: Any, **options: Any) -> Any:
        """Finish a model whose weights were read."""
        assert isinstance(model, ModifiedModel)
        _remove_quantizer_marks(model)
        finish_loading(model)
        return model

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


def _remove_quantizer_marks(model: Any) -> None:
    """Remove the marks of a quantised model: this one is not quantised."""
    model.__dict__.pop("hf_quantizer", None)
    model.config.__dict__.pop("quantization_config", None)


def _register_config(module: ModuleType) -> None:
    from transformers.configuration_utils import PreTrainedConfig

    # With this module's name: transformers prefers code from the folder to classes of its own modules.
    kind = type("HoldfastConfig", (FolderConfig, PreTrainedConfig), {"__module__": __name__})
    module.AutoConfig.register(MODEL_TYPE, kind, exist_ok=True)


def _register_quantizer(module: ModuleType) -> None:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if QUANT_METHOD not in module.AUTO_QUANTIZER_MAPPING:
        module.register_quantization_config(QUANT_METHOD)(with_mixin(QuantizationConfigMixin, HoldfastRouters))
        module.register_quantizer(QUANT_METHOD)(with_mixin(HfQuantizer, AppliesChanges))


def _register_callback(module: ModuleType) -> None:
    if callback_class() not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(callback_class())


REGISTRIES: dict[str, Callable[[ModuleType], object]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": lambda module: list(map(register_models, [*modified_configs])),
    "transformers.quantizers.auto": _register_quantizer,
    "transformers.trainer": _register_callback,
}
