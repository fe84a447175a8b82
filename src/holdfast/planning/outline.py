"""The sizes of a planned model that its costs follow from, read off its modules: plain numbers, no tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.families import DENSE_FAMILIES, DenseFamily, MoEFamily, find, moe_family
from holdfast.hub.layers import Site, sites
from holdfast.routing import Part, Router
from holdfast.routing.declarations import Active, Cost, Place
from holdfast.routing.selection import check_k


@dataclass(frozen=True)
class Setting:
    """What the numbers are asked for."""

    sequence: int
    number: int = 2  # bytes a number of the model
    triangle: bool = True  # causal attention at the half that it needs, or at the whole square, as counters of FLOPs have it


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    cached: int  # numbers a token while decoding
    keys: float  # that a token looks at, on average
    projections: float  # FLOPs a token

    @property
    def mixing(self) -> float:
        """FLOPs a token: scores and the weighted sum."""
        return 2.0 * self.keys * self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class SparseShape:
    experts: int
    parameters: int  # of all experts
    flops: float  # of one expert, a token
    bias: bool
    hidden: int
    gated: bool
    ours: bool  # run by our experts function, which keeps less for the backward
    active: Active
    costs: tuple[Cost, ...]  # of the router's parts
    undeclared: tuple[str, ...]  # the parts that declare no cost
    router_parameters: int
    state: int  # bytes, float32 whatever the model is

    @property
    def inner(self) -> int:
        """The width of what an expert's first map puts out."""
        return 2 * self.hidden if self.gated else self.hidden

    def adding_biases(self, dim: int, used: float) -> tuple[float, float]:
        """FLOPs a token of adding biases, which our experts do by products with (rows,E) and (T,E) matrices."""
        if not (self.bias and self.ours):
            return 0.0, 0.0
        return 2.0 * used * self.experts * self.inner, 2.0 * self.experts * dim


@dataclass(frozen=True)
class LayerShape:
    name: str
    dim: int
    parameters: int
    attention: AttentionShape
    dense: float  # FLOPs a token of the feed-forward network that every token passes (a shared expert too)
    dense_widths: int  # sum of the widths of what its linear maps put out
    sparse: SparseShape | None
    goes_on: bool = False  # something that comes after its experts is kept for the backward


@dataclass(frozen=True)
class Outline:
    """A model with a router, as sizes."""

    model_type: str
    parameters: int
    trained: int
    layers: tuple[LayerShape, ...]
    head: float  # FLOPs a token outside the layers
    once: float  # FLOPs a sequence outside the layers
    vocabulary: int  # logits a token; 0 for a model that has none
    dim: int
    decodes: bool

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
        """All, less the experts that a token does not use, on average."""
        idle = sum(layer.parameters * (1 - layer.active.inference / layer.experts) for layer in self.sparse)
        return self.parameters - idle


def outline(model: Any, setting: Setting) -> Outline:
    """What there is to count in a model, which may be on `meta`."""
    family = _family(model)
    here = {id(site.neighbours.layer): site for site in sites(model)}
    layers: list[LayerShape] = []
    inside: set[int] = set()
    for name, layer in _layers(family, model):
        layers.append(_layer(family, name, layer, here.get(id(layer)), setting))
        inside.update(id(module) for module in layer.modules())
    head, once = 0.0, 0.0
    for name, module in model.named_modules():
        if id(module) not in inside and (size := _products(module)):
            if _once(model, name):
                once += size
            else:
                patches = (setting.sequence - 1) / setting.sequence if isinstance(module, nn.Conv2d) else 1.0
                head += size * patches  # a picture's first token is no patch
    written = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return Outline(
        model_type=family.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=tuple(layers),
        head=head,
        once=once,
        vocabulary=0 if written is None else written.weight.shape[0],
        dim=layers[-1].dim,
        decodes=all(_causal(layer.get_submodule(family.attention)) for _, layer in _layers(family, model)),
    )


def sequence_of(config: Any) -> tuple[int | None, int | None]:
    """The length that a model of pictures has, None for texts, and the longest text; None where nothing says."""
    patch = getattr(config, "patch_size", None)
    if patch:
        return (int(config.image_size) // int(patch)) ** 2 + 1, None
    longest = getattr(config, "max_position_embeddings", None)
    return None, None if longest is None else int(longest)


def _family(model: Any) -> MoEFamily | DenseFamily:
    model_type = model.config.model_type
    return DENSE_FAMILIES[model_type] if model_type in DENSE_FAMILIES else moe_family(model)


def _layers(family: MoEFamily | DenseFamily, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every transformer layer, with experts or not: DeepSeek's first ones are dense."""
    for name, module in model.named_modules():
        if find(module, family.attention) is not None and find(module, family.projection) is not None:
            yield name, module


def _causal(attention: nn.Module) -> bool:
    return bool(getattr(attention, "is_causal", False))


def _layer(family: MoEFamily | DenseFamily, name: str, layer: nn.Module, site: Site | None, setting: Setting) -> LayerShape:
    around = family.attention.split(".")[0] + "."
    of_experts: set[int] = set()
    if site is not None:
        of_experts = {id(module) for module in site.experts.modules()} | {id(module) for module in _gate(site).modules()}
    projections, dense, widths = 0.0, 0.0, 0
    for path, module in layer.named_modules():
        if id(module) in of_experts or not _products(module):
            continue
        if path.startswith(around):
            projections += _products(module)
        else:
            dense += _products(module)
            widths += _width(module)
    attention = _attention(family, layer, projections, setting)
    dim = _width(layer.get_submodule(family.projection))
    return LayerShape(
        name=name,
        dim=dim,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        attention=attention,
        dense=dense,
        dense_widths=widths,
        sparse=None if site is None else _sparse(site, attention, setting),
        goes_on=dense > 0 or _dropped_or_normed(family, layer),
    )


def _dropped_or_normed(family: MoEFamily | DenseFamily, layer: nn.Module) -> bool:
    """Of the feed-forward network's output. What is bypassed is followed by BERT's norm."""
    around = family.attention.split(".")[0] + "."
    drops = (m.p > 0 for path, m in layer.named_modules() if isinstance(m, nn.Dropout) and not path.startswith(around))
    return any(drops) or (isinstance(family, DenseFamily) and bool(family.bypassed))


def _attention(family: MoEFamily | DenseFamily, layer: nn.Module, projections: float, setting: Setting) -> AttentionShape:
    attention: Any = layer.get_submodule(family.attention)
    config = attention.config
    heads = int(config.num_attention_heads)
    projection: Any = layer.get_submodule(family.projection)
    value = projection.weight.numel() // _width(projection) // heads
    groups = int(getattr(attention, "num_key_value_groups", 1))
    key = int(getattr(attention, "qk_head_dim", value))
    latent = getattr(attention, "kv_lora_rank", None)  # keys and values are cached before they are spread over heads
    return AttentionShape(
        heads=heads,
        key_heads=heads // groups,
        key_width=key,
        value_width=value,
        cached=heads // groups * (key + value) if latent is None else int(latent + attention.qk_rope_head_dim),
        keys=_seen(setting, _causal(attention), _window(attention, config)),
        projections=projections,
    )


def _window(attention: Any, config: Any) -> int | None:
    """How far back a token looks, itself included; None is to the start."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[attention.layer_idx] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def _seen(setting: Setting, causal: bool, window: int | None = None) -> float:
    """How many tokens a token looks at, on average: all, or (N + 1) / 2, or those of a window w, w - w (w - 1) / 2N."""
    length = setting.sequence
    if not causal or not setting.triangle:
        return float(length)
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)


def _sparse(site: Site, attention: AttentionShape, setting: Setting) -> SparseShape:
    dim, experts = site.size
    matrices = [parameter.numel() for parameter in site.experts.parameters() if parameter.dim() == 3]
    parameters = sum(parameter.numel() for parameter in site.experts.parameters())
    hidden = min(matrices) // (experts * dim)
    router = site.router
    parts = [] if router is None else _parts(router)
    place = Place(
        dim=dim,
        experts=experts,
        length=setting.sequence,
        mixed=_seen(
            setting, _causal(site.neighbours.attention)
        ),  # a window hides what is mixed, the product is taken all the same
        heads=attention.heads,
        key_width=attention.key_width,
        value_width=attention.value_width,
        number=setting.number,
    )
    return SparseShape(
        experts=experts,
        parameters=parameters,
        flops=2.0 * sum(matrices) / experts,
        hidden=hidden,
        bias=parameters > sum(matrices),
        gated=max(matrices) > min(matrices),
        ours=site.family is None or (router is not None and router.select.ragged),
        active=_native_active(site) if router is None else _active(router, place),
        costs=_native_costs(place) if router is None else _costs(parts, place),
        undeclared=tuple(type(part).__name__ for part in parts if part.cost(place) is None),
        router_parameters=sum(parameter.numel() for parameter in _gate(site).parameters()),
        state=0 if router is None else state_of(router),
    )


def _parts(router: Router) -> list[Part]:
    """The router's parts in their order; those that a part wraps come before it."""
    return [declaring for part in router.parts for declaring in (*part.wrapped, part)]


def _costs(parts: list[Part], place: Place) -> tuple[Cost, ...]:
    declared = (part.cost(place) for part in parts)
    return tuple(cost for cost in declared if cost is not None)


def _active(router: Router, place: Place) -> Active:
    """As the selector declares; all experts where it declares nothing."""
    declared = router.select.active_experts(place)
    if declared is not None:
        return declared
    return Active(place.experts, place.experts, place.experts, f"{type(router.select).__name__}: at most")


def state_of(router: Router) -> int:
    """Bytes of what a router keeps without gradients; the name it tells errors by is no state."""
    return sum(buffer.numel() * buffer.element_size() for part in router.parts for buffer in part.buffers())


def _gate(site: Site) -> nn.Module:
    """What scores and chooses: our router in a layer that was dense, else the family's gate, with our router inside."""
    if site.family is not None:
        gate: nn.Module = site.gate
        return gate
    assert site.router is not None
    return site.router


def _native_active(site: Site) -> Active:
    k = int(site.gate.top_k)
    check_k(k, site.size[1])
    return Active(k, k, k)


def _native_costs(place: Place) -> tuple[Cost, ...]:
    forward = 2.0 * place.dim * place.experts
    return (Cost("score", forward, 2 * forward, kept=8.0 * place.experts),)


def _products(module: nn.Module) -> float:
    """FLOPs a row of a linear map, 0 for what is none."""
    from transformers.pytorch_utils import Conv1D

    return 2.0 * module.weight.numel() if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) else 0.0


def _width(module: Any) -> int:
    """Of what a linear map puts out; GPT-2's keep their weights transposed."""
    from transformers.pytorch_utils import Conv1D

    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def _once(model: Any, name: str) -> bool:
    """Is a linear map outside the layers asked once a sequence?"""
    steps = name.split(".")
    return "pooler" in steps or (steps[0] == "classifier" and "TokenClassification" not in type(model).__name__)
