"""Find the family of a model and its layers: those that `sparsify` can change, and the MoE layers, changed or not.

`moe_layers` finds every MoE layer with the modules around it. Everything that reads or changes routers calls it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.adapters import active_module
from holdfast.hub.context import LayerModules
from holdfast.hub.families import DENSE_FAMILIES, MOE_FAMILIES, DenseFamily, DenseLayer, MoEFamily, text_config
from holdfast.hub.families.recognition import check_declared, fused_experts, recognise
from holdfast.hub.forwards import image_tokens
from holdfast.hub.replacements import SparseLayer
from holdfast.hub.specs import LayerInfo, linked_in_order, reads
from holdfast.routing import Router

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the config's names for the number of experts
_REGISTERED: set[str] = set()  # model types of rows that `register_family` added; our own rows are checked by tests


def register_family(family: MoEFamily | DenseFamily) -> None:
    """Declare a family that Holdfast does not know, for this process: `reroute`, `sparsify`, `load` and all others use it.

    The row of an MoE family is checked when a model of it is first used: its layers must be all the MoE layers of the
    model, and its gate, alone, must rank and weight experts as the declared rule does, gradients included. A model that
    does not pass raises ValueError.
    """
    if not isinstance(family, MoEFamily | DenseFamily):
        raise ValueError(f"a family is a holdfast.hub.MoEFamily or DenseFamily, not a {type(family).__name__}.")
    table: dict[str, Any] = MOE_FAMILIES if isinstance(family, MoEFamily) else DENSE_FAMILIES
    if family.model_type in table and table[family.model_type] != family:
        raise ValueError(f"{family.model_type} has a row already; it cannot be declared in two ways.")
    if isinstance(family, MoEFamily):
        _REGISTERED.add(family.model_type)
    table[family.model_type] = family


def moe_family(model: nn.Module) -> MoEFamily:
    """Return the row of an MoE model's family, declared or recognised. Raise ValueError with the reason if there is none."""
    model_type = _model_type(model)
    if model_type in MOE_FAMILIES:
        return MOE_FAMILIES[model_type]
    recognised = recognise(model)
    if recognised is not None:
        return recognised
    if model_type in DENSE_FAMILIES:
        raise ValueError(f"{model_type} is a dense family. Make a dense model an MoE with holdfast.sparsify.")
    raise ValueError(
        f"this {model_type} model has no experts with fused weights, by which Holdfast recognises MoE layers. Declare the "
        "family with holdfast.register_family."
    )


def dense_family(model: nn.Module) -> DenseFamily:
    """Return the row of a dense model's family. Raise ValueError with advice if there is none."""
    model_type = _model_type(model)
    if model_type not in DENSE_FAMILIES:
        if has_experts(model):
            raise ValueError(f"{model_type} is an MoE family. Change the routers of an MoE with holdfast.reroute.")
        raise ValueError(
            f"Holdfast does not know where the feed-forward networks of {model_type} are. Declare the family with "
            f"holdfast.register_family; known are {', '.join(sorted(DENSE_FAMILIES))}."
        )
    return DENSE_FAMILIES[model_type]


def _model_type(model: nn.Module) -> str:
    model_type: Any = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} is not a Hugging Face model (it has no config.model_type) and contains no Router."
        )
    return str(model_type)


def has_experts(model: nn.Module) -> bool:
    """Whether the model is of a declared MoE family, or has experts with fused weights."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in MOE_FAMILIES or next(fused_experts(model), None) is not None


@dataclass(frozen=True)
class MoELayerRef:
    """One MoE layer and the modules around it."""

    name: str  # of the block, in the model
    layer_modules: LayerModules
    family: MoEFamily | None  # None: a layer that `sparsify` made
    dense: DenseFamily | None = None  # the row of a layer that `sparsify` made
    dense_config: Any = None  # of such a layer

    @property
    def block(self) -> nn.Module:
        """Return the module that contains gate and experts."""
        return self.layer_modules.block

    @property
    def gate(self) -> Any:
        """Return the family's gate; PEFT may run a copy of it."""
        assert self.family is not None
        return self.family.gate_of(self.block)

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
        if self.dense is not None:
            return self.dense_config
        return attention.config if hasattr(attention, "config") else self.experts.config

    @property
    def vocabulary(self) -> int | None:
        """Return the number of token ids; None if the layer's tokens have none."""
        return None if self.dense is not None and not self.dense.reads_token_ids else vocabulary_of(self.config)

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
    wanted, found = [f"{family.block}.{family.gate}", f"{family.block}.{family.experts}"], []
    for name, layer in model.named_modules():
        if mixer_of(family, layer) is not None and all(find_submodule(layer, path) is not None for path in wanted):
            found.append(MoELayerRef(f"{name}.{family.block}".lstrip("."), _modules_of(layer, family), family))
    _require_all(model, found, _moe_modules(family, model, found))
    owners: dict[int, str] = {}
    for moe_layer in found:
        for part in (moe_layer.gate, moe_layer.experts):
            owner = owners.setdefault(id(part), moe_layer.name)
            if owner != moe_layer.name:  # a change of one layer would change the other
                raise ValueError(f"the MoE layers {owner} and {moe_layer.name} share one {type(part).__name__}.")
        if family.model_type in _REGISTERED:
            check_declared(family, moe_layer.name, moe_layer.block)
    if not found:
        raise ValueError(f"this {family.model_type} model has no MoE layer.")
    return found


def dense_layers(model: Any) -> dict[str, DenseLayer]:
    """Return every layer of a dense model that `sparsify` can change, by the name of the module that it replaces.

    Raise ValueError with advice if the family is not known.
    """
    found = {}
    rows = dense_family(model).rows
    for name, module in model.named_modules():
        for row in rows:
            wanted = (row.attention, row.projection, *row.up, row.down)
            if all(find_submodule(module, path) is not None for path in wanted):
                config = getattr(module.get_submodule(row.attention), "config", None) or text_config(model)
                place = f"{name}.{row.place}".lstrip(".")
                found[place] = DenseLayer(place, module, row, config)
    return found


def mixer_of(family: MoEFamily, layer: nn.Module) -> str | None:
    """Return the path of a layer's attention, or of the recurrent module in its place; None if it has neither."""
    paths = [family.attention] if family.recurrent is None else [family.attention, family.recurrent]
    return next((path for path in paths if find_submodule(layer, path) is not None), None)


def find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at `path`; None if there is none."""
    current: nn.Module | None = module
    for step in path.split("."):
        current = None if current is None else current._modules.get(step)
    return current


def layer_infos(found: list[MoELayerRef]) -> list[LayerInfo]:
    """Return the sizes and places of MoE layers, for `build_routers`."""
    return linked_in_order(
        [
            LayerInfo(
                moe_layer.name,
                *moe_layer.size,
                moe_layer.heads,
                recurrent=moe_layer.layer_modules.recurrent,
                vocabulary=moe_layer.vocabulary,
                uncaptured=moe_layer.dense is not None and moe_layer.dense.own_attention,
            )
            for moe_layer in found
        ]
    )


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
    """Whether the model is of a declared MoE family, has experts with fused weights, or was made by `sparsify`."""
    return has_experts(model) or any(isinstance(module, SparseLayer) for module in model.modules())


def _sparse_layers(model: nn.Module) -> list[MoELayerRef]:
    rows = {(row.place, row.projection): row for row in dense_family(model).rows}
    found = []
    for name, layer in model.named_modules():
        for row in rows.values():
            block, attention = find_submodule(layer, row.place), find_submodule(layer, row.attention)
            has_projection = find_submodule(layer, row.projection) is not None
            if isinstance(block, SparseLayer) and attention is not None and has_projection:
                config = getattr(attention, "config", None) or text_config(model)
                place = f"{name}.{row.place}".lstrip(".")
                modules = LayerModules(block, attention, layer, row.projection, row.windowed, declared_causal=row.causal)
                found.append(MoELayerRef(place, modules, None, row, config))
    _require_all(model, found, ((name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)))
    return found


def _modules_of(layer: nn.Module, family: MoEFamily) -> LayerModules:
    mixer = mixer_of(family, layer)
    assert mixer is not None
    attention = layer.get_submodule(mixer)
    # Some hybrid models have attention and recurrent modules under one name; only attention says whether it is causal.
    recurrent = mixer != family.attention or (mixer == family.recurrent and not hasattr(attention, "is_causal"))
    block = layer.get_submodule(family.block)
    return LayerModules(block, attention, layer, family.projection, recurrent=recurrent)


def _require_all(model: Any, found: list[MoELayerRef], expected: Iterator[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if a module of `expected`, MoE layers or their experts, is in none of the layers found."""
    inside = {id(module) for moe_layer in found for module in moe_layer.block.modules()}
    missed = [name for name, module in expected if id(module) not in inside]
    if missed:
        raise ValueError(
            f"{missed[0]} belongs to an MoE layer that Holdfast's row for {model.config.model_type} does not describe "
            f"({len(found)} layers fit): reading or changing only some of the layers is refused."
        )


def _moe_modules(family: MoEFamily, model: Any, found: list[MoELayerRef]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that looks like an MoE layer: with a gate and experts, or with a weight for each expert."""
    counts = {getattr(text_config(model), name, None) for name in EXPERT_COUNTS} | {moe_layer.size[1] for moe_layer in found}
    for name, module in model.named_modules():
        weights = (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)
        stacked = not isinstance(module, nn.modules.conv._ConvNd) and any(weight.shape[0] in counts for weight in weights)
        if stacked or (
            find_submodule(module, family.gate) is not None and find_submodule(module, family.experts) is not None
        ):
            yield name, module
