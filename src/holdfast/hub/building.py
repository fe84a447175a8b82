"""Routers for the layers of a model, from specs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.hub.specs import NATIVE, LayerSpec
from holdfast.routing import Router
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Host


@dataclass(frozen=True)
class Place:
    """What a router must know about the layer it is for."""

    name: str
    dim: int
    experts: int
    heads: int | None  # None: attention within windows, or no attention
    depth: int = 0  # which MoE layer of its stack it is
    before: "Place | None" = None  # the MoE layer before it
    recurrent: bool = False  # a hybrid model's layer without attention


def in_order(places: Sequence[Place]) -> list[Place]:
    """The places of a model, each knowing the one before it. A model may have several stacks of layers (two towers)."""
    linked: list[Place] = []
    for place in places:
        last = linked[-1] if linked and _stack(linked[-1].name) == _stack(place.name) else None
        linked.append(place if last is None else replace(place, depth=last.depth + 1, before=last))
    return linked


def _stack(name: str) -> str:
    """The part of a layer's name before its number."""
    steps = name.split(".")
    number = next((index for index, step in enumerate(steps) if step.isdigit()), len(steps))
    return ".".join(steps[:number])


def build_routers(
    places: Sequence[Place], specs: Mapping[str, LayerSpec], hosts: Mapping[str, Host]
) -> dict[str, Router | None]:
    """A router for each layer that `specs` names; None is the family's own rule. All or none: nothing is changed here."""
    built = {place.name: _build(place, specs[place.name], hosts[place.name]) for place in places if place.name in specs}
    for place in places:
        router = built.get(place.name)
        if place.recurrent and router is not None and router.traits.sequence_aware:
            attending = [index for index, other in enumerate(places) if not other.recurrent]
            raise ValueError(
                f"{place.name}: router {specs[place.name].router!r} looks at other tokens, and this layer has no attention "
                f"and no KV cache to take them from; use it only in layers that have (layers={attending})."
            )
    return built


def _build(place: Place, spec: LayerSpec, host: Host) -> Router | None:
    if spec.router == NATIVE:
        if spec.options:
            raise ValueError(f"the native router takes no options (given: {', '.join(spec.options)}).")
        return None
    brought: dict[str, Any] = {"depth": place.depth, "clusters": place.before.experts if place.before else None}
    brought["heads"] = place.heads or 1
    try:
        with _float32():
            router = REGISTRY.build(
                spec.router,
                dim=place.dim,
                experts=place.experts,
                k=spec.k,
                losses=spec.loss_terms(),
                layer=place.name,
                host=replace(host, pretrained=spec.pretrained, options=brought),
                **spec.options,
            )
    except (TypeError, OverflowError) as problem:  # options of a folder may be of any type and size
        given = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
        raise ValueError(f"{place.name}: router {spec.router!r} does not take these options ({given}): {problem}.") from None
    if place.heads is None and not place.recurrent and "attention.projection" in router.reads:
        raise ValueError(
            f"{place.name}: this model attends within windows, so router {spec.router!r} has no attention over the whole "
            "sequence to read; use 'similarity'."
        )
    if "previous" in router.reads and place.before is not None and place.before.dim != place.dim:
        raise ValueError(
            f"{place.name}: the previous MoE layer has width {place.before.dim}, this one {place.dim}; a router that "
            "clusters by the previous layer ('ac') needs equal widths: choose layers of one width."
        )
    return router


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """State is float32 even while a model is being built in another dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
