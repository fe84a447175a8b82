"""The MoE layers of a model, changed or not, in its order."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.adapters import running
from holdfast.hub.building import Place, in_order
from holdfast.hub.families import DENSE_FAMILIES, MOE_FAMILIES, MoEFamily, dense_family, find, layers_of, moe_family
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.surroundings import Neighbours
from holdfast.routing import Router


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
        return None if self.neighbours.windowed else int(self.config.num_attention_heads)


def sites(model: nn.Module) -> list[Site]:
    """Every MoE layer of a model: of a known family, or made by `sparsify`."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in DENSE_FAMILIES:
        found = _sparse_sites(model)
        if found:
            return found
    family = moe_family(model)
    found = []
    for name, layer in layers_of(family, model):
        neighbours = _neighbours(layer, family.block, family.attention, family.projection)
        found.append(Site(f"{name}.{family.block}".lstrip("."), neighbours, family))
    if not found:
        raise ValueError(f"this {family.model_type} model has no MoE layer.")
    return found


def places(found: list[Site]) -> list[Place]:
    """What routers must know about each."""
    return in_order([Place(site.name, *site.size, site.heads) for site in found])


def is_moe(model: nn.Module) -> bool:
    """Is there a family row or a sparse layer for it?"""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in MOE_FAMILIES or any(isinstance(module, SparseLayer) for module in model.modules())


def _sparse_sites(model: nn.Module) -> list[Site]:
    family = dense_family(model)
    found = []
    for name, layer in model.named_modules():
        if isinstance(find(layer, family.place), SparseLayer) and find(layer, family.attention) is not None:
            neighbours = _neighbours(layer, family.place, family.attention, family.projection, family.windowed)
            found.append(Site(f"{name}.{family.place}".lstrip("."), neighbours, None))
    return found


def _neighbours(layer: nn.Module, block: str, attention: str, projection: str, windowed: bool = False) -> Neighbours:
    return Neighbours(layer.get_submodule(block), layer.get_submodule(attention), layer, projection, windowed)
