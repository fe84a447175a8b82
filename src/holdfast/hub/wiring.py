"""A changed model's connections: each MoE layer's surroundings, the ledger of losses, the specs."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.hub.backends import runs_ours
from holdfast.hub.families import record
from holdfast.hub.sites import Site, places
from holdfast.hub.specs import NATIVE, LayerSpec
from holdfast.hub.surroundings import LOOKS_AHEAD, Surroundings
from holdfast.hub.training import Ledger, text_config

CHANGED_IN_MEMORY = " (changed in memory by Holdfast: save the model and load that folder, or pass the model itself)"
ENTRIES = ("output_router_logits", "router_aux_loss_coef", "num_experts", "num_experts_per_tok")  # of a config


class CountedGate:
    """Count a layer that keeps the family's router, unchanged, in the balance loss that a trainer asks for.

    The family's own loss is over all layers. Where routers of ours replace some, ours is over all of them too.
    """

    def __init__(self, site: Site, ledger: Ledger) -> None:
        assert site.family is not None
        self.rule, self.k = site.family.rule(site.gate), int(site.gate.top_k)
        self.ledger, self.around = ledger, Surroundings(None, site.neighbours, ledger, None, self.k)
        self.handle = site.gate.register_forward_hook(self)

    def __call__(self, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        context = self.around.context(self.around.tokens(inputs[0]))
        if self.ledger.asked:
            self.ledger.collect(record(output, self.rule), output[1], None, context.token_mask, self.k)

    def remove(self) -> None:
        self.handle.remove()
        self.around.remove()


class Wiring:
    """What holds the changes of a model together; one a model, replaced as a whole by the next change."""

    def __init__(self, model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
        routers = [site.router for site in found if site.name in specs and site.router is not None]
        has_losses = any(spec.losses for spec in specs.values())
        on_request = not has_losses and any(spec.router != NATIVE for spec in specs.values())
        self.specs = dict(specs)
        self.ledger = Ledger(
            model,
            routers,
            own_coefficient=float(model.__dict__.get("_own_balance", 0.0)),
            unit=float(getattr(text_config(model), "router_aux_loss_coef", 1.0)) or 1.0,
            on_request=on_request,
            lists_logits=found[0].family is None,
        )
        by_name: dict[str, Surroundings] = {}
        for site, place in zip(found, places(found), strict=True):
            if site.name in specs:
                before = by_name.get(place.before.name) if place.before else None
                around = by_name[site.name] = Surroundings(
                    site.router, site.neighbours, self.ledger, before, specs[site.name].k
                )
                holder = site.block if site.family is None else site.gate
                holder.surroundings = around
        self.surroundings = list(by_name.values())
        kept = [site for site in found if site.name not in specs] if on_request else []
        self.counted = [CountedGate(site, self.ledger) for site in kept if site.family is not None]

    @property
    def looks_ahead(self) -> bool:
        """Does a router in a causal model let a route depend on later tokens?"""
        return any(around.looks_ahead for around in self.surroundings)

    def remove(self) -> None:
        self.ledger.remove()
        for around in self.surroundings:
            around.remove()
        for gate in self.counted:
            gate.remove()


def wiring(model: nn.Module) -> Wiring | None:
    found = model.__dict__.get("_holdfast")
    return found if isinstance(found, Wiring) else None


def specs_of(model: nn.Module) -> dict[str, LayerSpec]:
    current = wiring(model)
    return {} if current is None else dict(current.specs)


def own_balance(model: Any) -> float:
    """Return the coefficient of the balance loss that the model itself adds in training, also while ours replaces it."""
    coefficient = model.__dict__.get("_own_balance", getattr(model, "router_aux_loss_coef", 0.0))
    return float(coefficient) if getattr(model.config, "output_router_logits", False) else 0.0


def _replace_own_balance(model: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Switch the family's balance loss off where a router of ours selects, or brings losses; else switch it on again.

    The family computes it from a top-k of the logits, whatever was selected.
    """
    if any(spec.losses or spec.router != NATIVE for spec in specs.values()):
        if hasattr(model, "router_aux_loss_coef"):  # added in any forward that is asked for router logits
            model.__dict__.setdefault("_own_balance", model.router_aux_loss_coef)
            model.router_aux_loss_coef = 0.0
    elif "_own_balance" in model.__dict__:
        model.router_aux_loss_coef = model.__dict__.pop("_own_balance")


def _describe_experts(config: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Give the config the entries by which trainers recognise an MoE and weight its `aux_loss`, where it lacks them."""
    before = config.__dict__.pop("_holdfast_entries", ())
    for name in ENTRIES:
        if isinstance(before, list | tuple) and name in before and hasattr(config, name):
            delattr(config, name)
    if not specs:
        return
    first = next(iter(specs.values()))
    entries: dict[str, Any] = {"output_router_logits": False, "num_experts_per_tok": first.k}
    if first.experts is not None:
        entries["num_experts"] = first.experts
    # 0 means that a trainer does not ask for the loss.
    entries["router_aux_loss_coef"] = 1.0 if any(spec.losses for spec in specs.values()) else 0.0
    added = [name for name in entries if not hasattr(config, name)]
    for name in added:
        setattr(config, name, entries[name])
    config.__dict__["_holdfast_entries"] = added


def original_name(name: str) -> str:
    """Return the folder or hub id that a model came from, as it was before the model was changed in memory."""
    return name.partition(CHANGED_IN_MEMORY)[0]


def mark_changed(model: Any, changed: bool = True) -> None:
    """Keep others from loading the model as it was before under the name that it came from.

    TRL makes DPO's reference model from `config._name_or_path`, and PEFT notes `name_or_path` as an adapter's base:
    both would silently be the model with its old routers.
    """
    changed = changed or "_opened_changed" in model.__dict__  # the folder holds other routers than the model's own
    for owner, name in ((model.config, "_name_or_path"), (model, "name_or_path")):
        given = getattr(owner, name, None)
        known = original_name(given) if isinstance(given, str) else ""
        if known:
            setattr(owner, name, known + CHANGED_IN_MEMORY if changed else known)


def connect(model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Connect the layers that `specs` names, and nothing else, in place of earlier connections."""
    current = wiring(model)
    if current is not None:
        current.remove()
    _replace_own_balance(model, specs)
    _describe_experts(text_config(model), specs)
    for site in found:
        if site.family is not None and hasattr(site.experts, "config"):
            runs_ours(site.experts, ragged=site.router is not None and site.router.select.ragged)
    if not specs:
        model.__dict__.pop("_holdfast", None)
        return
    wired = model.__dict__["_holdfast"] = Wiring(model, found, specs)
    if wired.looks_ahead:
        warnings.warn(
            f"{LOOKS_AHEAD}: its perplexity compares with no causal model's, and it cannot generate.", stacklevel=3
        )
