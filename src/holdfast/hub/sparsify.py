"""Turn a dense model's feed-forward networks into experts."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from holdfast.hub.changed import wire
from holdfast.hub.families import DenseFamily, dense_family, find, layers_of
from holdfast.hub.layers import Layers, choose, require_unwrapped
from holdfast.hub.quantisers import unmark_dequantised
from holdfast.hub.sites import sites
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.specs import NATIVE, LayerSpec, coefficients
from holdfast.hub.surgery import make_sparse
from holdfast.hub.wiring import mark_changed
from holdfast.kernels.quantised import is_quantised
from holdfast.losses import Losses
from holdfast.routing.presets import REGISTRY
from holdfast.suggest import unknown


def sparsify(
    model: Model,
    *,
    experts: int,
    k: int = 2,
    router: str = "smoe",
    layers: Layers = "all",
    hidden: int | None = None,
    init: Literal["copy", "random"] = "copy",
    noise: float = 0.0,
    losses: Losses | None = None,
    router_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Model:
    """Make a dense Hugging Face model an MoE, in place: each chosen layer's feed-forward network becomes `experts` of them.

    layers      "all" (Switch), "alternate" (GLaM), "last:2" (V-MoE), or indices
    hidden      width of each expert; None is the dense network's
    init        "copy" is sparse upcycling: every expert starts as the dense network, so the model computes what it did
                (where weights sum to 1). "random" starts anew
    noise       of copied weights, relative to their standard deviation, so that experts differ from the start
    losses      what routers add to `outputs.loss` in training
    router      a name of `holdfast.list_routers()`, or several joined by +, with options in brackets where you like
    options     of the router, where they are not in brackets; in `router_options` where an argument of this function has
                the same name (symphony's `init`, `noise`)
    """
    require_unwrapped(model)
    unmark_dequantised(model)
    options = {**options, **(router_options or {})}
    if router != NATIVE:
        router, options = REGISTRY.resolve(router, options)
    if init not in ("copy", "random"):
        raise ValueError(unknown("init", init, ("copy", "random")))
    if noise < 0 or (noise and init != "copy"):
        raise ValueError(f"noise is {noise} with init={init!r}; it disturbs copied weights and cannot be negative.")
    if hidden is not None and hidden < 1:
        raise ValueError(f"hidden is {hidden}; an expert is at least 1 wide.")
    if any(isinstance(module, SparseLayer) for module in model.modules()):
        raise ValueError("this model is sparse already; reroute changes its routers.")
    family = dense_family(model)
    found = list(layers_of(family, model))
    if not found:
        raise ValueError(f"this {family.model_type} model has no feed-forward network to sparsify.")
    _require_all_layers(family, model, [layer for _, layer in found])
    chosen = [found[index] for index in choose(layers, len(found))]
    for name, layer in chosen:
        _require_usable(family, name, layer, hidden, init)
    copied = init == "copy"
    # Copies compute what the dense network did only with weights that sum to 1.
    weights = "softmax" if copied else None
    spec = LayerSpec(router, k, options, coefficients(losses), copied, experts, hidden, weights)
    targets = {f"{name}.{family.place}".lstrip("."): layer for name, layer in chosen}
    dense = {name: _dense_weights(family, layer) if init == "copy" else None for name, layer in targets.items()}
    specs = dict.fromkeys(targets, spec)
    for name, sparse in make_sparse(family, targets, specs).items():
        _fill(sparse, dense.pop(name), noise, _spread(targets[name], family))
    wire(model, sites(model), specs)
    mark_changed(model)
    return model


def _require_all_layers(family: DenseFamily, model: nn.Module, found: list[nn.Module]) -> None:
    """Raise where a layer beside those found has a feed-forward network that the family's row does not describe."""
    known = {id(layer) for layer in found}
    for name, stack in model.named_modules():
        layers = list(stack.named_children()) if isinstance(stack, nn.ModuleList) else []
        if any(id(layer) in known for _, layer in layers):
            for number, layer in layers:
                if id(layer) not in known and find(layer, family.place) is not None:
                    raise ValueError(
                        f"{name}.{number}.{family.place} or the layer around it is not as in other {family.model_type} "
                        "models, so sparsify would pass it over; load the model without what changed that layer."
                    )


def _require_usable(family: DenseFamily, name: str, layer: nn.Module, hidden: int | None, init: str) -> None:
    config = layer.get_submodule(family.attention).config
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ValueError("config.chunk_size_feed_forward cuts sequences before the feed-forward network; set it to 0 first.")
    _require_dense(family, name, layer)
    weights = _dense_weights(family, layer)
    for weight in weights.values():
        if weight.is_meta:
            raise ValueError(f"{name}: its weights are not in memory (offloaded); load the model without offloading first.")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name}: its feed-forward weights hold NaN or infinity; the checkpoint is broken.")
    if init == "copy" and hidden not in (None, weights["down_proj"].shape[1]):
        raise ValueError(
            f"hidden is {hidden}, but a copied expert is as wide as the dense network, {weights['down_proj'].shape[1]}; "
            'leave it out, or use init="random".'
        )


def _require_dense(family: DenseFamily, name: str, layer: nn.Module) -> None:
    for path in (*family.up, family.down):
        linear: Any = layer.get_submodule(path)
        weight = getattr(linear, "weight", None)
        if weight is None or is_quantised(weight) or hasattr(linear, "qweight"):
            raise ValueError(
                f"{name}: its feed-forward weights are quantised ({type(linear).__name__}), and experts start from numbers; "
                "sparsify the model before quantising it."
            )


@torch.no_grad()
def _dense_weights(family: DenseFamily, layer: nn.Module) -> dict[str, Tensor]:
    """The dense network's weights under the names and in the shapes of one expert's."""
    from transformers.pytorch_utils import Conv1D

    up_name = "gate_up_proj" if family.gated else "up_proj"
    weights = {}
    for name, paths in ((up_name, family.up), ("down_proj", (family.down,))):
        linears: list[Any] = [layer.get_submodule(path) for path in paths]
        matrices = [linear.weight.t() if isinstance(linear, Conv1D) else linear.weight for linear in linears]
        weights[name] = torch.cat([matrix.detach() for matrix in matrices])
        biases: list[Any] = [getattr(linear, "bias", None) for linear in linears]
        if biases[0] is not None:
            weights[f"{name}_bias"] = torch.cat([bias.detach() for bias in biases])
    return weights


@torch.no_grad()
def _fill(sparse: SparseLayer, dense: dict[str, Tensor] | None, noise: float, spread: float) -> None:
    for name, parameter in sparse.experts.named_parameters():
        if dense is None:
            parameter.zero_() if name.endswith("_bias") else parameter.normal_(std=spread)
            continue
        parameter.copy_(dense[name].expand_as(parameter))
        if noise and not name.endswith("_bias"):
            parameter.add_(torch.randn_like(parameter), alpha=noise * float(dense[name].float().std()))


def _spread(layer: nn.Module, family: DenseFamily) -> float:
    """The standard deviation that the model's own weights start with."""
    return float(getattr(layer.get_submodule(family.attention).config, "initializer_range", 0.02))
