"""What was changed in a model, layer by layer, as plain data: what a saved folder's config says and loading repeats.

Routers for the layers of a model, from specs.

The MoE layers of a model, changed or not, in its order.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from holdfast.hub.adapters import running
from holdfast.hub.context import Neighbours
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
from holdfast.hub.replacements import SparseLayer
from holdfast.layers.losses import Losses
from holdfast.routing import Router
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Host
from holdfast.routing.selection import Rule, Softmax
from holdfast.version import VERSION

FORMAT = 2  # in format 1, layers are named as in the saved class; since, as in its base model
READABLE = (1, FORMAT)
NATIVE = "native"  # the family's own rule


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer: its router and, where a dense layer was replaced, its experts."""

    router: str
    k: int
    options: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    pretrained: bool = True  # the router entered a model that works
    experts: int | None = None  # of a layer that was dense
    hidden: int | None = None
    weights: str | None = None  # of such a layer: "softmax" or "switch" as of TopK; None is what the router's name says

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"the options of router {self.router!r} must be plain values, to be saved: {problem}."
            ) from None
        object.__setattr__(self, "options", plain)

    def loss_terms(self) -> Losses | None:
        return Losses(**self.losses) if self.losses else None

    def rule(self) -> Rule | None:
        """The convention of a layer that was dense: its experts expect it whatever router comes."""
        return None if self.weights is None else Softmax(renormalise=self.weights == "softmax")


def coefficients(losses: Losses | None) -> dict[str, float]:
    """Of each loss, zeros too: said outright, they mean that a model's own balance loss is not wanted."""
    if losses is not None and not isinstance(losses, Losses):
        raise ValueError(f"losses is a {type(losses).__name__}; give a holdfast.Losses, which can be saved with the model.")
    return {} if losses is None else asdict(losses)


def describe(model_type: str, specs: Mapping[str, LayerSpec]) -> dict[str, Any]:
    """As it is written to config.json under "holdfast"; `names_in_base` then makes its names fit every head."""
    layers = {name: asdict(spec) for name, spec in specs.items()}
    return {"format": FORMAT, "version": VERSION, "model_type": model_type, "layers": layers}


def names_in_base(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under names of layers relative to the base model, so that a model with another head finds them."""
    prefix = _prefix(model)
    return {name.removeprefix(prefix): value for name, value in named.items()}


def names_in_model(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under names of layers in `model`, which may be the base model or hold it."""
    prefix = _prefix(model)
    inside = prefix if prefix and hasattr(model, prefix.removesuffix(".")) else ""
    return {f"{inside}{name.removeprefix(prefix)}": value for name, value in named.items()}


def _prefix(model: Any) -> str:
    """What names of the base model's parts start with in a model that has a head."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name else ""


def read(description: Any) -> dict[str, LayerSpec]:
    """The specs of a description, checked: it may come from anywhere."""
    if not isinstance(description, dict) or not isinstance(description.get("layers"), dict):
        raise ValueError('its config has no "holdfast" section that names layers.')
    if description.get("format") not in READABLE:
        reads = " and ".join(map(str, READABLE))
        raise ValueError(f"it is written in format {description.get('format')!r}; this Holdfast ({VERSION}) reads {reads}.")
    return {name: _read_layer(name, values) for name, values in description["layers"].items()}


def _read_layer(name: str, values: Any) -> LayerSpec:
    known = {entry.name for entry in fields(LayerSpec)}
    if not isinstance(values, dict) or set(values) != known:
        raise ValueError(f"layer {name!r} should say {', '.join(sorted(known))}.")
    kinds = {"router": str, "k": int, "options": dict, "losses": dict, "pretrained": bool}
    for entry, kind in kinds.items():
        if type(values[entry]) is not kind:  # True is an int
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}; expected {kind.__name__}.")
    for entry in ("experts", "hidden"):
        if values[entry] is not None and (not isinstance(values[entry], int) or values[entry] < 1):
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}, not a positive number.")
    if values["weights"] not in (None, "softmax", "switch"):
        raise ValueError(f"layer {name!r}: weights is {values['weights']!r}, not softmax or switch.")
    for term, weight in values["losses"].items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if term not in {entry.name for entry in fields(Losses)} or not number or not 0 <= weight < math.inf:
            raise ValueError(f"layer {name!r}: there is no loss {term!r} of weight {weight!r}.")
    return LayerSpec(**values)


@dataclass(frozen=True)
class Place:
    """What a router must know about the layer it is for."""

    name: str
    dim: int
    experts: int
    heads: int | None  # None: attention within windows, or no attention
    depth: int = 0  # which MoE layer of its stack it is
    before: "Place | None" = None  # the MoE layer before it
    recurrent: bool = False  # a hybrid model's layer without attention


def in_order(places: Sequence[Place]) -> list[Place]:
    """The places of a model, each knowing the one before it. A model may have several stacks of layers (two towers)."""
    linked: list[Place] = []
    for place in places:
        last = linked[-1] if linked and _stack(linked[-1].name) == _stack(place.name) else None
        linked.append(place if last is None else replace(place, depth=last.depth + 1, before=last))
    return linked


def _stack(name: str) -> str:
    """The part of a layer's name before its number."""
    steps = name.split(".")
    number = next((index for index, step in enumerate(steps) if step.isdigit()), len(steps))
    return ".".join(steps[:number])


def build_routers(
    places: Sequence[Place], specs: Mapping[str, LayerSpec], hosts: Mapping[str, Host]
) -> dict[str, Router | None]:
    """A router for each layer that `specs` names; None is the family's own rule. All or none: nothing is changed here."""
    built = {place.name: _build(place, specs[place.name], hosts[place.name]) for place in places if place.name in specs}
    for place in places:
        router = built.get(place.name)
        if place.recurrent and router is not None and router.traits.sequence_aware:
            attending = [index for index, other in enumerate(places) if not other.recurrent]
            raise ValueError(
                f"{place.name}: router {specs[place.name].router!r} looks at other tokens, and this layer has no attention "
                f"and no KV cache to take them from; use it only in layers that have (layers={attending})."
            )
    return built


def _build(place: Place, spec: LayerSpec, host: Host) -> Router | None:
    if spec.router == NATIVE:
        if spec.options:
            raise ValueError(f"the native router takes no options (given: {', '.join(spec.options)}).")
        return None
    brought: dict[str, Any] = {"depth": place.depth, "clusters": place.before.experts if place.before else None}
    brought["heads"] = place.heads or 1
    try:
        with _float32():
            router = REGISTRY.build(
                spec.router,
                dim=place.dim,
                experts=place.experts,
                k=spec.k,
                losses=spec.loss_terms(),
                layer=place.name,
                host=replace(host, pretrained=spec.pretrained, options=brought),
                **spec.options,
            )
    except (TypeError, OverflowError) as problem:  # options of a folder may be of any type and size
        given = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
        raise ValueError(f"{place.name}: router {spec.router!r} does not take these options ({given}): {problem}.") from None
    if place.heads is None and not place.recurrent and "attention.projection" in router.reads:
        raise ValueError(
            f"{place.name}: this model attends within windows, so router {spec.router!r} has no attention over the whole "
            "sequence to read; use 'similarity'."
        )
    if "previous" in router.reads and place.before is not None and place.before.dim != place.dim:
        raise ValueError(
            f"{place.name}: the previous MoE layer has width {place.before.dim}, this one {place.dim}; a router that "
            "clusters by the previous layer ('ac') needs equal widths: choose layers of one width."
        )
    return router


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """State is float32 even while a model is being built in another dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


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
