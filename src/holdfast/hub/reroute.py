"""Change the routers of a model that has experts, and change them back."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.hub.adapters import running
from holdfast.hub.changed import wire
from holdfast.hub.families import find
from holdfast.hub.gates import uninstall
from holdfast.hub.layers import Layers, choose, require_unwrapped
from holdfast.hub.quantisers import unmark_dequantised
from holdfast.hub.scores import UNREADABLE_GATE
from holdfast.hub.sites import Site, sites
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.specs import NATIVE, LayerSpec, coefficients
from holdfast.hub.surgery import reroute_sites, set_trained
from holdfast.hub.wiring import mark_changed, own_balance, specs_of, wiring
from holdfast.kernels.quantised import as_float
from holdfast.losses import Losses
from holdfast.routing import Router
from holdfast.routing.presets import REGISTRY

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
