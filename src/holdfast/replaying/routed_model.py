"""What recorded routes belong to: the MoE layers of a model, as plain data that is saved with the routes."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import nn

from holdfast.files import DEEPEST, depth_exceeds
from holdfast.hub.families import text_config
from holdfast.hub.forwards import require_no_copies
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers

MOST_LAYERS, MOST_EXPERTS = 4096, 2**15 - 1  # of routes from a file; an expert is an int16


@final
@dataclass(frozen=True)
class RoutedModel:
    """The MoE layers of a model, in its order. Routes fit every model with the same layers, whatever its weights are."""

    model_type: str
    places: tuple[int, ...]  # of the MoE layers among all layers of the model
    all_layers: int  # dense layers included
    experts: tuple[int, ...]  # of each MoE layer
    k: tuple[int | None, ...]  # experts of every token in each MoE layer; None: tokens may have different numbers

    @classmethod
    def from_model(cls, model: nn.Module) -> "RoutedModel":
        """Return the description of a model, which may be wrapped (PEFT, DDP, `torch.compile`)."""
        inner = unwrapped(model)
        found, specs, config = moe_layers(inner), specs_of(inner), text_config(inner)
        places = [_place(layer.name, index) for index, layer in enumerate(found)]
        k = [_fixed_k(layer, specs) for layer in found]
        count = getattr(config, "num_hidden_layers", None)
        count = count if isinstance(count, int) and count > max(places) else max(places) + 1
        experts = tuple(layer.size[1] for layer in found)
        return cls(str(inner.config.model_type), tuple(places), count, experts, tuple(k))

    @property
    def layers(self) -> int:
        """The number of MoE layers."""
        return len(self.places)

    def layer_name(self, index: int) -> str:
        """Return the name of an MoE layer for messages."""
        return f"layer {self.places[index]}"

    def require_same(self, other: "RoutedModel") -> None:
        """Raise ValueError if `other`, the model that these routes are for, has other MoE layers."""
        for what, mine, its in (
            ("a model of type", self.model_type, other.model_type),
            ("the MoE layers", list(self.places), list(other.places)),
            ("these numbers of experts:", list(self.experts), list(other.experts)),
        ):
            if mine != its:
                raise ValueError(f"the routes are of another model: they are of {what} {mine}, and this one has {its}.")

    def to_json(self) -> str:
        """Return this description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RoutedModel":
        """Return the description that `to_json` wrote. It is untrusted: raise ValueError if a value is wrong."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("the description of its model is not JSON.") from None
        if not isinstance(found, dict) or depth_exceeds(found, DEEPEST) or set(found) != set(cls.__dataclass_fields__):
            raise ValueError("the description of its model does not have the entries of a holdfast.Routes.")
        lists = places, experts, k = found["places"], found["experts"], found["k"]
        if not all(isinstance(each, list) and 0 < len(each) == len(places) <= MOST_LAYERS for each in lists):
            raise ValueError("the description of its model has no equally long lists of layers.")
        numbers = [found["all_layers"], *places, *experts, *(count for count in k if count is not None)]
        if not isinstance(found["model_type"], str) or not all(type(each) is int for each in numbers):
            raise ValueError("the description of its model has entries of wrong types.")
        if not all(1 <= count <= MOST_EXPERTS for count in experts) or min(places) < 0:
            raise ValueError("the description of its model has impossible numbers of layers or experts.")
        return cls(found["model_type"], tuple(places), found["all_layers"], tuple(experts), tuple(k))


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside wrappers: `torch.compile`, DDP and others with a `module`, PEFT."""
    while True:
        require_no_copies(model)
        inner = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
        inner = inner or (model._modules.get("module") if not hasattr(model, "config") else None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def _fixed_k(layer: Any, specs: Any) -> int | None:
    """Return how many experts every token of a layer has; None if the number may differ."""
    if layer.router is None:
        return int(layer.gate.top_k)
    return None if layer.router.select.ragged else int(specs[layer.name].k)


def _place(name: str, index: int) -> int:
    """Return the number of a layer in a module's name: that of its stack of layers."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", f"{name}.")
    return int(numbers[0]) if numbers else index
