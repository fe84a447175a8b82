"""Put a router into the model that a recipe starts from: `sparsify` a dense model, `reroute` one that has experts.

A model on `meta` is changed without values, for `preflight`.
"""

from typing import Any

from holdfast.hub import reroute, sparsify
from holdfast.hub.convert import choose_layers, set_losses
from holdfast.hub.families import DENSE_FAMILIES, dense_family, find_submodule, mixer_of, moe_family
from holdfast.hub.install import specs_of
from holdfast.hub.layers import is_moe, layer_infos, moe_layers
from holdfast.hub.specs import LayerSpec
from holdfast.planning.meta_model import Change, Choice, sparsify_on_meta
from holdfast.routing.layer_names import resolve_layers, routers_by_layer
from holdfast.train.recipe import Recipe, RouterChoice, SparsePart

DEFAULT_K = 2  # experts per token in a layer that was dense


def put_router(model: Any, recipe: Recipe, choice: RouterChoice) -> bool:
    """Give the model the router, in place; return whether the model was dense and has new experts now."""
    sparse, losses = recipe.sparse, recipe.router_losses()
    k = sparse.k if choice.k is None else choice.k
    if is_moe(model):
        _require_no_contradiction(sparse, model, recipe.model.checkpoint)
        if _has_router(model, choice, k):
            set_losses(model, losses)
        else:
            reroute(model, choice.router, k=k, losses=losses, **choice.options)
        return False
    if sparse.experts is None:
        raise ValueError(f"{recipe.model.checkpoint} is a dense model: set sparse.experts to the number of experts.")
    k, copied = DEFAULT_K if k is None else k, starts_with_copies(recipe)
    if any(parameter.is_meta for parameter in model.parameters()):
        change = Change(sparse.experts, k, sparse.layers, sparse.hidden, copied, losses, sparse.shared)
        sparsify_on_meta(model, Choice(choice.name, choice.router, choice.options, choice.k), change)
        return True
    sparsify(
        model,
        experts=sparse.experts,
        k=k,
        hidden=sparse.hidden,
        shared=sparse.shared,
        layers=sparse.layers,
        init="copy" if copied else "random",
        router=choice.router,
        losses=losses,
        router_options=choice.options,
    )
    return True


def starts_with_copies(recipe: Recipe) -> bool:
    """Return whether experts start as copies of a dense network: by default those of a checkpoint do."""
    init = recipe.sparse.init or ("copy" if recipe.model.checkpoint is not None else "random")
    return init == "copy"


def _has_router(model: Any, choice: RouterChoice, k: int | None) -> bool:
    """Return whether every MoE layer has this router already, with these options: then it keeps its state."""
    specs, names = specs_of(model), [layer.name for layer in moe_layers(model)]
    wanted = routers_by_layer(resolve_layers(choice.router, dict(choice.options), k=k), len(names))
    for name, one in zip(names, wanted, strict=True):
        own = specs.get(name)
        if own is None or one is None:
            return False
        other = LayerSpec(one.router, own.k if one.k is None else one.k, one.options)
        if (own.router, own.k, dict(own.options)) != (other.router, other.k, dict(other.options)):
            return False
    return True


def _require_no_contradiction(sparse: SparsePart, model: Any, checkpoint: str | None) -> None:
    """Raise ValueError if the section `sparse` describes other experts than the model has."""
    found, specs = moe_layers(model), specs_of(model)
    own: dict[str, set[Any]] = {
        "experts": {info.experts for info in layer_infos(found)},
        "hidden": {layer.experts.down_proj.shape[-1] for layer in found if hasattr(layer.experts, "down_proj")},
        "shared": {spec.shared for spec in specs.values()},
    }
    for name, values in own.items():
        given = getattr(sparse, name)
        if given is not None and values != {given}:
            has = " and ".join(sorted(map(str, values))) or "its own"
            raise ValueError(f"sparse.{name} is {given}, and {checkpoint} has {has} already; {_leave_out(name)}.")
    if sparse.init is not None:
        raise ValueError(f"sparse.init is for dense models, and {checkpoint} has experts; {_leave_out('init')}.")
    if sparse.layers != "all" and _chosen(sparse, model) != [layer.name for layer in found]:
        raise ValueError(
            f"sparse.layers is {sparse.layers}, and {checkpoint} has experts in other layers; {_leave_out('layers', 'all')}."
        )


def _leave_out(name: str, value: str = "null") -> str:
    return f"leave it out (--set sparse.{name}={value})"


def _chosen(sparse: SparsePart, model: Any) -> list[str]:
    """Return the names of the layers that `sparse.layers` chooses among all transformer layers of the model."""
    names: dict[str, None] = {}  # an ordered set: rows of one family may share a place
    if model.config.model_type in DENSE_FAMILIES:
        for name, module in model.named_modules():
            for row in dense_family(model).rows:
                if all(find_submodule(module, path) is not None for path in (row.attention, row.projection, row.place)):
                    names[f"{name}.{row.place}"] = None
    else:
        family = moe_family(model)
        for name, module in model.named_modules():
            if mixer_of(family, module) is not None and find_submodule(module, family.block) is not None:
                names[f"{name}.{family.block}"] = None
    return [list(names)[index] for index in choose_layers(sparse.layers, len(names))]
