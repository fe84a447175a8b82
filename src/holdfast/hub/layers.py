"""Find the family of a model and its layers: those that `sparsify` can change, and the MoE layers, changed or not.

`moe_layers` finds every MoE layer with the modules around it. Everything that reads or changes routers calls it.

A vision-language model has its layers in up to three parts (parts.py). Everywhere else the part is None.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.adapters import active_module
from holdfast.hub.context import LayerModules
from holdfast.hub.families import (
    DENSE_FAMILIES,
    MOE_FAMILIES,
    PARTS,
    VISION_LANGUAGE_FAMILIES,
    DenseFamily,
    DenseLayer,
    MoEFamily,
    Part,
    rows_of_part,
    text_config,
)
from holdfast.hub.families.recognition import check_declared, fused_experts, recognise
from holdfast.hub.forwards import image_tokens
from holdfast.hub.parts import base_prefix, model_type_of, part_config, part_of, vision_language_family
from holdfast.hub.replacements import SparseLayer
from holdfast.hub.specs import LayerInfo, linked_in_order, reads
from holdfast.model_size import EXPERTS
from holdfast.routing import Router

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
    model_type = model_type_of(model)
    if model_type in MOE_FAMILIES:
        return MOE_FAMILIES[model_type]
    recognised = recognise(model)
    if recognised is not None:
        return recognised
    if model_type in DENSE_FAMILIES or model_type in VISION_LANGUAGE_FAMILIES:
        raise ValueError(f"{model_type} is a dense family. Make a dense model an MoE with holdfast.sparsify.")
    raise ValueError(
        f"this {model_type} model has no experts with fused weights, by which Holdfast recognises MoE layers. Declare the "
        "family with holdfast.register_family."
    )


def dense_family(model: nn.Module) -> DenseFamily:
    """Return the row of a dense model's family. Raise ValueError with advice if there is none."""
    model_type = model_type_of(model)
    if model_type not in DENSE_FAMILIES:
        if has_experts(model):
            raise ValueError(f"{model_type} is an MoE family. Change the routers of an MoE with holdfast.reroute.")
        raise ValueError(
            f"Holdfast does not know where the feed-forward networks of {model_type} are. Declare the family with "
            f"holdfast.register_family; known are {', '.join(sorted([*DENSE_FAMILIES, *VISION_LANGUAGE_FAMILIES]))}."
        )
    return DENSE_FAMILIES[model_type]


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
    dense: DenseLayer | None = None  # of a layer that `sparsify` made
    part: Part | None = None  # of a vision-language model

    @property
    def of_images(self) -> bool:
        """Whether its tokens are parts of images, and not those of `input_ids`."""
        return self.layer_modules.of_images

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
            return self.dense.config
        return attention.config if hasattr(attention, "config") else self.experts.config

    @property
    def size(self) -> tuple[int, int]:
        """Return (d, E)."""
        if isinstance(self.block, SparseLayer):
            return self.block.experts.dim, self.block.experts.experts
        assert self.family is not None
        experts, dim = self.gate.get_parameter(self.family.weight).shape
        return dim, experts


def moe_layers(model: nn.Module) -> list[MoELayerRef]:
    """Return every MoE layer of a model: of a known family, or made by `sparsify`.

    Raise ValueError if the model has MoE layers that the family's row does not describe. Everything that reads or changes
    routers calls this function, so that no part of the library silently works on some of the layers only.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    is_dense = model_type in DENSE_FAMILIES or model_type in VISION_LANGUAGE_FAMILIES
    if is_dense and (found := _sparse_layers(model)):
        return found
    family = moe_family(model)
    wanted, found = [f"{family.block}.{family.gate}", f"{family.block}.{family.experts}"], []
    for name, layer in model.named_modules():
        mixer = mixer_of(family, layer)
        if mixer is not None and all(find_submodule(layer, path) is not None for path in wanted):
            attention, block = layer.get_submodule(mixer), layer.get_submodule(family.block)
            # Some hybrid models have attention and recurrent modules under one name; only attention says if it is causal.
            recurrent = mixer != family.attention or (mixer == family.recurrent and not hasattr(attention, "is_causal"))
            modules = LayerModules(block, attention, layer, family.projection, recurrent=recurrent)
            block_name = f"{name}.{family.block}".lstrip(".")
            found.append(MoELayerRef(block_name, modules, family, part=part_of(model, block_name)))
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
    return _layers_of_rows(model, lambda row: (*row.up, row.down))


def feed_forward_layers(model: Any) -> dict[str, DenseLayer]:
    """Return every layer of a model of a dense family that has a feed-forward network, or experts in its place."""
    return _layers_of_rows(model, lambda row: (row.place,))


def _layers_of_rows(model: Any, wanted: Callable[[DenseFamily], Iterable[str]]) -> dict[str, DenseLayer]:
    """Return the layers that have the attention of a row and the modules at the paths `wanted(row)`, by name.

    Those of a vision-language model are in the order of its parts.
    """
    found: dict[str, DenseLayer] = {}
    for part, prefix, stack, rows, config in _stacks(model):
        for name, layer in stack.named_modules() if part != "connector" else [("", stack)]:
            for row in rows:
                around = (path for path in (row.attention, row.projection) if path)
                if all(find_submodule(layer, path) is not None for path in (*around, *wanted(row))):
                    attention = layer.get_submodule(row.attention) if row.attention else None
                    place = ".".join(step for step in (prefix, name, row.place) if step)
                    found[place] = DenseLayer(place, layer, row, getattr(attention, "config", None) or config, part)
    return found


def _stacks(model: Any) -> Iterator[tuple[Part | None, str, nn.Module, Sequence[DenseFamily], Any]]:
    """Yield part, name, module, rows and config of everything in a model that may have dense layers."""
    family = vision_language_family(model)
    if family is None:
        yield None, "", model, dense_family(model).rows, text_config(model)
        return
    prefix = base_prefix(model).removesuffix(".")
    base = model.get_submodule(prefix) if prefix else model
    for part in PARTS:
        if part == "connector":
            yield part, prefix, base, () if family.connector is None else (family.connector,), part_config(model, part)
        else:
            place = family.vision if part == "vision" else family.language
            config = part_config(model, part)
            name = f"{prefix}.{place}".lstrip(".")
            yield part, name, model.get_submodule(name), rows_of_part(config.model_type), config


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
    infos = []
    for moe_layer in found:
        row = None if moe_layer.dense is None else moe_layer.dense.family
        modules = moe_layer.layer_modules
        infos.append(layer_info(moe_layer.name, moe_layer.size, moe_layer.config, row, modules.recurrent, modules.of_images))
    return linked_in_order(infos)


def layer_info(
    name: str,
    size: tuple[int, int],
    config: Any,
    row: DenseFamily | None,
    recurrent: bool = False,
    of_images: bool = False,
) -> LayerInfo:
    """Return what a router is built for in a layer of `size` (d, E); `row` is that of a layer that is or was dense."""
    is_connector, packed = row is not None and not row.attention, row is not None and row.packed
    windowed = row is not None and row.windowed
    heads = None if recurrent or windowed or packed or is_connector else int(config.num_attention_heads)
    reads_ids = not of_images and (row is None or row.reads_token_ids)
    vocabulary = getattr(config, "vocab_size", None) if reads_ids else None
    vocabulary = vocabulary if isinstance(vocabulary, int) else None  # a vision model has none
    uncaptured = row is not None and row.own_attention
    kind: dict[str, Any] = {"uncaptured": uncaptured, "packed": packed, "connector": is_connector}
    return LayerInfo(name, *size, heads, recurrent=recurrent, vocabulary=vocabulary, **kind)


def require_modalities(model: nn.Module, router: str) -> None:
    """Raise ValueError if the router has a score for each modality, and all tokens of the model are text."""
    if reads(router, "modality") and not image_tokens(model):
        raise ValueError(
            f"router {router!r} has a score for each modality, and this model has no image token in its config; use 'smoe', "
            "or a vision and language model."
        )


def is_moe(model: nn.Module) -> bool:
    """Whether the model is of a declared MoE family, has experts with fused weights, or was made by `sparsify`."""
    return has_experts(model) or any(isinstance(module, SparseLayer) for module in model.modules())


def _sparse_layers(model: nn.Module) -> list[MoELayerRef]:
    found = []
    for name, dense in feed_forward_layers(model).items():
        row, block = dense.family, dense.layer.get_submodule(dense.family.place)
        if isinstance(block, SparseLayer):
            places = block, dense.attention, dense.layer, row.projection
            has_attention = not (row.windowed or row.packed or not row.attention)
            kind: dict[str, Any] = {"declared_causal": row.causal, "of_images": dense.of_images, "packed": row.packed}
            modules = LayerModules(*places, not has_attention, **kind)
            found.append(MoELayerRef(name, modules, None, dense, dense.part))
    _require_all(model, found, ((name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)))
    return found


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
    counts = {getattr(text_config(model), name, None) for name in EXPERTS} | {moe_layer.size[1] for moe_layer in found}
    for name, module in model.named_modules():
        weights = (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)
        stacked = not isinstance(module, nn.modules.conv._ConvNd) and any(weight.shape[0] in counts for weight in weights)
        if stacked or all(find_submodule(module, path) is not None for path in (family.gate, family.experts)):
            yield name, module
