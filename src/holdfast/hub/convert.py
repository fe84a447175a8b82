"""Change a model in place: `reroute` and `restore` the routers of an MoE, `sparsify` a dense model into an MoE.

All three follow the same steps: check everything, write down the wanted layers as specs (`LayerSpec`), change the layers
(install.py), then install hooks and the classes that save the changes (`install_hooks_and_classes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from holdfast.errors import require_known, unknown_name
from holdfast.hub.adapters import active_module
from holdfast.hub.families import PARTS, DenseLayer, dense_weights, initial_std, without_dropout
from holdfast.hub.folder_files import unmark_dequantised
from holdfast.hub.install import (
    hooks_of,
    make_sparse,
    mark_modified,
    native_balance,
    reroute_layers,
    set_gate_trainable,
    specs_of,
)
from holdfast.hub.layers import MoELayerRef, dense_family, dense_layers, find_submodule, moe_layers, require_modalities
from holdfast.hub.model_classes import install_hooks_and_classes
from holdfast.hub.parts import (
    InPart,
    chosen_parts,
    in_parts,
    is_read,
    no_dense_layer,
    part_of,
    require_dense_language,
    vision_language_family,
)
from holdfast.hub.replacements import SparseLayer, gate_weight, uninstall_gate
from holdfast.hub.specs import NATIVE, NOT_A_ROUTER, LayerSpec, reads
from holdfast.kernels.quantised import is_quantised
from holdfast.layers.expert_losses import Teacher
from holdfast.layers.losses import Losses
from holdfast.layers.upcycling import DenseTeacher, fill_experts, fill_shared
from holdfast.routing.declarations import LayerKind
from holdfast.routing.grammar import split_options
from holdfast.routing.presets import REGISTRY, LayerRouter, has_layers, resolve_layers, routers_by_layer

Layers = str | Sequence[int]
ONE_LAYER = "a connector is one layer, which `parts` chooses: leave out `layers`, and @ in the router."
DEFAULT_K = 2  # experts per token of a layer that sparsify makes
LAYER_ROUTERS: dict[str, str | None] = {"moe": None, "soft": "softmoe", "smear": "smear"}  # the name of each kind of layer
Model = TypeVar("Model", bound=nn.Module)  # the returned model has the type of the given one, for editors


def reroute(
    model: Model,
    router: str,
    *,
    k: int | None = None,
    layers: Layers = "all",
    parts: str | Sequence[str] | None = None,
    losses: Losses | None = None,
    **options: Any,
) -> Model:
    """Give an MoE model another router, in place. Its weights stay, and the router starts from the checkpoint's scores.

    router      a name of `holdfast.list_routers()`, or several joined by +, optionally with options in brackets:
                "similarity[tau=2]+smooth"; "native" is the family's own rule, bit for bit. Layers may follow a router,
                and | joins routers for different layers: "ac@1,3,5", "similarity@even|attention@odd"
    k           experts per token; None: the model's own number
    layers      "all", "alternate", "last:n" or indices, among the MoE layers; @ in `router` chooses among these. Layers that
                are not chosen do not change
    parts       of a vision-language model: "vision", "connector", "language" or several; None: all that have MoE layers.
                `layers` and @ count within each part (`sparsify`)
    losses      what routers add to `outputs.loss` in training. None: if the model trains with a balance loss
                (`config.output_router_logits`), one of the same strength, computed from the real selections of each layer
    options     of the router, if they are not in brackets

    If no name replaces the score stage, scores are the checkpoint's, and weights follow its rule. The graph of `symphony`
    starts at the identity and `ac` at equal spreads, so both start from the checkpoint's outputs; `smooth` starts with a
    narrow strip.
    """
    require_unwrapped(model)
    routers = resolve_layers(router, options, k=k, native=True)
    for one in routers:
        require_modalities(model, one.router)
    unmark_dequantised(model)
    wanted_parts = chosen_parts(model, parts)
    found = moe_layers(model)
    for part in wanted_parts or ():
        if part not in in_parts(found):
            raise ValueError(f"its part {part!r} has no MoE layer; make it sparse with holdfast.sparsify(parts={part!r}).")
    possible = [layer for layer in found if wanted_parts is None or layer.part in wanted_parts]
    candidates = choose_in_parts(layers, possible)
    pairs = zip(candidates, routers_in_parts(routers, candidates), strict=True)
    wanted = {layer.name: one for layer, one in pairs if one}
    chosen = [moe_layer for moe_layer in found if moe_layer.name in wanted]
    kinds = {layer.router.select.layer_kind for layer in chosen if layer.router is not None}
    kinds |= {REGISTRY.layer_kind(one.router) for one in routers if one.router != NATIVE}
    if kinds - {"moe"}:
        raise ValueError(NOT_A_ROUTER)
    _require_no_copies(found)
    for moe_layer in chosen:
        if moe_layer.family is not None:
            weight = gate_weight(moe_layer.gate, moe_layer.family.weight).detach()
            if not weight.is_meta and not bool(weight.isfinite().all()):
                place = f"{moe_layer.name}.{moe_layer.family.gate}"
                raise ValueError(f"{place}: its weights contain NaN or infinity; the checkpoint is broken.")
    specs = specs_of(model)
    changed = _changed_specs(model, found, wanted, losses)
    former = {moe_layer.name: (moe_layer.router, specs.get(moe_layer.name)) for moe_layer in chosen}
    reroute_layers(found, changed)
    for moe_layer in chosen:
        if isinstance(moe_layer.block, SparseLayer) and moe_layer.block.__dict__["former"] is None:
            moe_layer.block.__dict__["former"] = former[moe_layer.name]
    specs |= changed
    install_hooks_and_classes(model, found, {layer.name: specs[layer.name] for layer in found if layer.name in specs})
    mark_modified(model)
    return model


def set_losses(model: Model, losses: Losses) -> Model:
    """Give the routers of a changed model other losses, in place; routers and their state stay."""
    specs = specs_of(model)
    if not specs:
        raise ValueError("this model has no router of Holdfast; reroute it with the losses.")
    found = moe_layers(model)
    changed = {name: replace(spec, losses=losses) for name, spec in specs.items()}
    for moe_layer in found:
        if moe_layer.name in changed:
            owner = moe_layer.gate if moe_layer.router is None else moe_layer.router
            owner.losses = losses
    install_hooks_and_classes(model, found, changed)
    return model


def set_teacher(model: Model, teacher: Teacher | Mapping[str, Teacher]) -> Model:
    """Give the MoE layers of a model a teacher for the loss distillation, in place of any other.

    teacher   a function from the tokens (T,d) that experts get to (T,d), which is called without gradients; or one for each
              layer, by the layer's name. Place its tensors on the layer's device; it is not saved with the model
    """
    found = {moe_layer.name: moe_layer.block for moe_layer in moe_layers(model)}
    by_layer = teacher if isinstance(teacher, Mapping) else dict.fromkeys(found, teacher)
    for name in by_layer:
        require_known("MoE layer", name, found)
    for name, given in by_layer.items():
        if not callable(given):
            raise ValueError(f"the teacher of {name} is {given!r}; expected a function of tokens (T,d).")
        found[name]._modules.pop("teacher", None)
        found[name].__dict__["teacher"] = given  # not a submodule: it is neither trained nor saved
    return model


def _changed_specs(
    model: Any, found: list[MoELayerRef], wanted: Mapping[str, LayerRouter], losses: Losses | None
) -> dict[str, LayerSpec]:
    """Return a spec for each wanted layer, and for other layers that must take part in a loss or record their routing."""
    specs = specs_of(model)
    # The model's own balance loss is the mean over all layers, so ours replaces it in all of them.
    balance = native_balance(model) / len(found) if losses is None else 0.0
    changed = {}
    for layer in found:
        if layer.name in wanted or (balance and layer.name not in specs):
            one = wanted.get(layer.name, LayerRouter(NATIVE))
            changed[layer.name] = _spec(layer, specs.get(layer.name), one, losses, balance)
    for before, layer in pairwise(found):  # the layer before one that reads it must record its routing
        reads_before = layer.name in changed and reads(changed[layer.name].router, "previous")
        if reads_before and before.name not in {**specs, **changed}:
            changed[before.name] = LayerSpec(NATIVE, int(before.gate.top_k))
    return changed


def restore(model: Model) -> Model:
    """Give a model its own routers back, in place. Trained weights stay trained; all others are unchanged bit for bit."""
    current = hooks_of(model)
    if current is None:
        raise ValueError("nothing to restore: this model was not rerouted.")
    found = moe_layers(model)
    _require_no_copies(found)
    if found[0].family is None:
        blocks = [moe_layer.block for moe_layer in found if isinstance(moe_layer.block, SparseLayer)]
        if not any(block.__dict__["former"] for block in blocks):
            raise ValueError("nothing to restore: sparsify made these layers, and the dense layers were not kept.")
        specs = specs_of(model)
        for moe_layer, block in zip(found, blocks, strict=True):
            if block.__dict__["former"] is not None:
                block.router, specs[moe_layer.name] = block.__dict__["former"]
                block.__dict__["former"] = None
        install_hooks_and_classes(model, found, specs)
        return model
    for moe_layer in found:
        if moe_layer.name in current.specs:
            if hasattr(moe_layer.gate, "was_trained"):
                set_gate_trainable(moe_layer.gate, True)
            uninstall_gate(moe_layer.gate)
            moe_layer.block.__dict__.pop("teacher", None)
    install_hooks_and_classes(model, found, {})
    mark_modified(model, False)
    return model


def _require_no_copies(found: list[MoELayerRef]) -> None:
    """Raise ValueError if PEFT has a copy of a gate for each adapter: a change would reach only one of them."""
    for moe_layer in found:
        path = "router" if moe_layer.family is None else moe_layer.family.gate
        gate = moe_layer.block.get_submodule(path)
        if active_module(gate) is not gate:
            raise ValueError(f"{moe_layer.name}: PEFT has copies of its gate (modules_to_save); change it before wrapping.")


def _spec(
    moe_layer: MoELayerRef, current: LayerSpec | None, wanted: LayerRouter, losses: Losses | None, balance: float
) -> LayerSpec:
    router, k, options = wanted.router, wanted.k, wanted.options
    if isinstance(moe_layer.block, SparseLayer):
        assert current is not None
        if router == NATIVE:
            raise ValueError("a sparsified model has no native router; name one of holdfast.list_routers().")
        # The rule by which the experts are weighted now; a selector may have none.
        weights = moe_layer.block.router.select.declares.weights_option or current.weights or "softmax"
        k, losses = current.k if k is None else k, current.losses if losses is None else losses
        return replace(current, router=router, k=k, options=options, losses=losses, pretrained=True, weights=weights)
    own = int(moe_layer.gate.top_k)
    if router == NATIVE and k not in (None, own):
        raise ValueError(f"the native router of this model takes k = {own}; for another k, use 'smoe'.")
    # At a balanced load the model's own loss is k, and ours is 1.
    losses = Losses(balance=balance * own) if balance else losses
    return LayerSpec(router, own if k is None else k, options, losses)


def sparsify(
    model: Model,
    *,
    experts: int,
    k: int | None = None,
    router: str = "smoe",
    layer: LayerKind = "moe",
    layers: Layers = "all",
    parts: str | Sequence[str] | None = None,
    hidden: int | None = None,
    shared: int | None = None,
    init: Literal["copy", "random"] = "copy",
    noise: float = 0.0,
    losses: Losses | None = None,
    router_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Model:
    """Make a dense Hugging Face model an MoE, in place: replace feed-forward networks by `experts` experts and a router.

    k           experts per token, 2 by default
    layer       "moe"; "soft" for SoftMoE layers, whose option is `slots`; "smear" for SMEAR layers. `layer="soft",
                router="symphony"` is the same as `router="softmoe+symphony"`. These layers have no k. They are not causal: a
                causal model refuses them without the option causal=False
    layers      "all" (Switch), "alternate" (GLaM), "last:2" (V-MoE), or indices
    parts       of a vision-language model: "vision", "connector", "language", or several of them; None: "language". `layers`
                and @ in `router` count within each part, "last:2" is then two layers of the tower and two of the language
                model. The connector is one layer: `layers` does not apply to it, and it gets the router without @. Call
                again for a part that is still dense
    hidden      width of each expert; None: that of the dense network
    shared      the number of shared experts, each as wide as an expert: they run on every token, and their outputs are added
                to those of the selected experts. With init="copy" their output projections start at 0 (below)
    init        "copy" is sparse upcycling: every expert starts as a copy of the dense network, so that the outputs stay the
                same (with weights that sum to 1; not with layer="soft", where experts see means of tokens). The first shared
                expert then starts as a copy too, others are random, and all of them have output projections of 0.
                "random" starts with random weights
    noise       added to copied weights, relative to their standard deviation, so that experts differ from the start
    losses      what routers and layers add to `outputs.loss` in training. With `distillation` and init="copy" each layer
                keeps its dense network, frozen, as the teacher of its experts (`holdfast.set_teacher`)
    router      a name of `holdfast.list_routers()`, or several joined by +, optionally with options in brackets. Layers may
                follow a router, and | joins routers for different layers: "ac@1,3,5", "similarity@even|attention@odd". They
                are indices among the layers that become sparse; a layer that no router is for has "smoe"
    options     of the router, if they are not in brackets; use `router_options` for a name that is also an argument of this
                function (symphony's `init`, `noise`)
    """
    require_unwrapped(model)
    unmark_dequantised(model)
    options = {**options, **(router_options or {})}
    routers = resolve_layers(_with_layer(router, layer), options, k=k, native=True)
    for one in routers:
        require_modalities(model, one.router)
    require_known("init", init, ("copy", "random"))
    if noise < 0 or (noise and init != "copy"):
        raise ValueError(f"noise is {noise} with init={init!r}; it is added to copied weights and cannot be negative.")
    if hidden is not None and hidden < 1:
        raise ValueError(f"hidden is {hidden}; an expert is at least 1 wide.")
    chosen = _layers_to_change(model, parts, layers)
    for dense in chosen:
        _require_sparsifiable(dense, hidden, init)
    copied = init == "copy"
    # The sum over copies equals the dense network only with weights that sum to 1.
    rule: Literal["softmax"] | None = "softmax" if copied else None
    plain = LayerSpec("smoe", DEFAULT_K if k is None else k, {}, losses, copied, experts, hidden, rule, shared)
    targets = {dense.name: dense for dense in chosen}
    weights_of = {name: dense_weights(dense) if init == "copy" else None for name, dense in targets.items()}
    specs = sparse_specs(chosen, routers, plain)
    for name, sparse in make_sparse(targets, specs).items():
        std = initial_std(targets[name].config)
        if sparse.shared is not None:
            fill_shared(sparse.shared, weights_of[name], std)
        weights = weights_of.pop(name)
        fill_experts(sparse.experts, weights, noise, std)
        if weights is not None and losses is not None and losses.distillation:
            sparse.teacher = DenseTeacher(weights, without_dropout(sparse.experts.activation))
    found, specs = moe_layers(model), specs_of(model) | specs
    install_hooks_and_classes(model, found, {layer.name: specs[layer.name] for layer in found})
    mark_modified(model)
    return model


def _layers_to_change(model: Any, parts: str | Sequence[str] | None, layers: Layers) -> list[DenseLayer]:
    """Return the layers that `sparsify` makes sparse. Raise ValueError if one of `parts` has none, or is sparse already."""
    wanted = chosen_parts(model, parts)
    sparse = [name for name, module in model.named_modules() if isinstance(module, SparseLayer)]
    if vision_language_family(model) is None:
        if sparse:
            raise ValueError("this model is already sparse; change its routers with holdfast.reroute.")
        found = list(dense_layers(model).values())
        if not found:
            raise ValueError(f"this {dense_family(model).model_type} model has no feed-forward network to sparsify.")
        _require_all_layers(model, found)
        return choose_in_parts(layers, found)
    if any(name not in specs_of(model) for name in sparse):
        raise ValueError(
            "a model inside this one was made sparse by itself, so that its routers would not be saved with the whole; call "
            "sparsify on the whole model, and name what becomes sparse with parts=."
        )
    require_dense_language(model)
    wanted = ("language",) if wanted is None else wanted
    for part in wanted:
        if any(part_of(model, name) == part for name in sparse):
            left = [f"{other!r}" for other in PARTS if not any(part_of(model, name) == other for name in sparse)]
            dense = f"still dense: parts={', '.join(left)}" if left else "no part is dense"
            raise ValueError(
                f"the part {part!r} of this model is already sparse ({dense}); change its routers with holdfast.reroute."
            )
    every = in_parts(dense_layers(model).values())
    found = []
    for part in wanted:
        if part not in every:
            raise ValueError(no_dense_layer(model, part))
        _require_all_layers(model, every[part])
        found += [dense for dense in every[part] if is_read(model, dense, every[part])]
    return choose_in_parts(layers, found)


def choose_in_parts(layers: Layers, found: Sequence[InPart]) -> list[InPart]:
    """Return the layers that `layers` chooses, which counts within each part; a connector is always chosen."""
    chosen: list[InPart] = []
    if layers != "all" and list(in_parts(found)) == ["connector"]:
        raise ValueError(ONE_LAYER)
    for part, own in in_parts(found).items():
        of = "the model" if part is None else f"its part {part!r}"
        indices = range(len(own)) if part == "connector" else choose_layers(layers, len(own), of)
        chosen += [own[index] for index in indices]
    return chosen


def routers_in_parts(routers: list[LayerRouter], layers: Sequence[InPart]) -> list[LayerRouter | None]:
    """Return the router for each layer, None for a layer that none is for: @ counts within each part.

    A connector gets the router without @.
    """
    found: list[LayerRouter | None] = []
    if list(in_parts(layers)) == ["connector"] and all(one.layers is not None for one in routers):
        raise ValueError(ONE_LAYER)
    for part, own in in_parts(layers).items():
        given = [one for one in routers if one.layers is None] if part == "connector" else routers
        try:
            found += routers_by_layer(given, len(own))
        except ValueError as problem:
            raise ValueError(str(problem) if part is None else f"part {part!r}: {problem}") from None
    return found


def sparse_specs(layers: Sequence[DenseLayer], routers: list[LayerRouter], plain: LayerSpec) -> dict[str, LayerSpec]:
    """Return the specs of the layers that become sparse: `plain`, with the router that the layer gets if one is for it."""
    if plain.shared is not None and plain.shared < 1:
        raise ValueError(f"shared is {plain.shared}; give the number of shared experts, or leave it out for none.")
    specs = {}
    for layer, one in zip(layers, routers_in_parts(routers, layers), strict=True):
        k = plain.k if one is None or one.k is None else one.k
        specs[layer.name] = plain if one is None else replace(plain, router=one.router, k=k, options=one.options)
    return specs


def _require_all_layers(model: nn.Module, found: list[DenseLayer]) -> None:
    """Raise ValueError if a layer beside those found has a feed-forward network that the family's row does not describe."""
    known, family = {id(dense.layer) for dense in found}, found[0].family
    for name, stack in model.named_modules():
        layers = list(stack.named_children()) if isinstance(stack, nn.ModuleList) else []
        if any(id(layer) in known for _, layer in layers):
            for number, layer in layers:
                if id(layer) not in known and find_submodule(layer, family.place) is not None:
                    raise ValueError(
                        f"{name}.{number}.{family.place} or the layer around it is not as in other {family.model_type} "
                        "models, so sparsify would skip it; load the model without what changed that layer."
                    )


def _require_sparsifiable(dense: DenseLayer, hidden: int | None, init: str) -> None:
    name, config, dropout = dense.name, dense.config, dense.family.zero_dropout
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ValueError("config.chunk_size_feed_forward cuts sequences before the feed-forward network; set it to 0 first.")
    if dropout is not None and getattr(config, dropout):
        raise ValueError(f"config.{dropout} is {getattr(config, dropout)}; experts have no dropout inside: load it with 0.")
    for path in (*dense.family.up, dense.family.down):
        linear: Any = dense.layer.get_submodule(path)
        weight = getattr(linear, "weight", None)
        if weight is None or is_quantised(weight) or hasattr(linear, "qweight"):
            raise ValueError(
                f"{name}: its feed-forward weights are quantised ({type(linear).__name__}), and experts are copied from "
                "unquantised weights; sparsify the model before quantising it."
            )
    weights = dense_weights(dense)
    has_values = torch.get_default_device().type != "meta"  # a plan has none
    for weight in weights.values() if has_values else ():
        if weight.is_meta:
            raise ValueError(f"{name}: its weights are not in memory (offloaded); load the model without offloading first.")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name}: its feed-forward weights contain NaN or infinity; the checkpoint is broken.")
    if init == "copy" and hidden not in (None, weights["down_proj"].shape[1]):
        raise ValueError(
            f"hidden is {hidden}, but a copied expert is as wide as the dense network, {weights['down_proj'].shape[1]}; "
            'leave it out, or use init="random".'
        )


def _with_layer(router: str, layer: LayerKind) -> str:
    """Return the router name for a kind of layer: `layer="soft"` adds the name "softmoe"."""
    require_known("layer", layer, LAYER_ROUTERS)
    name = LAYER_ROUTERS[layer]
    if name is None or router == NATIVE:
        return router
    if has_layers(router):
        raise ValueError(f"layer={layer!r} is for all layers; write the name {name!r} into {router!r} where it is meant.")
    if name in split_options(router)[0]:
        return router
    return name if router == "smoe" else f"{name}+{router}"


def choose_layers(layers: Layers, count: int, of: str = "the model") -> list[int]:
    """Return indices among `count` layers for "all", "alternate" (every second, GLaM), "last:n" (V-MoE), or indices.

    of   what has these layers, for error messages
    """
    if count == 0:
        raise ValueError(f"{of} has no layer to change." if of != "the model" else "this model has no layer to change.")
    if not isinstance(layers, str):
        for layer in layers:
            if not isinstance(layer, int) or not -count <= layer < count:
                raise ValueError(f"there is no layer {layer!r}: {of} has {count}, counted from 0.")
        if not layers:
            raise ValueError("layers is empty; name at least one.")
        return sorted({layer % count for layer in layers})
    if layers == "all":
        return list(range(count))
    if layers == "alternate":
        return list(range(1, count, 2)) or [0]
    kind, _, number = layers.partition(":")
    if kind != "last":
        raise ValueError(f"{unknown_name('choice of layers', layers, ('all', 'alternate', 'last:2'))[:-1]}, or indices.")
    if not number.isdigit() or not 1 <= int(number) <= count:
        raise ValueError(f"layers is {layers!r}; {of} has {count}, so it must be last:1 to last:{count}.")
    return list(range(count - int(number), count))


def require_unwrapped(model: Any) -> None:
    """Raise ValueError for a wrapper (PEFT's): changes put on it would be lost when it is removed."""
    if hasattr(model, "get_base_model"):
        raise ValueError(f"this {type(model).__name__} wraps the model; change model.get_base_model() instead.")
