"""Evaluate a model without some of its experts, as if their machine had failed: their gates are 0 before selection."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.hub.layers import is_moe, moe_layers
from holdfast.hub.replacements import ReroutedGate, without_experts
from holdfast.hub.tracing import without_compilation
from holdfast.routing import Context, Router
from holdfast.routing.router_checks import require_usable
from holdfast.routing.rules import Rule


@final
@dataclass(frozen=True)
class Routed:
    """What routes in one MoE layer: a Holdfast router, or a family's gate with its rule and the scale of its weights."""

    name: str
    module: Any
    experts: int
    rule: Rule | None = None
    scale: float = 1.0

    def refusal(self) -> str | None:
        """Return why this layer cannot lose an expert; None if it can."""
        if not isinstance(self.module, Router):
            return None
        if self.module.select.layer_kind != "moe":
            return f"{self.name}: every token uses every expert, so none takes the place of one that is lost."
        if self.module.fixed_sets:
            return f"{self.name}: experts are chosen without scores, so none is next best when one is lost."
        return None

    def disable(self, lost: Tensor, until: ExitStack) -> None:
        """Do without the experts that are `lost (E,)`, until `until` closes."""
        module, before = self.module, getattr(self.module, "disabled", None)
        lost = lost if before is None else lost | before
        if bool(lost.all()):
            raise ValueError(f"{self.name} would have no expert left: another holdfast.disable is around this one.")
        module.disabled = lost
        until.callback(setattr, module, "disabled", before)
        if before is None and not isinstance(module, Router | ReroutedGate):
            until.callback(module.register_forward_hook(self._without, prepend=True).remove)  # before hooks that record

    def _without(self, gate: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        assert self.rule is not None
        require_usable(self.name, gate.training, Context())
        return without_experts(output, self.rule, self.scale, gate.disabled)


def routed_layers(model: nn.Module) -> list[Routed]:
    """Return what routes in each MoE layer, in the model's order."""
    if not is_moe(model):
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
        return [Routed(name or module.layer, module, module.experts) for name, module in named]
    found = []
    for layer in moe_layers(model):
        if layer.router is not None:
            found.append(Routed(layer.name, layer.router, layer.size[1]))
        else:
            assert layer.family is not None
            rule, scale = layer.family.rule_of(layer.block), layer.family.scale_of(layer.block)
            found.append(Routed(layer.name, layer.gate, layer.size[1], rule, scale))
    return found


@contextmanager
def disable(model: nn.Module, experts: Mapping[int, int | Sequence[int]]) -> Iterator[None]:
    """Inside the `with`, evaluate without some experts: their gates are 0 before selection, and the next best move up.

    experts   the lost experts by MoE layer, counted from 0: {0: 3, 5: [1, 2]}

        with holdfast.disable(model, {0: 3}):
            print(model(**inputs).loss)

    It works for every model that `holdfast.trace` supports, changed or not, in all threads, and for evaluation only. What
    `torch.compile` has compiled runs uncompiled inside the `with`. Other gates of a token stay as they are, unless the gate
    function shares them out (sparsemax). Raise ValueError for a layer whose experts have no next best (`hash`, SoftMoE).
    """
    if not isinstance(experts, Mapping):
        raise ValueError(
            f"experts are {experts!r}; give a dict of MoE layers and their lost experts, such as {{0: [1, 2]}}."
        )
    layers = routed_layers(model)
    chosen = [(layers[layer], _lost(layers, layer, given)) for layer, given in experts.items() if _is_layer(layers, layer)]
    for layer, _ in chosen:
        if (reason := layer.refusal()) is not None:
            raise ValueError(reason)
    with without_compilation(), ExitStack() as until:
        for layer, lost in chosen:
            device = next(t.device for t in (*layer.module.parameters(), *layer.module.buffers()))
            layer.disable(lost.to(device), until)
        yield


def _is_layer(layers: list[Routed], layer: Any) -> bool:
    if not isinstance(layer, int) or not 0 <= layer < len(layers):
        raise ValueError(f"there is no MoE layer {layer!r}: the model has {len(layers)}, counted from 0.")
    return True


def _lost(layers: list[Routed], layer: int, given: int | Sequence[int]) -> Tensor:
    """Return bool (E,): the lost experts of a layer. Raise ValueError if one is unknown, or none would be left."""
    count = layers[layer].experts
    try:
        named = [index(expert) for expert in (given if isinstance(given, Sequence) else [given])]
    except TypeError:
        raise ValueError(f"the lost experts of layer {layer} are {given!r}; expected a number, or a list of them.") from None
    for expert in named:
        if not 0 <= expert < count:
            raise ValueError(f"layer {layer} has no expert {expert}: it has {count}, counted from 0.")
    if len(set(named)) == count:
        raise ValueError(f"layer {layer} would have no expert left; leave it at least one of its {count}.")
    return torch.zeros(count, dtype=torch.bool).index_fill(0, torch.tensor(named, dtype=torch.int64), True)
