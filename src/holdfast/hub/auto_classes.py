"""What `import holdfast` registers with transformers, so that its Auto classes and families' own classes open our folders.

Each entry is made in transformers' own registries when the module that holds the registry is imported: `import holdfast`
does not import transformers.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.hub.config_file import MODEL_TYPE
from holdfast.hub.subclasses import with_mixin, without_mixin

_changed_configs: list[Any] = []  # for which models were registered, or are to be


def register_models(config: Any) -> None:
    """Let every Auto class of a family open the changed models that have this class of config."""
    from holdfast.hub.changed import changed

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

    from holdfast.hub.folder_config import FolderConfig

    # A class of this module: transformers lets the code of a folder go before classes of its own modules.
    kind = type("HoldfastConfig", (FolderConfig, PreTrainedConfig), {"__module__": __name__})
    module.AutoConfig.register(MODEL_TYPE, kind, exist_ok=True)


def _register_own_class(module: ModuleType) -> None:
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from holdfast.hub.own_class import HoldfastRouters, RepeatsChanges

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
