"""A changed model's connections: each MoE layer's surroundings, the ledger of losses, the specs, the class that saves itself."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.hub.backends import EXPERTS, point, unpoint
from holdfast.hub.changed import saves_itself, saves_plainly
from holdfast.hub.sites import Site
from holdfast.hub.specs import NATIVE, LayerSpec, describe
from holdfast.hub.surroundings import Surroundings
from holdfast.hub.training import Ledger
from holdfast.moe import name_layers
from holdfast.routing import AttentionPosterior, Router
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Host


class Wiring:
    """What holds the changes of a model together; one a model, replaced as a whole by the next change."""

    def __init__(self, model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
        self.specs, self.ledger = dict(specs), Ledger(model)
        self.surroundings: list[Surroundings] = []
        before: Surroundings | None = None
        for site in found:
            if site.name not in specs:
                before = None
                continue
            around = Surroundings(site.router, site.neighbours, self.ledger, before)
            self.surroundings.append(around)
            holder = site.block if site.family is None else site.gate
            holder.surroundings = around
            before = around

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


def wire(model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Connect the layers that `specs` names, and nothing else; the model's config then says what they are."""
    current = wiring(model)
    if current is not None:
        current.remove()
    config: Any = model.config
    for site in found:
        if site.family is not None and hasattr(site.experts, "config"):
            ragged = site.router is not None and site.router.select.ragged
            point(site.experts, EXPERTS) if ragged else unpoint(site.experts)
    if not specs:
        model.__dict__.pop("_holdfast", None)
        saves_plainly(model)
        return
    model.__dict__["_holdfast"] = Wiring(model, found, specs)
    saves_itself(model, describe(config.model_type, specs))
    name_layers(model)


def build_router(site: Site, spec: LayerSpec, host: Host, depth: int, before: Site | None) -> Router | None:
    """The router that a spec describes, for one layer of a model; None for the family's own rule."""
    if spec.router == NATIVE:
        if spec.options:
            raise ValueError(f"the native router takes no options (given: {', '.join(spec.options)}).")
        return None
    dim, experts = site.size
    brought: dict[str, Any] = {"depth": depth, "clusters": None if before is None else before.size[1]}
    if site.heads is not None:
        brought["heads"] = site.heads
    host = Host(spec.pretrained, host.score, host.rule, host.scale, {**host.options, **brought})
    router = REGISTRY.build(
        spec.router, dim=dim, experts=experts, k=spec.k, losses=spec.loss_terms(), layer=site.name, host=host, **spec.options
    )
    if site.neighbours.windowed and any(isinstance(part, AttentionPosterior) for part in router.parts):
        raise ValueError(
            f"{site.name}: this model attends within windows, so the attention router has no sequence to read; "
            "use 'similarity'."
        )
    if "previous" in router.reads and before is not None and before.size[0] != dim:
        raise ValueError(
            f"{site.name}: the previous MoE layer has width {before.size[0]}, this one {dim}; a router that clusters by the "
            "previous layer ('ac') needs equal widths: choose layers of one width."
        )
    return router
