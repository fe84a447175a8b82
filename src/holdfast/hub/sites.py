"""The MoE layers of a model, changed or not, in its order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.adapters import running
from holdfast.hub.building import Place, in_order
from holdfast.hub.families import (
    DENSE_FAMILIES,
    MOE_FAMILIES,
    DenseFamily,
    MoEFamily,
    dense_family,
    find,
    layers_of,
    mixer_of,
    moe_family,
)
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.surroundings import Neighbours
from holdfast.routing import Router

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the config's names for the number of experts


@dataclass(frozen=True)
class Site:
    """One MoE layer and the modules around it."""

    name: str  # of the block, in the model
    neighbours: Neighbours
    family: MoEFamily | None  # None: a layer that `sparsify` made

    @property
    def block(self) -> nn.Module:
        return self.neighbours.block

    @property
    def gate(self) -> Any:
        """The family's gate."""
        assert self.family is not None
        return running(self.block.get_submodule(self.family.gate))

    @property
    def experts(self) -> Any:
        return self.block.get_submodule("experts" if self.family is None else self.family.experts)

    @property
    def router(self) -> Router | None:
        """Our router; None where the family's own rule holds."""
        sparse = isinstance(self.block, SparseLayer)
        router = running(self.block.router) if sparse else getattr(self.gate, "holdfast", None)
        return router if isinstance(router, Router) else None

    @property
    def config(self) -> Any:
        return self.neighbours.attention.config

    @property
    def size(self) -> tuple[int, int]:
        """(d, E)."""
        if isinstance(self.block, SparseLayer):
            return self.block.experts.dim, self.block.experts.experts
        assert self.family is not None
        experts, dim = self.gate.get_parameter(self.family.weight).shape
        return dim, experts

    @property
    def heads(self) -> int | None:
        if self.neighbours.windowed or self.neighbours.recurrent:
            return None
        return int(self.config.num_attention_heads)


def sites(model: nn.Module) -> list[Site]:
    """Return every MoE layer of a model: of a known family, or made by `sparsify`.

    Raise a `ValueError` where the model has MoE layers that the family's row does not describe: everything that reads or
    changes routers goes through here, so none of it sees a part of the layers without saying so.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in DENSE_FAMILIES:
        found = _sparse_sites(model)
        if found:
            return found
    family = moe_family(model)
    found = []
    for name, layer in layers_of(family, model):
        found.append(Site(f"{name}.{family.block}".lstrip("."), _neighbours(layer, family, family.block), family))
    _require_all(model, found, _moe_modules(family, model, found))
    if not found:
        raise ValueError(f"this {family.model_type} model has no MoE layer.")
    return found


def places(found: list[Site]) -> list[Place]:
    """What routers must know about each."""
    return in_order([Place(site.name, *site.size, site.heads, recurrent=site.neighbours.recurrent) for site in found])


def is_moe(model: nn.Module) -> bool:
    """Is there a family row or a sparse layer for it?"""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in MOE_FAMILIES or any(isinstance(module, SparseLayer) for module in model.modules())


def _sparse_sites(model: nn.Module) -> list[Site]:
    family = dense_family(model)
    found = []
    for name, layer in model.named_modules():
        if isinstance(find(layer, family.place), SparseLayer) and find(layer, family.attention) is not None:
            found.append(Site(f"{name}.{family.place}".lstrip("."), _neighbours(layer, family, family.place), None))
    _require_all(model, found, ((name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)))
    return found


def _neighbours(layer: nn.Module, family: MoEFamily | DenseFamily, block: str) -> Neighbours:
    mixer = mixer_of(family, layer)
    assert mixer is not None
    windowed = isinstance(family, DenseFamily) and family.windowed
    recurrent = mixer != family.attention
    return Neighbours(layer.get_submodule(block), layer.get_submodule(mixer), layer, family.projection, windowed, recurrent)


def _require_all(model: Any, found: list[Site], expected: Iterator[tuple[str, nn.Module]]) -> None:
    """Raise where `expected`, MoE layers or their experts, holds a module that is in none of the layers found."""
    inside = {id(module) for site in found for module in site.block.modules()}
    missed = [name for name, module in expected if id(module) not in inside]
    if missed:
        raise ValueError(
            f"{missed[0]} belongs to an MoE layer that Holdfast's row for {model.config.model_type} does not describe "
            f"({len(found)} layers are as it says): changing or reading only a part of the layers is refused; mend the row "
            "in holdfast/hub/families.py."
        )


def _moe_modules(family: MoEFamily, model: Any, found: list[Site]) -> Iterator[tuple[str, nn.Module]]:
    """Yield what looks like an MoE layer, whatever is around it: a gate beside experts, or a weight for each expert."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    counts = {getattr(config, name, None) for name in EXPERT_COUNTS} | {site.size[1] for site in found}
    for name, module in model.named_modules():
        weights = (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)
        stacked = not isinstance(module, nn.modules.conv._ConvNd) and any(weight.shape[0] in counts for weight in weights)
        if stacked or (find(module, family.gate) is not None and find(module, family.experts) is not None):
            yield name, module
