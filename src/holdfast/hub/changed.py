"""Models and configs that know they were changed: saving writes what was changed, loading repeats it, then fills in weights.

Both keep their class's name and stay instances of it. The file says `"model_type": "holdfast"`, so that `AutoModel` fails,
rather than make up new weights for what it does not find. A family's own class (`LlamaForCausalLM`) only warns of that name.
It then takes any section with its own `model_type` for its config, and finds ours, or one of a model with two towers, with a
dtype that there is not.
"""

from pathlib import Path
from typing import Any

from torch import nn

from holdfast.hub.adapters import NAME as ROUTER_STATE
from holdfast.hub.adapters import CarriesRouterState, carry_state
from holdfast.hub.gathering import is_spread
from holdfast.hub.manifest import write_manifest
from holdfast.hub.quantisers import require_writable
from holdfast.hub.specs import read
from holdfast.hub.subclasses import with_mixin, without_mixin
from holdfast.hub.surroundings import LOOKS_AHEAD

MODEL_TYPE = "holdfast"
NO_DTYPE = "this folder is read with holdfast.load"  # in the error message


class ChangedConfig:
    """Mixed into the class of a changed model's config."""

    def to_diff_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        sections = {name: {**value, "dtype": NO_DTYPE} for name, value in written.items() if _is_config(value)}
        return {**written, **sections, "model_type": MODEL_TYPE}


class ChangedModel(CarriesRouterState):
    """Mixed into the class of a changed model."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """From a config that describes changes: the model with them, without their weights (`load`)."""
        from holdfast.hub.surgery import repeat

        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        assert isinstance(self, nn.Module)
        repeat(self, read(config.holdfast))
        self.__dict__["_frozen"] = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        # Under the names they have here, not those of the original checkpoint: a Trainer resumes by these.
        options.setdefault("save_original_format", False)
        _require_whole(self, options)
        require_writable(self)
        super().save_pretrained(save_directory, *arguments, **options)  # type: ignore[misc]
        # Of a model with adapters of transformers' own (add_adapter), only an adapter was written.
        if options.get("is_main_process", True) and not getattr(self, "_hf_peft_config_loaded", False):
            write_manifest(Path(save_directory))


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


def _require_whole(model: Any, options: dict[str, Any]) -> None:
    """A part of the weights would be written as if it were all of them."""
    if options.get("state_dict") is None and is_spread(model) and getattr(model.config, "distributed_config", None) is None:
        raise ValueError("the weights are spread over processes; call holdfast.save on every process, which gathers them.")


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def require_unwrapped(model: Any) -> None:
    """Changes belong to the model: put on a wrapper (PEFT's), they would come off with it."""
    if hasattr(model, "get_base_model"):
        raise ValueError(
            f"this {type(model).__name__} wraps the model; change the one inside, model.get_base_model(), or change it "
            "before wrapping."
        )


def saves_itself(model: nn.Module, description: dict[str, Any]) -> None:
    """From now on `model.save_pretrained` writes the description too."""
    config: Any = model.config
    config.holdfast = description
    if not isinstance(config, ChangedConfig):
        config.__class__ = with_mixin(type(config), ChangedConfig)
    if not isinstance(model, ChangedModel):
        model.__class__ = changed(type(model))
    model._modules.pop(ROUTER_STATE, None)  # of the routers that were there before
    carry_state(model)


def saves_plainly(model: nn.Module) -> None:
    """The model's own class again."""
    config: Any = model.config
    if isinstance(config, ChangedConfig):
        config.__class__ = without_mixin(type(config))
        delattr(config, "holdfast")
    model._modules.pop(ROUTER_STATE, None)
    if isinstance(model, ChangedModel):
        model.__class__ = without_mixin(type(model))
