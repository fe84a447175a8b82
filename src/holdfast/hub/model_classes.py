"""Models and configs that know they were changed: saving writes what was changed, loading repeats it, then fills in weights.

Both keep their class's name and stay instances of it. `config_file` says what is written, and how others are kept from
reading it as something else.


What `import holdfast` registers with transformers, so that its Auto classes and families' own classes open our folders.

Each entry is made in transformers' own registries when the module that holds the registry is imported: `import holdfast`
does not import transformers.

How a family's own class (`MixtralForCausalLM.from_pretrained`) opens the folder of a changed model.

Transformers lets a folder name a method that changes the modules of a fresh model before its weights are read. It is meant
for quantisation, and found by the config's `quantization_config`; ours changes routers, quantises nothing, and takes itself
off the model when that is loaded. Where Holdfast is not imported the method is unknown, and `transformers_weights` stops the
load.

The config class of `"model_type": "holdfast"`: what `AutoConfig` asks for the config of a changed model.

Apart from `own_class`, whose imports load the registry of quantisers and so would import that file a second time.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from holdfast.hub.adapters import NAME as ROUTER_STATE
from holdfast.hub.adapters import CarriesRouterState, carry_state, with_mixin, without_mixin
from holdfast.hub.context import LOOKS_AHEAD
from holdfast.hub.engines import is_spread
from holdfast.hub.folder_files import (
    CODE,
    MODEL_TYPE,
    NEEDS_HOLDFAST,
    check_folder,
    config_class,
    family_values,
    fetched,
    is_changed,
    require_all_used,
    require_fitting_files,
    require_writable,
    unwrapped,
    wrapped,
    write_card,
    write_manifest,
)
from holdfast.hub.install import connect, initialise, repeat, require_runnable
from holdfast.hub.layers import LayerSpec, Site, describe, names_in_base, names_in_model, read, sites
from holdfast.layers import name_layers
from holdfast.model_size import require_sane_numbers, require_sane_size

HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")  # an owner and a name
FETCHING = ("revision", "cache_dir", "token", "force_download", "local_files_only")  # options that say where from
PASSED_ON = ("dtype", "torch_dtype", "quantization_config")  # to the model, though a config has them too
SAFE = {"use_safetensors": True, "weights_only": True, "trust_remote_code": False}


class ChangedConfig:
    """Mixed into the class of a changed model's config; Auto classes then find the changed models of such a config."""

    def __init_subclass__(cls, **options: Any) -> None:

        super().__init_subclass__(**options)
        cls.__module__ = __name__  # transformers 5.17 registers nothing for configs of its own modules
        register_models(cls)

    def to_diff_dict(self) -> dict[str, Any]:
        return wrapped(super().to_diff_dict())  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """A changed model's config from the family's section of a config.json; a plain model's one is a plain config."""
        values = unwrapped(config_dict)
        if values.get("holdfast") is None:
            return without_mixin(cls).from_dict(values, **options)
        return super().from_dict(values, **options)  # type: ignore[misc]


class ChangedModel(CarriesRouterState):
    """Mixed into the class of a changed model."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """From a config that describes changes: the model with them, without their weights (`load`)."""
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        repeat_changes(self)

    def _init_weights(self, module: Any) -> None:
        """Give the modules of a model that was made without memory (on `meta`) the values they start with."""
        super()._init_weights(module)  # type: ignore[misc]
        wiring = self.__dict__.get("_holdfast")
        if wiring is not None and id(module) == id(self):  # comes last, after its parts
            initialise(module, wiring.specs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, config: Any = None, **options: Any) -> Any:
        """As the family's own, with the folder's changes. None of its code is run, and only safetensors are read."""
        name, family = pretrained_model_name_or_path, without_mixin(cls)
        if name is None:  # a config and a state dict in its place
            return super().from_pretrained(None, *arguments, config=config, **options)  # type: ignore[misc]
        where = {option: options[option] for option in FETCHING if options.get(option) is not None}
        root = Path(name) if Path(name).is_dir() else fetched(str(name), **where)
        folder = root / (options.pop("subfolder", None) or "")
        written = check_folder(folder)
        if not is_changed(written, folder) and not isinstance(config, ChangedConfig):
            return family.from_pretrained(name, *arguments, config=config, **options)
        if not hasattr(config, "to_dict"):
            config, options = read_changed(folder, written, options)
        require_sane_size(folder, cls, config, options)
        wants_info = options.pop("output_loading_info", False)
        for option in FETCHING:
            options.pop(option, None)
        model, found = cls.from_checked(folder, *arguments, config=config, **options)
        if not Path(name).is_dir():  # rather than where the hub's files are kept here
            model.name_or_path = model.config.name_or_path = str(name)
        return (model, found) if wants_info else model

    @classmethod
    def from_checked(cls, folder: Path, *arguments: Any, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        """The model and its loading info, from a folder whose checksums were compared."""
        settings = {**options, **SAFE, "output_loading_info": True}
        model, found = super().from_pretrained(folder, *arguments, config=config, **settings)  # type: ignore[misc]
        require_all_used(found, model, folder, layers=model.__dict__["_holdfast"].specs)
        finish_loading(model)
        return model, found

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        # Under the names they have here, not those of the original checkpoint: a Trainer resumes by these.
        options.setdefault("save_original_format", False)
        _require_whole(self, options)
        if options.get("push_to_hub"):
            raise ValueError("push_to_hub=True would upload before the checksums are written; use model.push_to_hub(name).")
        require_writable(self)
        super().save_pretrained(save_directory, *arguments, **options)  # type: ignore[misc]
        # Of a model with adapters of transformers' own (add_adapter), only an adapter was written.
        if options.get("is_main_process", True) and not getattr(self, "_hf_peft_config_loaded", False):
            write_manifest(Path(save_directory))
            write_card(Path(save_directory), self.config.holdfast)  # type: ignore[attr-defined]


class ChangedPart:
    """Mixed into the class of a model inside a changed one, with a config of its own that describes no changes: a tower."""

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        raise ValueError(f"this {type(self).__name__} is a part of a changed model; save the whole model.")


class ChangedGenerator(ChangedModel):
    """Mixed into the class of one that generates."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        wiring = self.__dict__["_holdfast"]
        if wiring.looks_ahead:
            raise ValueError(f"{LOOKS_AHEAD}; it cannot generate.")
        with wiring.ledger.generation():
            return super().generate(*arguments, **options)  # type: ignore[misc]


def changed(kind: Any) -> Any:
    """The class of models of this kind that were changed."""
    return with_mixin(kind, ChangedGenerator if hasattr(kind, "generate") else ChangedModel)


def changed_config(kind: Any) -> Any:
    """The class of configs of this kind that describe changes."""
    return with_mixin(kind, ChangedConfig)


def read_changed(folder: object, written: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config in the config.json of a changed model with `options` for it, and the options that are for the model."""
    values = family_values(written, folder)
    kind = changed_config(config_class(values.get("model_type"), folder))
    return with_options(kind, values, options)


def with_options(kind: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A config of class `kind` from `values` and those of `options` that are for it, and the other options."""
    kept = {name: value for name, value in options.items() if name in PASSED_ON}
    asked = {name: value for name, value in options.items() if name not in kept}
    config, unused = kind.from_dict(dict(values), return_unused_kwargs=True, **asked)
    return config, {**unused, **kept}


def apply_specs(model: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Change a fresh model as `specs` say, without weights, and connect its layers."""
    wire(model, repeat(model, specs), specs)


def repeat_changes(model: Any) -> None:
    """Change a fresh model as its config says. Its weights are still to come."""
    apply_specs(model, specs_in(model))
    model.__dict__["_frozen"] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def specs_in(model: Any) -> dict[str, LayerSpec]:
    """What the model's config says about its layers, under their names in this model."""
    return names_in_model(model, read(model.config.holdfast))


def finish_loading(model: Any) -> None:
    """What is to be done once a changed model has its weights."""
    model.__dict__["_opened_changed"] = True
    for name in model.__dict__.pop("_frozen", ()):  # loading makes all of them trainable
        model.get_parameter(name).requires_grad_(False)
    # The names of this folder's weights say nothing about those that a restored model is saved under.
    model.__dict__.pop("_weight_conversions", None)
    for site in sites(model):  # `distributed_config` acts after the routers are in
        require_runnable(site, site.router)
    name_layers(model)


def _require_whole(model: Any, options: dict[str, Any]) -> None:
    """A part of the weights would be written as if it were all of them."""
    if options.get("state_dict") is None and is_spread(model) and getattr(model.config, "distributed_config", None) is None:
        raise ValueError("the weights are spread over processes; call holdfast.save on every process, which gathers them.")


def wire(model: Any, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Connect the layers that `specs` names, and give the model and its config classes that save these changes."""
    connect(model, found, specs)
    if not specs:
        saves_plainly(model)
        return
    saves_itself(model, describe(model.config.model_type, specs))
    name_layers(model)


def saves_itself(model: nn.Module, description: dict[str, Any]) -> None:
    """From now on `model.save_pretrained` writes the description too."""
    config: Any = model.config
    base = _base_model(config)
    layers = names_in_base(model, description["layers"])
    config.holdfast = {**description, **({} if base is None else {"base_model": base}), "layers": layers}
    if not isinstance(config, ChangedConfig):
        config.__class__ = changed_config(type(config))
    if not isinstance(model, ChangedModel):
        model.__class__ = changed(type(model))
    inside = tuple(f"{name}." for name in description["layers"])
    for name, part in _models_in(model):
        if any(layer.startswith(f"{name}.") for layer in inside) and not isinstance(part, ChangedModel | ChangedPart):
            part.__class__ = changed(type(part)) if part.config is config else with_mixin(type(part), ChangedPart)
    model._modules.pop(ROUTER_STATE, None)  # of the routers that were there before
    carry_state(model)


def _models_in(model: nn.Module) -> list[tuple[str, Any]]:
    """The models inside a model, with names: those that could be saved by themselves."""
    return [(name, part) for name, part in model.named_modules() if name and hasattr(part, "save_pretrained")]


def _base_model(config: Any) -> str | None:
    """Return the hub id of the model that was changed; None where it is not known, or a local path."""
    former = getattr(config, "holdfast", None)
    name = former.get("base_model") if isinstance(former, dict) else getattr(config, "name_or_path", None)
    known = isinstance(name, str) and HUB_NAME.fullmatch(name) and ".." not in name and not Path(name).exists()
    return str(name) if known else None


def saves_plainly(model: nn.Module) -> None:
    """The model's own class again."""
    config: Any = model.config
    if isinstance(config, ChangedConfig):
        config.__class__ = without_mixin(type(config))
        delattr(config, "holdfast")
    model._modules.pop(ROUTER_STATE, None)
    for part in (model, *(part for _, part in _models_in(model))):
        if isinstance(part, ChangedModel | ChangedPart):
            part.__class__ = without_mixin(type(part))


_changed_configs: list[Any] = []  # for which models were registered, or are to be


def register_models(config: Any) -> None:
    """Let every Auto class of a family open the changed models that have this class of config."""

    if config not in _changed_configs:
        _changed_configs.append(config)
    module = sys.modules.get("transformers.models.auto.modeling_auto")
    if module is None:
        return  # `_register_all_models` will, once it is imported
    for auto in vars(module).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and without_mixin(config) in mapping:
            kind: Any = mapping[without_mixin(config)]
            if isinstance(kind, type):
                auto.register(config, changed(kind), exist_ok=True)  # type: ignore[attr-defined]
                if mapping[config] is not changed(kind):
                    raise ValueError(f"this transformers did not register {kind.__name__} with {auto.__name__}.")


def _register_all_models(module: ModuleType) -> None:
    for config in list(_changed_configs):
        register_models(config)


def _register_config(module: ModuleType) -> None:
    from transformers.configuration_utils import PreTrainedConfig

    # A class of this module: transformers lets the code of a folder go before classes of its own modules.
    kind = type("HoldfastConfig", (FolderConfig, PreTrainedConfig), {"__module__": __name__})
    module.AutoConfig.register(MODEL_TYPE, kind, exist_ok=True)


def _register_own_class(module: ModuleType) -> None:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if MODEL_TYPE not in module.AUTO_QUANTIZER_MAPPING:
        module.register_quantization_config(MODEL_TYPE)(with_mixin(QuantizationConfigMixin, HoldfastRouters))
        module.register_quantizer(MODEL_TYPE)(with_mixin(HfQuantizer, RepeatsChanges))


REGISTRIES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_all_models,
    "transformers.quantizers.auto": _register_own_class,
}


class _Finder(MetaPathFinder):
    """Finds what the others find, and registers with a registry once it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRIES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads as `loader` does, then registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # what shows a module's source asks for more than loading

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        REGISTRIES[module.__name__](module)


def register() -> None:
    """Register with what is imported of transformers, and with the rest of it when that is imported."""
    for name, entry in REGISTRIES.items():
        module = sys.modules.get(name)
        if module is not None:
            entry(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class HoldfastRouters:
    """Mixed into `QuantizationConfigMixin`: a folder's `quantization_config`, which names Holdfast as the method."""

    def __init__(self, quantization_config: Any = None, **ignored: Any) -> None:
        self.quant_method = MODEL_TYPE
        self.quantization_config = quantization_config

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class RepeatsChanges:
    """Mixed into `HfQuantizer`: repeats on a fresh model the changes that its config describes."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)  # type: ignore[call-arg]
        self.pre_quantized = False  # weights are read as those of a model that is not quantised

    def validate_environment(self, *arguments: Any, weights_only: bool = True, **options: Any) -> None:
        if self.quantization_config.quantization_config is not None:
            raise ValueError("this model is quantised; open its folder with holdfast.load or an Auto class.")
        if not weights_only:
            raise ValueError("weights_only=False would run what a pickle says; this folder holds safetensors.")

    def update_attn_implementation(self, config: Any) -> Any:
        """Let the config through: it is asked for after the config is read, and before anything is done with it."""
        return self._let_through(config)

    def update_tp_plan(self, config: Any) -> Any:
        """The same, under the name that transformers 5.17 calls."""
        return self._let_through(config)

    def _let_through(self, config: Any) -> Any:
        if getattr(config, "holdfast", None) is None:
            raise ValueError('its config has no "holdfast" section that names layers.')
        if getattr(config, "transformers_weights", None) == NEEDS_HOLDFAST:
            del config.transformers_weights
        for name in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(config, name, "")):
                raise ValueError(f"{getattr(config, name)} is a kernel to fetch; open this folder with holdfast.load.")
        for name in CODE:
            if "_implementation" not in name:
                config.__dict__.pop(name, None)
        return config

    def preprocess_model(self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **options: Any) -> None:
        files = [str(file) for file in checkpoint_files or ()]
        folder = Path(files[0]).parent if files else Path(model.config.name_or_path)
        if not files or any(not file.endswith(".safetensors") for file in files):
            raise ValueError(f"{folder} holds no safetensors; others are not read.")
        check_folder(folder)
        _forget(model)
        repeat_changes(model)
        require_fitting_files(files, model, specs_in(model))

    def postprocess_model(self, model: Any, **options: Any) -> Any:
        assert isinstance(model, ChangedModel)
        _forget(model)
        finish_loading(model)
        return model

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True


def _forget(model: Any) -> None:
    """The model is not quantised: leave nothing on it that says so."""
    model.__dict__.pop("hf_quantizer", None)
    model.config.__dict__.pop("quantization_config", None)


class FolderConfig:
    """Mixed into `PreTrainedConfig`: `from_dict` returns the family's config with the changes."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        name = options.get("name_or_path") or "this folder"
        require_sane_numbers(config_dict, name)
        values = family_values(config_dict, name)
        return changed_config(config_class(values.get("model_type"), name)).from_dict(values, **options)
