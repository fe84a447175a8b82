"""What recorded routes belong to: the MoE layers of a model, as plain data that is saved with the routes."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, final

import torch
from torch import Tensor, nn

from holdfast.checked import Limits, from_mapping
from holdfast.hub.families import text_config
from holdfast.hub.forwards import require_no_copies
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.routing.replaying import NO_RECORD

MOST_LAYERS, MOST_EXPERTS = 4096, 2**15 - 1  # of routes from a file; an expert is an int16


@final
@dataclass(frozen=True)
class RoutedModel:
    """The MoE layers of a model, in its order. Routes fit every model with the same layers, whatever its weights are."""

    model_type: str
    places: list[Annotated[int, Limits(0, MOST_LAYERS, "0 or more")]]  # of the MoE layers among all layers of the model
    all_layers: int  # dense layers included
    experts: list[Annotated[int, Limits(1, MOST_EXPERTS, f"from 1 to {MOST_EXPERTS}")]]  # of each MoE layer
    k: list[int | None]  # experts of every token in each MoE layer; None: tokens may have different numbers

    def __post_init__(self) -> None:
        if not 0 < len(self.places) == len(self.experts) == len(self.k) <= MOST_LAYERS:
            raise ValueError("it has no equally long lists of layers.")

    @classmethod
    def from_model(cls, model: nn.Module) -> "RoutedModel":
        """Return the description of a model, which may be wrapped (PEFT, DDP, `torch.compile`)."""
        inner = unwrapped(model)
        found, specs, config = moe_layers(inner), specs_of(inner), text_config(inner)
        places, k = [], []
        for index, layer in enumerate(found):
            numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", f"{layer.name}.")  # the first is that of its stack of layers
            places.append(int(numbers[0]) if numbers else index)
            ragged = layer.router is not None and layer.router.select.ragged
            k.append(None if ragged else int(layer.gate.top_k if layer.router is None else specs[layer.name].k))
        count = getattr(config, "num_hidden_layers", None)
        count = count if isinstance(count, int) and count > max(places) else max(places) + 1
        return cls(str(inner.config.model_type), places, count, [layer.size[1] for layer in found], k)

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
            ("the MoE layers", self.places, other.places),
            ("these numbers of experts:", self.experts, other.experts),
        ):
            if mine != its:
                raise ValueError(f"the routes are of another model: they are of {what} {mine}, and this one has {its}.")

    def widened(self, routes: Tensor, slots: int) -> Tensor:
        """Return `routes (...,L,K)` with unused slots added, up to `slots` of them; -1 where a token has no record."""
        unused = torch.tensor(self.experts, dtype=routes.dtype, device=routes.device).view(-1, 1)
        added = unused.expand(*routes.shape[:-1], slots - routes.shape[-1])
        return torch.cat([routes, added.where((routes >= 0).all(-1, keepdim=True), NO_RECORD)], dim=-1)

    def to_json(self) -> str:
        """Return this description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RoutedModel":
        """Return the description that `to_json` wrote. It is untrusted: raise ValueError if a value is wrong."""
        try:
            of: RoutedModel = from_mapping(cls, json.loads(text))
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"the description of its model cannot be used: {str(problem)[:200]}") from None
        return of


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
