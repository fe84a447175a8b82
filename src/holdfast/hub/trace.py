"""Record what every router of a model does, without changing the model.

Hooks of our own, because many families record no router logits at all, and the others only the logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from holdfast.hub.families import detached, record
from holdfast.hub.padding import padding_of
from holdfast.hub.sites import is_moe, sites
from holdfast.routing import Router, Routing
from holdfast.routing.rules import Rule

Each = Callable[[int, Routing, Tensor | None], None]  # (layer, routing, padding)


class Routes:
    """The `Routing` of each MoE layer in the last forward: `routes[i]`, of the layer `routes.names[i]`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.padding: Tensor | None = None  # (B,N) bool, True where the token is real; None if all are
        self._last: dict[int, Routing] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, layer: int) -> Routing:
        place = range(len(self))[layer]
        if place not in self._last:
            raise ValueError(f"layer {layer} has recorded nothing: run the model inside the trace, without `each`.")
        return self._last[place]

    def __iter__(self) -> Iterator[Routing]:
        return (self[layer] for layer in range(len(self)))


@contextmanager
def trace(model: nn.Module, *, each: Each | None = None) -> Iterator[Routes]:
    """Inside the `with`, every forward of `model` records each MoE layer's `Routing`, detached, padding known.

    Works for every family of `holdfast.hub.families`, for models with Holdfast routers, and under `generate()`, where each
    step is a forward. Only the last forward is kept. `each(layer, routing, padding)` is called instead of keeping anything:
    memory is then bounded by one layer.
    """
    routers = watched(model)
    routes = Routes([name for name, _, _ in routers])
    handles = [model.register_forward_pre_hook(partial(_note_padding, routes), with_kwargs=True)]
    for layer, (_, module, rule) in enumerate(routers):
        handles.append(module.register_forward_hook(partial(_record, routes, rule, each, layer)))
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


def has_routers(model: nn.Module) -> bool:
    """Is there anything to trace?"""
    return is_moe(model) or any(isinstance(module, Router) for module in model.modules())


def watched(model: nn.Module) -> list[tuple[str, nn.Module, Rule | None]]:
    """Name, module and rule of what routes in each MoE layer: a Router of ours, or a family's gate with its rule."""
    found: list[tuple[str, nn.Module, Rule | None]] = []
    if not is_moe(model):
        found.extend((name, module, None) for name, module in model.named_modules() if isinstance(module, Router))
    for site in [] if found else sites(model):
        if site.family is None:
            found.append((f"{site.name}.router", site.block.get_submodule("router"), None))
        elif site.router is not None:
            found.append((f"{site.name}.{site.family.gate}", site.router, None))
        else:
            found.append((f"{site.name}.{site.family.gate}", site.gate, site.family.rule(site.gate)))
    return found


def _note_padding(routes: Routes, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    tokens = options.get("input_ids")
    tokens = options.get("inputs_embeds") if tokens is None else tokens
    tokens = arguments[0] if tokens is None and arguments else tokens
    mask = options.get("attention_mask")
    mask = arguments[1] if mask is None and len(arguments) > 1 else mask
    positions = options.get("cache_position")
    start = None if positions is None else int(positions[0])
    routes.padding = None
    if isinstance(tokens, Tensor) and tokens.dim() >= 2:
        routes.padding = padding_of(mask, tokens.shape[0], tokens.shape[1], start)


def _record(
    routes: Routes,
    rule: Rule | None,
    each: Each | None,
    layer: int,
    gate: nn.Module,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    routing = output if rule is None else record(output, rule)
    routing = detached(routing)
    if each is None:
        routes._last[layer] = routing
    else:
        each(layer, routing, routes.padding)
