"""How a family's own class (`MixtralForCausalLM.from_pretrained`) opens the folder of a changed model.

Transformers lets a folder name a method that changes the modules of a fresh model before its weights are read. It is meant
for quantisation, and found by the config's `quantization_config`; ours changes routers, quantises nothing, and takes itself
off the model when that is loaded. Where Holdfast is not imported the method is unknown, and `transformers_weights` stops the
load.
"""

from pathlib import Path
from typing import Any

from holdfast.hub.changed import ChangedModel, finish_loading, repeat_changes, specs_in
from holdfast.hub.config_file import CODE, MODEL_TYPE, NEEDS_HOLDFAST
from holdfast.hub.folder_checks import check_folder, require_fitting_files


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
