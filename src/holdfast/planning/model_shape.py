"""Measure the shape of a model: the sizes that its costs follow from, as plain numbers.

Sizes are read from the modules of a model, which may be on the `meta` device. FLOPs are those of matrix products, a
multiply-add counts 2. Of the model they follow from the sizes; of the parts of a router they are counted by running them,
with torch's counter and the operators of Holdfast (`counting`). Softmax, sorting and scaling are not counted.

B sequences of N tokens
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor, nn

from holdfast.hub.families import DENSE_FAMILIES, DenseFamily, MoEFamily
from holdfast.hub.layers import MoELayerRef, find_submodule, moe_family, moe_layers
from holdfast.hub.replacements import needs_holdfast_experts
from holdfast.routing import Attention, Context, Informer, Noise, Part, Previous, Router, Routing, Scores, Selector
from holdfast.routing.declarations import FLOAT, ActiveExperts, Cost, LayerKind, LayerSizes
from holdfast.routing.presets import REGISTRY
from holdfast.routing.selection import check_k

Family = MoEFamily | DenseFamily
Shape = torch.Size


@dataclass(frozen=True)
class Setting:
    """The sequence length and the dtype that costs are computed for."""

    sequence: int  # tokens
    number_bytes: int = 2  # of one number of the model
    causal_half: bool = True  # count the half that causal attention needs; False: the square, as eager attention computes


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
class PartFlops:
    """FLOPs per token of one part of a router."""

    forward: float = 0.0  # at inference
    training: float = 0.0  # of a training step: with noise, state updates and backward
    again: float = 0.0  # of a recomputation, which updates no state

    def __add__(self, other: "PartFlops") -> "PartFlops":
        return PartFlops(self.forward + other.forward, self.training + other.training, self.again + other.again)

    def __sub__(self, other: "PartFlops") -> "PartFlops":
        return PartFlops(self.forward - other.forward, self.training - other.training, self.again - other.again)


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
    part_flops: dict[str, PartFlops]  # of the router's parts, by the name of their row
    notes: tuple[str, ...]  # which costs of the router's parts are not known
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
    model_type = model.config.model_type
    family: Family = DENSE_FAMILIES[model_type] if model_type in DENSE_FAMILIES else moe_family(model)
    sites_by_layer = {id(site.layer_modules.layer): site for site in moe_layers(model)}
    layers: list[LayerShape] = []
    inside: set[int] = set()
    experts = None
    for name, layer in _transformer_layers(family, model):
        site = sites_by_layer.get(id(layer))
        layers.append(_layer_shape(family, name, layer, site, setting, experts))
        experts = experts if site is None else site.size[1]
        inside.update(id(module) for module in layer.modules())
    outside = 0.0
    for name, module in model.named_modules():
        if id(module) not in inside:
            rows, steps = setting.sequence, name.split(".")
            if "pooler" in steps or (steps[0] == "classifier" and "TokenClassification" not in type(model).__name__):
                rows = 1
            elif isinstance(module, nn.Conv2d):
                rows -= 1  # the first token of an image is not a patch
            outside += _linear_flops(module) * rows / setting.sequence
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return ModelShape(
        model_type=family.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=tuple(layers),
        outside_flops=outside,
        vocabulary=0 if head is None else head.weight.shape[0],
        dim=layers[-1].dim,
        decodes=all(_causal(layer.get_submodule(family.attention)) for _, layer in _transformer_layers(family, model)),
    )


def _transformer_layers(family: Family, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every transformer layer with its name, with experts or not: DeepSeek's first layers are dense."""
    for name, module in model.named_modules():
        if find_submodule(module, family.attention) is not None and find_submodule(module, family.projection) is not None:
            yield name, module


def _causal(attention: nn.Module) -> bool:
    return bool(getattr(attention, "is_causal", False))


def _layer_shape(
    family: Family, name: str, layer: nn.Module, site: MoELayerRef | None, setting: Setting, previous_experts: int | None
) -> LayerShape:
    attention_block = family.attention.split(".")[0] + "."
    routed = () if site is None else (site.experts, _gate_module(site))
    of_experts = {id(module) for block in routed for module in block.modules()}
    projections, dense, widths = 0.0, 0.0, 0
    # Dropout or a norm (BERT's) that reads the output of the feed-forward network saves its input.
    is_saved = isinstance(family, DenseFamily) and bool(family.bypassed)
    for path, module in layer.named_modules():
        if path.startswith(attention_block):
            projections += _linear_flops(module)
        elif id(module) not in of_experts and _linear_flops(module):
            dense += _linear_flops(module)
            widths += _output_width(module)
        elif isinstance(module, nn.Dropout):
            is_saved = is_saved or module.p > 0
    attention = _attention_shape(family, layer, projections, setting)
    return LayerShape(
        name=name,
        dim=_output_width(layer.get_submodule(family.projection)),
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        attention=attention,
        dense=dense,
        dense_widths=widths,
        sparse=None if site is None else _sparse_shape(site, attention, setting, previous_experts),
        continues_after_experts=dense > 0 or is_saved,
    )


def _attention_shape(family: Family, layer: nn.Module, projections: float, setting: Setting) -> AttentionShape:
    attention: Any = layer.get_submodule(family.attention)
    config = attention.config
    heads = int(config.num_attention_heads)
    projection: Any = layer.get_submodule(family.projection)
    value = projection.weight.numel() // _output_width(projection) // heads
    groups = int(getattr(attention, "num_key_value_groups", 1))
    key = int(getattr(attention, "qk_head_dim", value))
    latent = getattr(attention, "kv_lora_rank", None)  # then keys and values are cached before they are projected to heads
    keys = float(setting.sequence)  # a token attends to N, causally (N + 1) / 2, in a window w - w (w - 1) / 2N on average
    if _causal(attention) and setting.causal_half:
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if hasattr(attention, "sliding_window"):
            window = attention.sliding_window
        elif kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
            window = None  # it attends to all tokens before it
        width = setting.sequence if window is None else min(window, setting.sequence)
        keys = width - width * (width - 1) / (2 * setting.sequence)
    return AttentionShape(
        heads=heads,
        key_heads=heads // groups,
        key_width=key,
        value_width=value,
        cached=heads // groups * (key + value) if latent is None else int(latent + attention.qk_rope_head_dim),
        keys=keys,
        projections=projections,
    )


def _sparse_shape(
    site: MoELayerRef, attention: AttentionShape, setting: Setting, previous_experts: int | None
) -> SparseShape:
    dim, experts = site.size
    matrices = [parameter.numel() for parameter in site.experts.parameters() if parameter.dim() == 3]
    parameters = sum(parameter.numel() for parameter in site.experts.parameters())
    router = site.router
    sizes = LayerSizes(
        dim=dim,
        experts=experts,
        length=setting.sequence,
        heads=attention.heads,
        key_width=attention.key_width,
        value_width=attention.value_width,
        number=setting.number_bytes,
        expert_parameters=parameters // experts,
        # Without the window: it masks the mixing weights, but their product is computed in full.
        causal=_causal(site.layer_modules.attention),
        previous_experts=experts if previous_experts is None else previous_experts,
    )
    if router is None:  # the family's own gate
        k, forward = int(site.gate.top_k), 2.0 * dim * experts
        check_k(k, experts)
        costs, flops = [Cost("score", kept=8.0 * experts)], {"score": PartFlops(forward, 3 * forward, forward)}
        notes, active = list[str](), ActiveExperts(k, k, k)
    else:
        costs, flops, notes = _router_costs(router, sizes, next(site.experts.parameters()).device)
        at_most = ActiveExperts(experts, experts, experts, f"{REGISTRY.name_of(router.select)}: at most")
        declared = router.select.declares.active
        active = at_most if declared is None else declared(sizes)
    return SparseShape(
        experts=experts,
        parameters=parameters,
        flops=2.0 * sum(matrices) / experts,
        hidden=min(matrices) // (experts * dim),
        gated=max(matrices) > min(matrices),
        runs_holdfast=site.family is None or needs_holdfast_experts(router),
        active=active,
        costs=tuple(costs),
        part_flops=flops,
        notes=tuple(notes),
        router_parameters=sum(parameter.numel() for parameter in _gate_module(site).parameters()),
        state=0 if router is None else state_bytes(router),
        kind="moe" if router is None else router.select.layer_kind,
    )


def _router_costs(
    router: Router, sizes: LayerSizes, device: torch.device
) -> tuple[list[Cost], dict[str, PartFlops], list[str]]:
    """Return what the parts of a router declare, their FLOPs by row, and what is not known."""
    costs, flops, notes = list[Cost](), dict[str, PartFlops](), list[str]()
    for part in router.all_parts:
        declared, name = part.declares.cost, REGISTRY.name_of(part)
        if declared is None:
            notes.append(f"{name}: memory not declared, only its parameters, state and FLOPs are counted")
        else:
            costs.append(declared(sizes))
            name = costs[-1].part
        counted = own_flops(part, sizes, device)
        if counted is None:
            notes.append(f"{name}: its FLOPs cannot be counted without data")
        else:
            flops[name] = flops.get(name, PartFlops()) + counted
    if router.gradient_scaling is not None:  # sums the loads, in a recomputation too
        costs.append(Cost("gradient scaling", summed=FLOAT * sizes.experts, summed_again=FLOAT * sizes.experts))
    if (layer_cost := router.select.declares.layer_cost) is not None:
        costs.append(cost := layer_cost(sizes))
        flops[cost.part] = PartFlops(cost.flops, 3 * cost.flops, cost.flops)
    return costs, flops, notes


# Layers of a model, and the routers of a plan, often have equal parts, which are counted once.
_counted: dict[str, PartFlops | None] = {}


def own_flops(part: Part, sizes: LayerSizes, device: torch.device) -> PartFlops | None:
    """Return the FLOPs of a part without those of the part that it wraps; None if it cannot run without data."""
    whole = _flops_of(part, sizes, device)
    for inner in part.wrapped[-1:]:  # the outermost
        of_inner = _flops_of(inner, sizes, device)
        whole = None if whole is None or of_inner is None else whole - of_inner
    return whole


def _flops_of(part: Part, sizes: LayerSizes, device: torch.device) -> PartFlops | None:
    if isinstance(part, Informer) and part.inert:  # the router skips it
        return PartFlops()
    options = [
        (type(module), {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)})
        for module in part.modules()
    ]
    key = repr((sizes, options, [parameter.shape for parameter in part.parameters()]))
    if key not in _counted:
        with suppress(RuntimeError, NotImplementedError):  # it reads a number from a tensor, which has none on `meta`
            _counted[key] = count_flops(part, sizes, device)
    return _counted.setdefault(key, None)


def count_flops(part: Part, sizes: LayerSizes, device: torch.device) -> PartFlops:
    """Return the FLOPs per token of a part, which is on `device`. Products that run once in a forward are not counted."""

    def per_token(training: bool, learning: bool) -> tuple[float, ...]:
        few = _run(part, sizes, 1, device, training, learning)
        many = _run(part, sizes, 2, device, training, learning) if any(few) else few
        return tuple((more - less) / sizes.length for less, more in zip(few, many, strict=True))

    before, mode = {name: buffer.clone() for name, buffer in part.named_buffers()}, (part.training, part.learning)
    inference, _ = per_token(False, False) if not isinstance(part, Noise) else (0.0, 0.0)  # evaluation draws no noise
    forward, backward = per_token(True, True)
    again, _ = per_token(True, False)
    _set_mode(part, *mode)
    for name, buffer in part.named_buffers():
        buffer.copy_(before[name])
    return PartFlops(inference, forward + backward, again)


def _run(
    part: Part, sizes: LayerSizes, sequences: int, device: torch.device, training: bool, learning: bool
) -> tuple[int, int]:
    """Return the FLOPs of a forward of `sequences` sequences and, in training, of its backward."""
    shape, heads = (sequences, sizes.length), (sequences, sizes.heads, sizes.length)

    def leaf(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, requires_grad=True)

    def indices(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    tokens, logits, gates = (leaf(*shape, width) for width in (sizes.dim, sizes.experts, sizes.experts))
    query, key, value = leaf(*heads, sizes.key_width), leaf(*heads, sizes.key_width), leaf(*heads, sizes.value_width)
    projection = nn.Linear(sizes.heads * sizes.value_width, sizes.dim, bias=False, device=device)
    earlier = leaf(sequences * sizes.length, sizes.previous_experts or sizes.experts).detach()
    context = Context(
        causal=sizes.causal,
        attention=Attention(query, key, value, projection, leaf(*shape, sizes.dim)),
        previous=Previous(tokens.detach(), Routing(earlier, earlier, indices(len(earlier), 1), earlier[:, :1])),
        token_ids=indices(*shape),
        modality=indices(*shape),
    )
    _set_mode(part, training, learning)
    # A plan is made by one process, also in a distributed run: its statistics are not summed over ranks.
    with counting() as forward, patch.object(torch.distributed, "is_initialized", lambda: False):
        if isinstance(part, Selector):
            selected = part(Scores(logits, gates, informed=False, raw=logits), tokens, context)
            of_slots = [rows for rows in (selected.dispatch, selected.shares) if rows is not None]
            outputs = [selected.weights, *selected.losses.values(), *of_slots]
        elif isinstance(part, Informer):
            outputs = [part(gates, logits, tokens, context)]
        else:
            outputs = [part(logits, tokens) if isinstance(part, Noise) else part(tokens, context)]
    with counting() as backward:
        total = torch.stack([output.sum() for output in outputs]).sum()
        if training and total.requires_grad:
            total.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _set_mode(part: Part, training: bool, learning: bool) -> None:
    part.train(training)
    for module in part.modules():
        if isinstance(module, Part):
            module.learning = learning


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
    module: nn.Module | None = site.router if site.family is None else site.gate
    assert module is not None
    return module


def _linear_flops(module: nn.Module) -> float:
    """Return the FLOPs per row of a linear map; 0 for any other module."""
    from transformers.pytorch_utils import Conv1D

    return 2.0 * module.weight.numel() if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) else 0.0


def _output_width(module: Any) -> int:
    """Return the output width of a linear map; GPT-2 stores its weights transposed."""
    from transformers.pytorch_utils import Conv1D

    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


@contextmanager
def counting() -> Iterator[Any]:
    """Count the FLOPs of the matrix products inside the `with`, including those of Holdfast's operators."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    ops = torch.ops.holdfast
    flops = {  # by the shapes of operands
        ops.matmul_float32: lambda left, right, **_: 2 * left[0] * left[1] * right[1],
        ops.softmax_mix: lambda *operands, **_: _mix(1, 1, operands),
        # After the gradients and the results; it computes the scores again.
        ops.softmax_mix_backward: lambda *operands, **_: _mix(3, 2, operands[4:]),
        ops.attention_entropy: _entropy,
        ops.gather_mm: lambda tokens, weight, index, *_, **__: 2 * index[0] * weight[1] * weight[2],
        ops.gather_mm_backward: lambda grad, tokens, weight, *_, **__: 4 * grad[0] * weight[1] * weight[2],
        ops.mm_combine: lambda hidden, weight, *_, **__: 2 * hidden[0] * weight[1] * weight[2],
        ops.mm_combine_backward: lambda grad, hidden, weight, *_, **__: 4 * hidden[0] * weight[1] * weight[2],
    }
    with FlopCounterMode(display=False, custom_mapping=flops) as counter:
        yield counter


def _mix(products: int, sums: int, operands: Sequence[Any]) -> int:
    """Return the FLOPs of so many products of two tokens' vectors, and of so many weighted sums of gates."""
    query, key, value, second, *_, causal, _, _ = operands[:15]
    width = query[2] + (0 if second is None else second[2])
    return 2 * query[0] * _pairs(query[1], key[1], causal) * (products * width + sums * value[2])


def _entropy(query: Shape, key: Shape, *settings: Any, out_shape: Any, **_: Any) -> int:
    # `out_shape` has the sampled queries.
    return 2 * prod(query[:2]) * query[3] * _pairs(query[2], key[2], settings[2]) * out_shape[2] // query[2]


def _pairs(queries: int, keys: int, causal: bool) -> int:
    """Return the pairs of a query and a key that it sees: causal attention needs half of the square, and the diagonal."""
    return queries * (2 * keys - queries + 1) // 2 if causal else queries * keys
