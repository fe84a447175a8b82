"""Classes of changed models and configs: saving writes the changes, loading applies them again and then reads the weights.

When `reroute` or `sparsify` changes a model, `install_hooks_and_classes` gives the model and its config subclasses of their
own classes (`ModifiedModel`, `ModifiedConfig`), with the same name: they are still instances of the family's classes.
`save_pretrained` then writes the changes to config.json (folder_files.py has the format), and `from_pretrained` builds the
family's model, applies the changes to it without weights, and reads the weights. `restore_save_classes` undoes this.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.hub.adapters import ROUTER_STATE, SavesRouterState, add_router_state, with_mixin, without_mixin
from holdfast.hub.context import NOT_CAUSAL
from holdfast.hub.engines import is_sharded
from holdfast.hub.folder_files import (
    check_folder,
    config_class,
    downloaded_folder,
    family_values,
    first_line,
    is_modified,
    require_all_used,
    require_writable,
    unwrapped_config,
    wrapped_config,
    write_card,
    write_manifest,
)
from holdfast.hub.install import initialise, install_hooks, install_specs, require_runnable
from holdfast.hub.layers import MoELayerRef, moe_layers
from holdfast.hub.specs import LayerSpec, describe, names_in_model, read_specs
from holdfast.layers import name_layers
from holdfast.model_size import require_sane_size

HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")  # an owner and a name
HUB_OPTIONS = ("revision", "cache_dir", "token", "force_download", "local_files_only")  # where to download from
MODEL_OPTIONS = ("dtype", "torch_dtype", "quantization_config")  # for the model, though a config has entries of these names
SAFE_OPTIONS = {"use_safetensors": True, "weights_only": True, "trust_remote_code": False}


class ModifiedConfig:
    """Mixin for the config class of a changed model. Auto classes find the changed model by the class of its config."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__module__ = __name__  # transformers 5.17 registers nothing for config classes of its own modules
        register_models(cls)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return wrapped_config(super().to_diff_dict())  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """Return a config from the family's section of a config.json; of the family's own class if it has no "holdfast"."""
        values = unwrapped_config(config_dict)
        if values.get("holdfast") is None:
            return without_mixin(cls).from_dict(values, **options)
        return super().from_dict(values, **options)  # type: ignore[misc]


class ModifiedModel(SavesRouterState):
    """Mixin for the class of a changed model."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """Build the model with the changes that the config describes; their weights are loaded afterwards."""
        # Some families build their base model through an Auto class, from this config: it must be the unchanged one.
        description = config.__dict__.pop("holdfast", None)
        try:
            super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        finally:
            if description is not None:
                config.holdfast = description
        if description is not None:
            apply_saved_changes(self)

    def _init_weights(self, module: Any) -> None:
        """Give the modules of a model that was built on `meta` their initial values."""
        super()._init_weights(module)  # type: ignore[misc]
        hooks = self.__dict__.get("_holdfast")
        if hooks is not None and id(module) == id(self):  # transformers calls this for the model after its submodules
            initialise(module, hooks.specs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, config: Any = None, **options: Any) -> Any:
        """Load a model as the family's class does, with the folder's changes. No code is run, only safetensors are read."""
        name, family = pretrained_model_name_or_path, without_mixin(cls)
        if name is None:  # a config and a state dict are given instead
            return super().from_pretrained(None, *arguments, config=config, **options)  # type: ignore[misc]
        where = {option: options[option] for option in HUB_OPTIONS if options.get(option) is not None}
        root = Path(name) if Path(name).is_dir() else downloaded_folder(str(name), **where)
        folder = root / (options.pop("subfolder", None) or "")
        written = check_folder(folder)
        if not is_modified(written, folder) and not isinstance(config, ModifiedConfig):
            return family.from_pretrained(name, *arguments, config=config, **options)
        if not hasattr(config, "to_dict"):
            config, options = config_and_options(folder, written, options)
        require_sane_size(folder, cls, config, options)
        wants_info = options.pop("output_loading_info", False)
        for option in HUB_OPTIONS:
            options.pop(option, None)
        model, found = cls.from_checked(folder, *arguments, config=config, **options)
        if not Path(name).is_dir():  # not the local folder with the hub's files
            model.name_or_path = model.config.name_or_path = str(name)
        return (model, found) if wants_info else model

    @classmethod
    def from_checked(cls, folder: Path, *arguments: Any, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model and its loading info, from a folder whose checksums were compared."""
        settings = {**options, **SAFE_OPTIONS, "output_loading_info": True}
        model, found = super().from_pretrained(folder, *arguments, config=config, **settings)  # type: ignore[misc]
        require_all_used(found, model, folder, layers=model.__dict__["_holdfast"].specs)
        finish_loading(model)
        return model, found

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """Save as the family's class does, with the changes, a manifest and a model card."""
        # A Trainer is the caller that names `state_dict`, also with None. It resumes by the names of weights in the model,
        # so these are written for it. Without `state_dict`, weights get the names of the family's checkpoints.
        options.setdefault("save_original_format", "state_dict" not in options)
        is_distributed = getattr(self.config, "distributed_config", None) is not None  # type: ignore[attr-defined]
        if options.get("state_dict") is None and is_sharded(self) and not is_distributed:  # type: ignore[arg-type]
            raise ValueError("the weights are sharded over ranks; call holdfast.save on every rank, which gathers them.")
        require_writable(self)
        super().save_pretrained(save_directory, *arguments, **options)  # type: ignore[misc]
        if options.get("is_main_process", True):
            self._complete_folder(Path(save_directory))

    def _complete_folder(self, folder: Path) -> None:
        """Write the manifest and the model card, unless only an adapter was saved (transformers' `add_adapter`)."""
        if not getattr(self, "_hf_peft_config_loaded", False):
            write_manifest(folder)
            write_card(folder, self)

    def _upload_modified_files(self, working_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Upload as transformers does, which has not called `_complete_folder` yet, or has replaced the card."""
        self._complete_folder(Path(working_dir))
        return super()._upload_modified_files(working_dir, *arguments, **options)  # type: ignore[misc]


class ModifiedGenerator(ModifiedModel):
    """Mixin for the class of a changed model that generates."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Generate as the family's class does. Raise ValueError if a router breaks causality."""
        hooks = self.__dict__["_holdfast"]
        if hooks.breaks_causality:
            raise ValueError(f"{NOT_CAUSAL}; it cannot generate.")
        with hooks.forwards.generation():
            return super().generate(*arguments, **options)  # type: ignore[misc]


class ModifiedSubmodel:
    """Mixin for a model inside a changed one (a tower), whose own config does not describe the changes."""

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        raise ValueError(f"this {type(self).__name__} is a part of a changed model; save the whole model.")


def modified_class(kind: Any) -> Any:
    """Return the class of changed models of the class `kind`."""
    return with_mixin(kind, ModifiedGenerator if hasattr(kind, "generate") else ModifiedModel)


def modified_config_class(kind: Any) -> Any:
    """Return the class of configs of the class `kind` that describe changes."""
    return with_mixin(kind, ModifiedConfig)


def install_hooks_and_classes(model: Any, found: list[MoELayerRef], specs: Mapping[str, LayerSpec]) -> None:
    """Put hooks on the layers that `specs` names, and give the model and its config classes that save these changes."""
    install_hooks(model, found, specs)
    if not specs:
        restore_save_classes(model)
        return
    config, description = model.config, describe(model, specs)
    former = getattr(config, "holdfast", None)
    base = former.get("base_model") if isinstance(former, dict) else getattr(config, "name_or_path", None)
    if isinstance(base, str) and HUB_NAME.fullmatch(base) and ".." not in base and not Path(base).exists():
        description["base_model"] = base  # the hub id of the model that was changed
    config.holdfast = description
    if not isinstance(config, ModifiedConfig):
        config.__class__ = modified_config_class(type(config))
    if not isinstance(model, ModifiedModel):
        model.__class__ = modified_class(type(model))
    for name, part in _models_in(model):
        has_changes = any(layer.startswith(f"{name}.") for layer in specs)
        if has_changes and not isinstance(part, ModifiedModel | ModifiedSubmodel):
            same_config = part.config is config
            part.__class__ = modified_class(type(part)) if same_config else with_mixin(type(part), ModifiedSubmodel)
    model._modules.pop(ROUTER_STATE, None)  # that of the routers before this change
    add_router_state(model)
    model.__dict__.pop("_weight_conversions", None)  # of the folder it was loaded from: save as the family's checkpoints are
    name_layers(model)


def restore_save_classes(model: nn.Module) -> None:
    """Give the model and its config their own classes back."""
    config: Any = model.config
    if isinstance(config, ModifiedConfig):
        config.__class__ = without_mixin(type(config))
        delattr(config, "holdfast")
    model._modules.pop(ROUTER_STATE, None)
    for part in (model, *(part for _, part in _models_in(model))):
        if isinstance(part, ModifiedModel | ModifiedSubmodel):
            part.__class__ = without_mixin(type(part))


def _models_in(model: nn.Module) -> list[tuple[str, Any]]:
    """Return name and module of the models inside a model: those that have a `save_pretrained`."""
    return [(name, part) for name, part in model.named_modules() if name and hasattr(part, "save_pretrained")]


def config_and_options(folder: Path, written: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the config from a config.json with the `options` that it has entries for, and the other options."""
    values = family_values(written, folder)
    kind = config_class(values.get("model_type"), folder)
    kind = modified_config_class(kind) if is_modified(written, folder) else kind
    for_model = {name: value for name, value in options.items() if name in MODEL_OPTIONS}
    for_config = {name: value for name, value in options.items() if name not in for_model}
    try:
        config, unused = kind.from_dict(dict(values), return_unused_kwargs=True, **for_config)
    except Exception as problem:  # a config's own checks raise any kind of exception
        file, family = folder / "config.json", values.get("model_type")
        raise ValueError(f"{file} does not fit {family}: {first_line(problem)}") from None
    return config, {**unused, **for_model}


def apply_specs(model: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Change a fresh model as `specs` say, without weights, and install its hooks and classes."""
    install_hooks_and_classes(model, install_specs(model, specs), specs)


def apply_saved_changes(model: Any) -> None:
    """Change a fresh model as its config says; its weights are loaded afterwards."""
    apply_specs(model, saved_specs(model))
    model.__dict__["_frozen"] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def saved_specs(model: Any) -> dict[str, LayerSpec]:
    """Return the specs that the model's config describes, with the names of layers in this model."""
    return names_in_model(model, read_specs(model.config.holdfast))


def finish_loading(model: Any) -> None:
    """Finish a changed model whose weights were loaded: freeze parameters again and check that its routers can run."""
    model.__dict__["_opened_modified"] = True
    for name in model.__dict__.pop("_frozen", ()):  # loading makes all parameters trainable
        model.get_parameter(name).requires_grad_(False)
    # The names of weights in this folder are not those under which a restored model is to be saved.
    model.__dict__.pop("_weight_conversions", None)
    for moe_layer in moe_layers(model):  # `distributed_config` is applied after the routers were installed
        require_runnable(moe_layer, moe_layer.router)
    name_layers(model)


def initialise_head(model: Any) -> list[str]:
    """Give the weights outside of the base model new values, as for a new model; return their names."""
    heads = [(name, part) for name, part in model.named_children() if part is not model.base_model and name != ROUTER_STATE]
    for _, head in heads:
        for part in head.modules():
            for owner in (part, *part.parameters(recurse=False)):
                owner.__dict__.pop("_is_hf_initialized", None)
            model._init_weights(part)
    return [f"{name}.{weight}" for name, head in heads for weight, _ in head.named_parameters()]


modified_configs: list[Any] = []  # all classes of `modified_config_class`


def register_models(config: Any) -> None:
    """Make every Auto class of a family open the changed models with this class of config."""
    if config not in modified_configs:
        modified_configs.append(config)
    module = sys.modules.get("transformers.models.auto.modeling_auto")
    if module is None:
        return  # done when it is imported (checkpoint.py)
    for auto in vars(module).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and without_mixin(config) in mapping:
            kind: Any = mapping[without_mixin(config)]
            # A few classes of transformers declare the config of another class, and its Auto classes refuse those.
            if isinstance(kind, type) and issubclass(config, getattr(kind, "config_class", None) or object):
                auto.register(config, modified_class(kind), exist_ok=True)  # type: ignore[attr-defined]
                if mapping[config] is not modified_class(kind):
                    raise ValueError(f"this transformers did not register {kind.__name__} with {auto.__name__}.")
