"""Measure the shape of a model: the sizes that its costs follow from, as plain numbers.

Sizes are read from the modules of a model, which may be on the `meta` device. `resources` computes costs from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.families import DENSE_FAMILIES, DenseFamily, MoEFamily, find_submodule, moe_family
from holdfast.hub.layers import MoELayerRef, moe_layers
from holdfast.routing import Router
from holdfast.routing.declarations import ActiveExperts, Cost, LayerKind, LayerSizes
from holdfast.routing.selection import check_k

Family = MoEFamily | DenseFamily


@dataclass(frozen=True)
class Setting:
    """The sequence length and the dtype that costs are computed for."""

    sequence: int  # tokens
    number_bytes: int = 2  # of one number of the model
    causal_half: bool = True  # count the half that causal attention needs; False counts the full square, as FLOP counters do


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer."""

    heads: int
    key_heads: int
    key_width: int
    value_width: int
    cached: int  # numbers per token while decoding
    keys: float  # that a token attends to, on average
    projections: float  # FLOPs per token

    @property
    def mixing(self) -> float:
        """Return the FLOPs per token of scores and weighted sums."""
        return 2.0 * self.keys * self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class SparseShape:
    """The experts and the router of one layer."""

    experts: int
    parameters: int  # of all experts
    flops: float  # of one expert, per token
    hidden: int
    gated: bool
    runs_holdfast: bool  # its experts run in Holdfast's experts function, which saves less for the backward
    active: ActiveExperts
    costs: tuple[Cost, ...]  # of the router's parts
    undeclared: tuple[str, ...]  # the parts that declare no cost
    router_parameters: int
    state: int  # bytes, in float32 whatever the dtype of the model
    kind: LayerKind = "moe"

    @property
    def inner(self) -> int:
        """Return the output width of an expert's first linear map."""
        return 2 * self.hidden if self.gated else self.hidden


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer."""

    name: str
    dim: int
    parameters: int
    attention: AttentionShape
    dense: float  # FLOPs per token of the feed-forward network that every token passes (also of a shared expert)
    dense_widths: int  # sum of the output widths of its linear maps
    sparse: SparseShape | None
    continues_after_experts: bool = False  # an operation after its experts saves something for the backward


@dataclass(frozen=True)
class ModelShape:
    """A model with its routers."""

    model_type: str
    parameters: int
    trained: int
    layers: tuple[LayerShape, ...]
    outside_flops: float  # per token, outside the layers
    outside_flops_per_sequence: float  # of maps that run once per sequence
    vocabulary: int  # logits per token; 0 for a model that has none
    dim: int
    decodes: bool  # every layer is causal

    @property
    def sparse(self) -> tuple[SparseShape, ...]:
        return tuple(layer.sparse for layer in self.layers if layer.sparse is not None)

    @property
    def expert_parameters(self) -> int:
        return sum(layer.parameters for layer in self.sparse)

    @property
    def router_parameters(self) -> int:
        return sum(layer.router_parameters for layer in self.sparse)

    @property
    def state(self) -> int:
        return sum(layer.state for layer in self.sparse)

    def active_parameters(self) -> float:
        """Return all parameters minus those of the experts that a token does not use, on average."""
        unused = sum(layer.parameters * (1 - layer.active.inference / layer.experts) for layer in self.sparse)
        return self.parameters - unused


def measure_shape(model: Any, setting: Setting) -> ModelShape:
    """Return the shape of a model, which may be on `meta`."""
    family = _family(model)
    sites_by_layer = {id(site.layer_modules.layer): site for site in moe_layers(model)}
    layers: list[LayerShape] = []
    inside: set[int] = set()
    for name, layer in _transformer_layers(family, model):
        layers.append(_layer_shape(family, name, layer, sites_by_layer.get(id(layer)), setting))
        inside.update(id(module) for module in layer.modules())
    outside, per_sequence = 0.0, 0.0
    for name, module in model.named_modules():
        if id(module) not in inside and (size := _linear_flops(module)):
            if _runs_once_per_sequence(model, name):
                per_sequence += size
            else:
                patches = (setting.sequence - 1) / setting.sequence if isinstance(module, nn.Conv2d) else 1.0
                outside += size * patches  # the first token of an image is not a patch
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return ModelShape(
        model_type=family.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=tuple(layers),
        outside_flops=outside,
        outside_flops_per_sequence=per_sequence,
        vocabulary=0 if head is None else head.weight.shape[0],
        dim=layers[-1].dim,
        decodes=all(_causal(layer.get_submodule(family.attention)) for _, layer in _transformer_layers(family, model)),
    )


def sequence_lengths(config: Any) -> tuple[int | None, int | None]:
    """Return the fixed length of an image model and the largest length of a text model; None for what does not apply."""
    patch = getattr(config, "patch_size", None)
    if patch:
        return (int(config.image_size) // int(patch)) ** 2 + 1, None
    longest = getattr(config, "max_position_embeddings", None)
    return None, None if longest is None else int(longest)


def _family(model: Any) -> Family:
    model_type = model.config.model_type
    return DENSE_FAMILIES[model_type] if model_type in DENSE_FAMILIES else moe_family(model)


def _transformer_layers(family: Family, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every transformer layer with its name, with experts or not: DeepSeek's first layers are dense."""
    for name, module in model.named_modules():
        if find_submodule(module, family.attention) is not None and find_submodule(module, family.projection) is not None:
            yield name, module


def _causal(attention: nn.Module) -> bool:
    return bool(getattr(attention, "is_causal", False))


def _layer_shape(family: Family, name: str, layer: nn.Module, site: MoELayerRef | None, setting: Setting) -> LayerShape:
    attention_block = family.attention.split(".")[0] + "."
    of_experts: set[int] = set()
    if site is not None:
        of_experts = {id(module) for module in site.experts.modules()} | {
            id(module) for module in _gate_module(site).modules()
        }
    projections, dense, widths = 0.0, 0.0, 0
    for path, module in layer.named_modules():
        if id(module) in of_experts or not _linear_flops(module):
            continue
        if path.startswith(attention_block):
            projections += _linear_flops(module)
        else:
            dense += _linear_flops(module)
            widths += _output_width(module)
    attention = _attention_shape(family, layer, projections, setting)
    dim = _output_width(layer.get_submodule(family.projection))
    return LayerShape(
        name=name,
        dim=dim,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        attention=attention,
        dense=dense,
        dense_widths=widths,
        sparse=None if site is None else _sparse_shape(site, attention, setting),
        continues_after_experts=dense > 0 or _has_dropout_or_norm_after(family, layer),
    )


def _has_dropout_or_norm_after(family: Family, layer: nn.Module) -> bool:
    """Return whether dropout or a norm (BERT's) reads the output of the feed-forward network."""
    attention_block = family.attention.split(".")[0] + "."
    drops = (
        m.p > 0 for path, m in layer.named_modules() if isinstance(m, nn.Dropout) and not path.startswith(attention_block)
    )
    return any(drops) or (isinstance(family, DenseFamily) and bool(family.bypassed))


def _attention_shape(family: Family, layer: nn.Module, projections: float, setting: Setting) -> AttentionShape:
    attention: Any = layer.get_submodule(family.attention)
    config = attention.config
    heads = int(config.num_attention_heads)
    projection: Any = layer.get_submodule(family.projection)
    value = projection.weight.numel() // _output_width(projection) // heads
    groups = int(getattr(attention, "num_key_value_groups", 1))
    key = int(getattr(attention, "qk_head_dim", value))
    latent = getattr(attention, "kv_lora_rank", None)  # then keys and values are cached before they are projected to heads
    return AttentionShape(
        heads=heads,
        key_heads=heads // groups,
        key_width=key,
        value_width=value,
        cached=heads // groups * (key + value) if latent is None else int(latent + attention.qk_rope_head_dim),
        keys=_attended_tokens(setting, _causal(attention), _window(attention, config)),
        projections=projections,
    )


def _window(attention: Any, config: Any) -> int | None:
    """Return how many tokens a token attends to, itself included; None: all before it."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[attention.layer_idx] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def _attended_tokens(setting: Setting, causal: bool, window: int | None = None) -> float:
    """Return how many tokens a token attends to on average: N, causally (N + 1) / 2, in a window w - w (w - 1) / 2N."""
    length = setting.sequence
    if not causal or not setting.causal_half:
        return float(length)
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)


def _sparse_shape(site: MoELayerRef, attention: AttentionShape, setting: Setting) -> SparseShape:
    dim, experts = site.size
    matrices = [parameter.numel() for parameter in site.experts.parameters() if parameter.dim() == 3]
    parameters = sum(parameter.numel() for parameter in site.experts.parameters())
    hidden = min(matrices) // (experts * dim)
    router = site.router
    parts = [] if router is None else router.all_parts
    place = LayerSizes(
        dim=dim,
        experts=experts,
        length=setting.sequence,
        # Without the window: it masks the mixing weights, but their product is computed in full.
        mixed=_attended_tokens(setting, _causal(site.layer_modules.attention)),
        heads=attention.heads,
        key_width=attention.key_width,
        value_width=attention.value_width,
        number=setting.number_bytes,
        expert_parameters=parameters // experts,
    )
    return SparseShape(
        experts=experts,
        parameters=parameters,
        flops=2.0 * sum(matrices) / experts,
        hidden=hidden,
        gated=max(matrices) > min(matrices),
        runs_holdfast=site.family is None or (router is not None and router.select.ragged),
        active=_native_active_experts(site) if router is None else _active_experts(router, place),
        costs=_native_costs(place) if router is None else _declared_costs(router, place),
        undeclared=tuple(type(part).__name__ for part in parts if part.cost(place) is None),
        router_parameters=sum(parameter.numel() for parameter in _gate_module(site).parameters()),
        state=0 if router is None else state_bytes(router),
        kind="moe" if router is None else router.select.layer_kind,
    )


def _declared_costs(router: Router, place: LayerSizes) -> tuple[Cost, ...]:
    declared = (*(part.cost(place) for part in router.all_parts), router.select.layer_cost(place))
    return tuple(cost for cost in declared if cost is not None)


def _active_experts(router: Router, place: LayerSizes) -> ActiveExperts:
    """Return what the selector declares; all experts if it declares nothing."""
    declared = router.select.active_experts(place)
    if declared is not None:
        return declared
    return ActiveExperts(place.experts, place.experts, place.experts, f"{type(router.select).__name__}: at most")


def state_bytes(router: Router) -> int:
    """Return the bytes of the buffers of a router's parts that are saved with a model."""
    return sum(
        buffer.numel() * buffer.element_size()
        for part in router.parts
        for module in part.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    )


def _gate_module(site: MoELayerRef) -> nn.Module:
    """Return the module that routes: Holdfast's router in a sparsified layer, else the family's gate, rerouted or not."""
    if site.family is not None:
        gate: nn.Module = site.gate
        return gate
    assert site.router is not None
    return site.router


def _native_active_experts(site: MoELayerRef) -> ActiveExperts:
    k = int(site.gate.top_k)
    check_k(k, site.size[1])
    return ActiveExperts(k, k, k)


def _native_costs(place: LayerSizes) -> tuple[Cost, ...]:
    forward = 2.0 * place.dim * place.experts
    return (Cost("score", forward, 2 * forward, kept=8.0 * place.experts),)


def _linear_flops(module: nn.Module) -> float:
    """Return the FLOPs per row of a linear map; 0 for any other module."""
    from transformers.pytorch_utils import Conv1D

    return 2.0 * module.weight.numel() if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) else 0.0


def _output_width(module: Any) -> int:
    """Return the output width of a linear map; GPT-2 stores its weights transposed."""
    from transformers.pytorch_utils import Conv1D

    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def _runs_once_per_sequence(model: Any, name: str) -> bool:
    """Return whether a linear map outside the layers runs once per sequence."""
    steps = name.split(".")
    return "pooler" in steps or (steps[0] == "classifier" and "TokenClassification" not in type(model).__name__)
