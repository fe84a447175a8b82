"""The MoE layers of a model, and the specs of their routers.

MoELayerRef   one MoE layer of a model and the modules around it; `moe_layers` finds all of them, changed or not
LayerSpec     what was changed in one layer, as plain data: written to config.json, and applied again when loading
LayerInfo     the sizes of a layer that a router is built for; `build_routers` makes routers from specs
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from holdfast.hub.adapters import active_module
from holdfast.hub.context import LayerModules
from holdfast.hub.families import (
    DENSE_FAMILIES,
    MOE_FAMILIES,
    DenseFamily,
    MoEFamily,
    dense_family,
    find_submodule,
    image_tokens,
    layers_of,
    mixer_of,
    moe_family,
)
from holdfast.hub.replacements import SparseLayer
from holdfast.layers.losses import Losses
from holdfast.routing import Router
from holdfast.routing.layer_names import NATIVE as NATIVE
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import HostModel
from holdfast.routing.selection import Rule, Softmax
from holdfast.version import VERSION

# In format 1, layers have the names of the saved class; since format 2, those of its base model. Up to format 2 the option
# `skip` of `ac` also counted the first MoE layer, which is never clustered, and `similarity` was of=attention, tau=1.
FORMAT = 3
READABLE = (1, 2, FORMAT)
MOST_SHARED = 1024  # in a config from a folder
NOT_A_ROUTER = (
    "SoftMoE and SMEAR are layers of their own, and reroute changes the routers of MoE layers only; make such layers from a "
    "dense model with holdfast.sparsify."
)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the config's names for the number of experts


@dataclass(frozen=True)
class LayerSpec:
    """The router of one MoE layer and, if the layer was dense, its experts."""

    router: str
    k: int
    options: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    pretrained: bool = True  # the router was put into a trained model
    # Of a layer that was dense:
    experts: int | None = None
    hidden: int | None = None
    weights: str | None = None  # "softmax" or "switch", as in TopK; None: the default of the router's name
    shared: int | None = None  # shared experts, each as wide as an expert, which run on every token

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"the options of router {self.router!r} must be plain values, to be saved: {problem}."
            ) from None
        object.__setattr__(self, "options", plain)

    def loss_terms(self) -> Losses | None:
        """Return the layer's losses; None if it has none."""
        return Losses(**self.losses) if self.losses else None

    def rule(self) -> Rule | None:
        """Return the rule that a router must keep in a layer that was dense; None for any other layer."""
        return None if self.weights is None else Softmax(renormalise=self.weights == "softmax")


def loss_coefficients(losses: Losses | None) -> dict[str, float]:
    """Return the coefficient of each loss. Keep explicit zeros: they disable the model's own balance loss."""
    if losses is not None and not isinstance(losses, Losses):
        raise ValueError(f"losses is a {type(losses).__name__}; give a holdfast.Losses, which can be saved with the model.")
    return {} if losses is None else asdict(losses)


def describe(model_type: str, specs: Mapping[str, LayerSpec]) -> dict[str, Any]:
    """Return the entry "holdfast" of config.json, before `names_in_base`."""
    layers = {name: asdict(spec) for name, spec in specs.items()}
    return {"format": FORMAT, "version": VERSION, "model_type": model_type, "layers": layers}


def names_in_base(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with layer names relative to the base model, so that a model with another head finds them."""
    prefix = _prefix(model)
    return {name.removeprefix(prefix): value for name, value in named.items()}


def names_in_model(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with the layer names of `model`, which is the base model or contains it."""
    prefix = _prefix(model)
    inside = prefix if prefix and hasattr(model, prefix.removesuffix(".")) else ""
    return {f"{inside}{name.removeprefix(prefix)}": value for name, value in named.items()}


def _prefix(model: Any) -> str:
    """Return what the names of the base model's modules start with in a model that has a head."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name else ""


def read_specs(description: Any) -> dict[str, LayerSpec]:
    """Return the specs of the entry "holdfast" of a config.json. It is untrusted: raise ValueError if a value is wrong."""
    if not isinstance(description, dict) or not isinstance(description.get("layers"), dict):
        raise ValueError('its config has no "holdfast" section that names layers.')
    if description.get("format") not in READABLE:
        reads = " and ".join(map(str, READABLE))
        raise ValueError(f"it is written in format {description.get('format')!r}; this Holdfast ({VERSION}) reads {reads}.")
    specs = {name: _read_layer(name, values) for name, values in description["layers"].items()}
    if description["format"] < FORMAT:
        specs = {name: _with_present_options(spec) for name, spec in specs.items()}
    return specs


def _with_present_options(spec: LayerSpec) -> LayerSpec:
    """Return the spec of an earlier format with options that mean the same now."""
    names, options = spec.router.split("+"), dict(spec.options)
    if "ac" in names and type(options.get("skip")) is int:
        options["skip"] = max(options["skip"] - 1, 0)
    if "similarity" in names:
        options = {"of": "attention", "tau": 1.0, **options}
    return replace(spec, options=options)


def _read_layer(name: str, values: Any) -> LayerSpec:
    known = {entry.name for entry in fields(LayerSpec)}
    values = {"shared": None, **values} if isinstance(values, dict) else values  # earlier versions wrote no such entry
    if not isinstance(values, dict) or set(values) != known:
        wrong = sorted(map(str, set(values) ^ known)) if isinstance(values, dict) else [type(values).__name__]
        raise ValueError(f"layer {name!r} must have the entries {', '.join(sorted(known))} (wrong: {', '.join(wrong)}).")
    kinds = {"router": str, "k": int, "options": dict, "losses": dict, "pretrained": bool}
    for entry, kind in kinds.items():
        if type(values[entry]) is not kind:  # True is an int
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}; expected {kind.__name__}.")
    for entry in ("experts", "hidden", "shared"):
        if values[entry] is not None and (type(values[entry]) is not int or values[entry] < 1):  # True is an int
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}, not a positive number.")
    if (values["shared"] or 0) > MOST_SHARED:
        raise ValueError(f"layer {name!r}: shared is {values['shared']}; at most {MOST_SHARED} are built.")
    if values["weights"] not in (None, "softmax", "switch"):
        raise ValueError(f"layer {name!r}: weights is {values['weights']!r}, not softmax or switch.")
    for term, weight in values["losses"].items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if term not in {entry.name for entry in fields(Losses)} or not number or not 0 <= weight < math.inf:
            raise ValueError(f"layer {name!r}: there is no loss {term!r} with the coefficient {weight!r}.")
    return LayerSpec(**values)


@dataclass(frozen=True)
class LayerInfo:
    """The sizes of an MoE layer and its place in the model, for which a router is built."""

    name: str
    dim: int
    experts: int
    heads: int | None  # None: attention within windows, or no attention
    depth: int = 0  # index among the MoE layers of its stack
    before: "LayerInfo | None" = None  # the previous MoE layer of its stack
    recurrent: bool = False  # a layer of a hybrid model without attention
    vocabulary: int | None = None  # number of token ids; None: the model, or this tower of it, reads none

    @property
    def place(self) -> int:
        """The number of this layer, from 1, among those whose previous MoE layer has the same width; 0 if its has not."""
        return 0 if self.before is None or self.before.dim != self.dim else self._clusterable

    @property
    def _clusterable(self) -> int:
        """The number of layers up to this one whose previous MoE layer has the same width."""
        return 0 if self.before is None else self.before._clusterable + (self.before.dim == self.dim)


def linked_in_order(infos: Sequence[LayerInfo]) -> list[LayerInfo]:
    """Return the layers with `depth` and `before` set. A model may have several stacks of layers (two towers)."""
    linked: list[LayerInfo] = []
    for info in infos:
        last = linked[-1] if linked and _stack(linked[-1].name) == _stack(info.name) else None
        linked.append(info if last is None else replace(info, depth=last.depth + 1, before=last))
    return linked


def _stack(name: str) -> str:
    """Return the part of a layer's name before its number: the stack of layers that it belongs to."""
    steps = name.split(".")
    number = next((index for index, step in enumerate(steps) if step.isdigit()), len(steps))
    return ".".join(steps[:number])


def build_routers(
    infos: Sequence[LayerInfo], specs: Mapping[str, LayerSpec], hosts: Mapping[str, HostModel]
) -> dict[str, Router | None]:
    """Return a router for each layer that `specs` names; None means the family's own rule. The model is not changed."""
    built = {info.name: _build_router(info, specs[info.name], hosts[info.name]) for info in infos if info.name in specs}
    for info in infos:
        router = built.get(info.name)
        if router is not None and router.select.layer_kind != "moe" and specs[info.name].experts is None:
            raise ValueError(f"{info.name}: {NOT_A_ROUTER}")
        if info.recurrent and router is not None and router.traits.sequence_aware:
            attending = [index for index, other in enumerate(infos) if not other.recurrent]
            raise ValueError(
                f"{info.name}: router {specs[info.name].router!r} reads other tokens, and this layer has no attention "
                f"and no KV cache to read them from; use it only in layers that have (layers={attending})."
            )
    return built


def _build_router(info: LayerInfo, spec: LayerSpec, host: HostModel) -> Router | None:
    if spec.router == NATIVE:
        if spec.options:
            raise ValueError(f"the native router takes no options (given: {', '.join(spec.options)}).")
        return None
    clusters = info.before.experts if info.before else None
    from_layer: dict[str, Any] = {
        "depth": info.depth,
        "place": info.place,
        "clusters": clusters,
        "heads": info.heads or 1,
    }
    if info.vocabulary is not None:
        from_layer["vocabulary"] = info.vocabulary
        given = spec.options.get("vocabulary", info.vocabulary)
        if isinstance(given, int) and given < info.vocabulary:
            raise ValueError(
                f"{info.name}: vocabulary is {given}, but this model has {info.vocabulary} token ids; leave the option out."
            )
    elif reads(spec.router, "token_ids"):
        raise ValueError(
            f"{info.name}: router {spec.router!r} chooses experts by token id, and this part of the model reads none; "
            "choose a router that reads the tokens themselves."
        )
    try:
        with _default_float32():
            router = REGISTRY.build(
                spec.router,
                dim=info.dim,
                experts=info.experts,
                k=spec.k,
                losses=spec.loss_terms(),
                layer=info.name,
                host=replace(host, pretrained=spec.pretrained, options=from_layer),
                **spec.options,
            )
    except (TypeError, OverflowError) as problem:  # options from a folder may have any type and size
        given = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
        raise ValueError(f"{info.name}: router {spec.router!r} does not take these options ({given}): {problem}.") from None
    if info.heads is None and not info.recurrent and "attention.projection" in router.reads:
        raise ValueError(
            f"{info.name}: this model attends within windows, so router {spec.router!r} has no attention over the whole "
            "sequence to read; use 'similarity'."
        )
    if "previous" in router.reads and info.before is not None and info.before.dim != info.dim:
        raise ValueError(
            f"{info.name}: the previous MoE layer has width {info.before.dim}, this one {info.dim}; router "
            f"{spec.router!r} reads the previous layer and needs equal widths: choose layers of one width."
        )
    return router


@contextlib.contextmanager
def _default_float32() -> Iterator[None]:
    """Inside the `with`, build in float32: router state is float32 whatever the dtype of the model."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@dataclass(frozen=True)
class MoELayerRef:
    """One MoE layer and the modules around it."""

    name: str  # of the block, in the model
    layer_modules: LayerModules
    family: MoEFamily | None  # None: a layer that `sparsify` made

    @property
    def block(self) -> nn.Module:
        """Return the module that contains gate and experts."""
        return self.layer_modules.block

    @property
    def gate(self) -> Any:
        """Return the family's gate; PEFT may run a copy of it."""
        assert self.family is not None
        return active_module(self.block.get_submodule(self.family.gate))

    @property
    def experts(self) -> Any:
        """Return the module with the experts."""
        return self.block.get_submodule("experts" if self.family is None else self.family.experts)

    @property
    def router(self) -> Router | None:
        """Return the Holdfast router; None if the family's own rule selects."""
        sparse = isinstance(self.block, SparseLayer)
        router = active_module(self.block.router) if sparse else getattr(self.gate, "holdfast", None)
        return router if isinstance(router, Router) else None

    @property
    def config(self) -> Any:
        """Return the config of the layer's attention; of its experts if it is a recurrent layer, which has none."""
        attention = self.layer_modules.attention
        return attention.config if hasattr(attention, "config") else self.experts.config

    @property
    def size(self) -> tuple[int, int]:
        """Return (d, E)."""
        if isinstance(self.block, SparseLayer):
            return self.block.experts.dim, self.block.experts.experts
        assert self.family is not None
        experts, dim = self.gate.get_parameter(self.family.weight).shape
        return dim, experts

    @property
    def heads(self) -> int | None:
        """Return the number of attention heads; None if attention is within windows, or there is none."""
        if self.layer_modules.windowed or self.layer_modules.recurrent:
            return None
        return int(self.config.num_attention_heads)


def moe_layers(model: nn.Module) -> list[MoELayerRef]:
    """Return every MoE layer of a model: of a known family, or made by `sparsify`.

    Raise ValueError if the model has MoE layers that the family's row does not describe. Everything that reads or changes
    routers calls this function, so that no part of the library silently works on some of the layers only.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in DENSE_FAMILIES:
        found = _sparse_layers(model)
        if found:
            return found
    family = moe_family(model)
    found = []
    for name, layer in layers_of(family, model):
        found.append(MoELayerRef(f"{name}.{family.block}".lstrip("."), _modules_of(layer, family, family.block), family))
    _require_all(model, found, _moe_modules(family, model, found))
    if not found:
        raise ValueError(f"this {family.model_type} model has no MoE layer.")
    return found


def layer_infos(found: list[MoELayerRef]) -> list[LayerInfo]:
    """Return the sizes and places of MoE layers, for `build_routers`."""
    return linked_in_order(
        [
            LayerInfo(
                moe_layer.name,
                *moe_layer.size,
                moe_layer.heads,
                recurrent=moe_layer.layer_modules.recurrent,
                vocabulary=vocabulary_of(moe_layer.config),
            )
            for moe_layer in found
        ]
    )


def reads(router: str, field: str) -> bool:
    """Return whether a part of the router `router` reads this field of its context."""
    return router != NATIVE and any(field in part.reads for part in REGISTRY.part_classes(router))


def require_modalities(model: nn.Module, router: str) -> None:
    """Raise ValueError if the router has a score for each modality, and all tokens of the model are text."""
    if reads(router, "modality") and not image_tokens(model):
        raise ValueError(
            f"router {router!r} has a score for each modality, and this model has no image token in its config; use 'smoe', "
            "or a vision and language model."
        )


def vocabulary_of(config: Any) -> int | None:
    """Return the number of token ids of a layer's config; None if it has none, as a vision model."""
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def is_moe(model: nn.Module) -> bool:
    """Whether the model is of a known MoE family, or was made by `sparsify`."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in MOE_FAMILIES or any(isinstance(module, SparseLayer) for module in model.modules())


def _sparse_layers(model: nn.Module) -> list[MoELayerRef]:
    family = dense_family(model)
    found = []
    for name, layer in model.named_modules():
        if (
            isinstance(find_submodule(layer, family.place), SparseLayer)
            and find_submodule(layer, family.attention) is not None
        ):
            found.append(MoELayerRef(f"{name}.{family.place}".lstrip("."), _modules_of(layer, family, family.place), None))
    _require_all(model, found, ((name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)))
    return found


def _modules_of(layer: nn.Module, family: MoEFamily | DenseFamily, block: str) -> LayerModules:
    mixer = mixer_of(family, layer)
    assert mixer is not None
    windowed = isinstance(family, DenseFamily) and family.windowed
    recurrent = mixer != family.attention
    return LayerModules(
        layer.get_submodule(block), layer.get_submodule(mixer), layer, family.projection, windowed, recurrent
    )


def _require_all(model: Any, found: list[MoELayerRef], expected: Iterator[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if a module of `expected`, MoE layers or their experts, is in none of the layers found."""
    inside = {id(module) for moe_layer in found for module in moe_layer.block.modules()}
    missed = [name for name, module in expected if id(module) not in inside]
    if missed:
        raise ValueError(
            f"{missed[0]} belongs to an MoE layer that Holdfast's row for {model.config.model_type} does not describe "
            f"({len(found)} layers fit): reading or changing only some of the layers is refused; correct the family's row "
            "in holdfast/hub/families.py."
        )


def _moe_modules(family: MoEFamily, model: Any, found: list[MoELayerRef]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that looks like an MoE layer: with a gate and experts, or with a weight for each expert."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    counts = {getattr(config, name, None) for name in EXPERT_COUNTS} | {moe_layer.size[1] for moe_layer in found}
    for name, module in model.named_modules():
        weights = (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)
        stacked = not isinstance(module, nn.modules.conv._ConvNd) and any(weight.shape[0] in counts for weight in weights)
        if stacked or (
            find_submodule(module, family.gate) is not None and find_submodule(module, family.experts) is not None
        ):
            yield name, module
