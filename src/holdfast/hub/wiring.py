"""A changed model's connections: each MoE layer's surroundings, the ledger of losses, the specs."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.hub.backends import runs_ours
from holdfast.hub.changed import saves_itself, saves_plainly
from holdfast.hub.sites import Site, places
from holdfast.hub.specs import LayerSpec, describe
from holdfast.hub.surroundings import LOOKS_AHEAD, Surroundings
from holdfast.hub.training import Ledger
from holdfast.moe import name_layers


class Wiring:
    """What holds the changes of a model together; one a model, replaced as a whole by the next change."""

    def __init__(self, model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
        routers = [site.router for site in found if site.name in specs and site.router is not None]
        self.specs, self.ledger = dict(specs), Ledger(model, routers)
        by_name: dict[str, Surroundings] = {}
        for site, place in zip(found, places(found), strict=True):
            if site.name in specs:
                before = by_name.get(place.before.name) if place.before else None
                around = by_name[site.name] = Surroundings(site.router, site.neighbours, self.ledger, before)
                holder = site.block if site.family is None else site.gate
                holder.surroundings = around
        self.surroundings = list(by_name.values())

    @property
    def looks_ahead(self) -> bool:
        """Does a router in a causal model let a route depend on later tokens?"""
        return any(around.looks_ahead for around in self.surroundings)

    def remove(self) -> None:
        self.ledger.remove()
        for around in self.surroundings:
            around.remove()


def wiring(model: nn.Module) -> Wiring | None:
    found = model.__dict__.get("_holdfast")
    return found if isinstance(found, Wiring) else None


def specs_of(model: nn.Module) -> dict[str, LayerSpec]:
    current = wiring(model)
    return {} if current is None else dict(current.specs)


def own_balance(model: Any) -> float:
    """The coefficient of the balance loss that the model itself adds in training, also while ours has taken its place."""
    coefficient = model.__dict__.get("_own_balance", getattr(model, "router_aux_loss_coef", 0.0))
    return float(coefficient) if getattr(model.config, "output_router_logits", False) else 0.0


def _balance_once(model: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Where routers bring losses, the model's own balance loss makes way; without them it comes back."""
    if any(spec.losses for spec in specs.values()):
        if hasattr(model, "router_aux_loss_coef"):  # added in any forward that is asked for router logits
            model.__dict__.setdefault("_own_balance", model.router_aux_loss_coef)
            model.router_aux_loss_coef = 0.0
    elif "_own_balance" in model.__dict__:
        model.router_aux_loss_coef = model.__dict__.pop("_own_balance")


def wire(model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Connect the layers that `specs` names, and nothing else; the model's config then says what they are."""
    current = wiring(model)
    if current is not None:
        current.remove()
    _balance_once(model, specs)
    config: Any = model.config
    for site in found:
        if site.family is not None and hasattr(site.experts, "config"):
            runs_ours(site.experts, ragged=site.router is not None and site.router.select.ragged)
    if not specs:
        model.__dict__.pop("_holdfast", None)
        saves_plainly(model)
        return
    wired = model.__dict__["_holdfast"] = Wiring(model, found, specs)
    if wired.looks_ahead:
        warnings.warn(
            f"{LOOKS_AHEAD}: its perplexity compares with no causal model's, and it cannot generate.", stacklevel=2
        )
    saves_itself(model, describe(config.model_type, specs))
    name_layers(model)
