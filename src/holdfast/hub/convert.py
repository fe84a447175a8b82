"""Which layers of a model to change.

Change the routers of a model that has experts, and change them back.

Turn a dense model's feed-forward networks into experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from holdfast.errors import unknown
from holdfast.hub.adapters import running
from holdfast.hub.families import DenseFamily, dense_family, find, layers_of
from holdfast.hub.folder_files import unmark_dequantised
from holdfast.hub.install import make_sparse, mark_changed, own_balance, reroute_sites, set_trained, specs_of, wiring
from holdfast.hub.layers import NATIVE, LayerSpec, Site, coefficients, sites
from holdfast.hub.model_classes import wire
from holdfast.hub.replacements import UNREADABLE_GATE, SparseLayer, uninstall
from holdfast.kernels.quantised import as_float, is_quantised
from holdfast.layers.losses import Losses
from holdfast.routing import Router
from holdfast.routing.presets import REGISTRY

Layers = str | Sequence[int]


def choose(layers: Layers, count: int) -> list[int]:
    """Indices among `count` layers: "all", "alternate" (every second, GLaM), "last:n" (V-MoE), or indices themselves."""
    if count == 0:
        raise ValueError("this model has no layer to change.")
    if not isinstance(layers, str):
        return _checked_indices(layers, count)
    if layers == "all":
        return list(range(count))
    if layers == "alternate":
        return list(range(1, count, 2)) or [0]
    kind, _, number = layers.partition(":")
    if kind != "last":
        raise ValueError(
            f"{unknown('choice of layers', layers, ('all', 'alternate', 'last:2'))[:-1]}, or a list of indices."
        )
    if not number.isdigit() or not 1 <= int(number) <= count:
        raise ValueError(f"layers is {layers!r}; the model has {count}, so it must be last:1 to last:{count}.")
    return list(range(count - int(number), count))


def _checked_indices(layers: Sequence[int], count: int) -> list[int]:
    for layer in layers:
        if not isinstance(layer, int) or not -count <= layer < count:
            raise ValueError(f"there is no layer {layer!r}: the model has {count}, counted from 0.")
    chosen = sorted({layer % count for layer in layers})
    if not chosen:
        raise ValueError("layers is empty; name at least one.")
    return chosen


def require_unwrapped(model: Any) -> None:
    """Changes belong to the model: put on a wrapper (PEFT's), they would come off with it."""
    if hasattr(model, "get_base_model"):
        raise ValueError(
            f"this {type(model).__name__} wraps the model; change the one inside, model.get_base_model(), or change it "
            "before wrapping."
        )


MODEL_BALANCE = "model_balance"  # among the terms, before the number of experts a token is known


Model = TypeVar("Model", bound=nn.Module)  # what goes in comes out, so that an editor knows its methods


def reroute(
    model: Model,
    router: str,
    *,
    k: int | None = None,
    layers: Layers = "all",
    losses: Losses | None = None,
    **options: Any,
) -> Model:
    """Give an MoE model another router, in place; its weights stay, and the router starts from the checkpoint's own scores.

    router      a name of `holdfast.list_routers()`, or several joined by +, with options in brackets where you like:
                "similarity[tau=2]+smooth"; "native" is the family's own rule, bit for bit
    k           experts a token; None is the model's own number
    layers      "all", "alternate", "last:n" or indices, among the MoE layers
    losses      what routers add to `outputs.loss` in training. None takes over the balance loss of a model that trains with
                one (`config.output_router_logits`), at its strength, computed from the real selections of each layer
    options     of the router, where they are not in brackets

    Where no name claims the scores, they are the checkpoint's, and weights follow its convention. Symphony's graph starts at
    the identity and AC at equal spreads, so both start from the checkpoint's outputs; `smooth` starts with a narrow strip.
    """
    require_unwrapped(model)
    if router != NATIVE:
        router, options = REGISTRY.resolve(router, options)
    unmark_dequantised(model)
    found = sites(model)
    chosen = [found[index] for index in choose(layers, len(found))]
    _require_no_copies(found)
    specs = specs_of(model)
    terms = _terms(model, losses, len(found))
    fresh = {}
    for site in chosen:
        _require_finite_gate(site)
        fresh[site.name] = _spec(site, specs.get(site.name), router, k, terms, options)
    if MODEL_BALANCE in terms:  # the model's own is over all layers, and makes way as a whole
        for site in found:
            if site.name not in fresh and site.name not in specs:
                fresh[site.name] = _spec(site, None, NATIVE, None, terms, {})
    if _reads_previous(router):
        for before in _before(found, fresh):  # that one must speak up
            if before.name not in specs:
                fresh[before.name] = LayerSpec(NATIVE, _native_k(before))
    former = {site.name: (site.router, specs.get(site.name)) for site in chosen}
    reroute_sites(found, fresh)
    for site in chosen:
        if isinstance(site.block, SparseLayer) and site.block.__dict__["former"] is None:
            site.block.__dict__["former"] = former[site.name]
    order = {site.name: index for index, site in enumerate(found)}
    wire(model, found, dict(sorted({**specs, **fresh}.items(), key=lambda entry: order[entry[0]])))
    mark_changed(model)
    return model


def restore(model: Model) -> Model:
    """The model's own routers again, in place. What was trained stays trained; what was not is bit for bit as it was."""
    current = wiring(model)
    if current is None:
        raise ValueError("nothing to restore: this model was not rerouted.")
    found = sites(model)
    _require_no_copies(found)
    if found[0].family is None:
        return _restore_sparse(model, found)
    for site in found:
        if site.name in current.specs:
            if hasattr(site.gate, "was_trained"):
                set_trained(site.gate, True)
            uninstall(site.gate)
    wire(model, found, {})
    mark_changed(model, False)
    return model


def _require_no_copies(found: list[Site]) -> None:
    """A change would reach only one of the gates that PEFT keeps, one for each adapter."""
    for site in found:
        gate = site.block.router if isinstance(site.block, SparseLayer) else find(site.block, site.family.gate)  # type: ignore[union-attr]
        if running(gate) is not gate:
            raise ValueError(
                f"{site.name}: PEFT holds copies of its gate (modules_to_save); change the model before wrapping it."
            )


def _restore_sparse(model: Model, found: list[Site]) -> Model:
    blocks = [site.block for site in found if isinstance(site.block, SparseLayer)]
    if not any(block.__dict__["former"] for block in blocks):
        raise ValueError("nothing to restore: its layers were made by sparsify, and the dense ones are gone.")
    specs = specs_of(model)
    for site, block in zip(found, blocks, strict=True):
        if block.__dict__["former"] is not None:
            block.router, specs[site.name] = block.__dict__["former"]
            block.__dict__["former"] = None
    wire(model, found, specs)
    return model


def _spec(
    site: Site, current: LayerSpec | None, router: str, k: int | None, losses: dict[str, float], options: dict[str, Any]
) -> LayerSpec:
    if isinstance(site.block, SparseLayer):
        assert current is not None
        if router == NATIVE:
            raise ValueError("a sparsified model has no native router; name one of holdfast.list_routers().")
        return replace(
            current,
            router=router,
            k=current.k if k is None else k,
            options=options,
            losses=losses or current.losses,
            pretrained=True,
            weights=_weights(site.block.router) or current.weights or "softmax",
        )
    own = _native_k(site)
    if router == NATIVE and k not in (None, own):
        raise ValueError(f"the native router of this model takes k = {own}; for another k, use 'smoe'.")
    # Balanced, the model's own loss is k and ours is 1.
    terms = {"balance": losses[MODEL_BALANCE] * own} if MODEL_BALANCE in losses else losses
    return LayerSpec(router, own if k is None else k, options, terms)


def _weights(router: Router) -> str | None:
    """How a sparse layer's experts have been weighted so far; None for a selector that has no such rule."""
    return router.select.convention


def _native_k(site: Site) -> int:
    return int(site.gate.top_k)


def _terms(model: Any, losses: Losses | None, layers: int) -> dict[str, float]:
    """Coefficients of the losses; of the model's own balance loss, which is one for all layers, under its own name."""
    if losses is not None:
        return coefficients(losses)
    own = own_balance(model)
    return {MODEL_BALANCE: own / layers} if own else {}


def _reads_previous(router: str) -> bool:
    return router != NATIVE and any("previous" in part.reads for part in REGISTRY.parts(router))


def _before(found: list[Site], specs: Mapping[str, LayerSpec]) -> list[Site]:
    """The layers just before those that `specs` names, and not among them."""
    return [before for before, site in pairwise(found) if site.name in specs and before.name not in specs]


@torch.no_grad()
def _require_finite_gate(site: Site) -> None:
    if site.family is None:
        return
    weight = as_float(site.gate, site.family.weight, UNREADABLE_GATE)
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError(f"{site.name}.{site.family.gate}: its weights hold NaN or infinity; the checkpoint is broken.")


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
