"""Router names with layers: `ac@1,3,5`, `similarity@even|attention@odd`, `xmoe+symphony@last:2|smoe`.

    router@layers   the router is only for these MoE layers: indices, counted from 0 (`1,3,5`), `even` (0, 2, ...),
                    `odd` (1, 3, ...), `first:n`, `last:n` or `all`. @ follows the whole router, with its options
    one|another     routers for different layers. One of them may have no @: it is for the layers that no other names

The layers that @ chooses from are the MoE layers of a model, or those of them that an argument `layers` has chosen. What a
layer gets that no router is for depends on the function: `sparsify` gives it `smoe`, `reroute` does not change it.

`k` is an option of every router: `smoe[k=3]`. An argument `k` beside it is an error, unless the name has layers: there it is
for the layers whose router gives no k of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import unknown_name
from holdfast.routing.grammar import NAMES_LAYERS, split_options, written_value
from holdfast.routing.presets import REGISTRY

NATIVE = "native"  # in a model that has routers: the family's own rule
_BAR = re.compile(r"\|(?![^\[]*\])")  # outside brackets
_AT = re.compile(r"@(?![^\[]*\])")
_INDICES = re.compile(r"\d+(\s*,\s*\d+)*")


@dataclass(frozen=True)
class LayerRouter:
    """One router of a name, and the layers it is for."""

    router: str  # without brackets and layers
    options: dict[str, Any] = field(default_factory=dict)
    k: int | None = None
    layers: str | None = None  # as written; None: the layers that no other router of the name is for


def has_layers(written: str) -> bool:
    """Return whether a router name contains @ or |."""
    return NAMES_LAYERS.search(written) is not None


def resolve_layers(
    written: str, options: Mapping[str, Any] | None = None, *, k: int | None = None, native: bool = False
) -> list[LayerRouter]:
    """Return the routers of a name with their options; raise ValueError if a name, an option or a choice of layers is wrong.

    options   those that are not in brackets; in a name with layers, each goes to the routers that have it
    k         experts per token; in a name with layers, of the routers that give no k of their own
    native    whether `native`, the rule of the model's family, may be one of the routers
    """
    given = dict(options or {})
    if native and written == NATIVE:
        return [LayerRouter(NATIVE, given, k)]
    if not isinstance(written, str) or not has_layers(written):
        name, given = REGISTRY.resolve(written, given if k is None else {**given, "k": k})
        return [LayerRouter(name, given, given.pop("k", None))]
    pairs = [_split_layers(part, written) for part in _BAR.split(written)]
    if sum(layers is None for _, layers in pairs) > 1:
        raise ValueError(f"{written!r} has two routers without @; only one can be for the remaining layers.")
    known = {router: {*REGISTRY.options(router), "k"} for router, _ in pairs if not (native and router == NATIVE)}
    for option in given:
        if not any(option in options for options in known.values()):
            raise ValueError(f"{unknown_name('option', option, set().union(*known.values()))[:-1]} for router {written!r}.")
    found = []
    for router, layers in pairs:
        name, own = router, dict[str, Any]()
        if router in known:
            name, own = REGISTRY.resolve(router, {key: value for key, value in given.items() if key in known[router]})
        own_k = own.pop("k", None)
        found.append(LayerRouter(name, own, k if own_k is None and name != NATIVE else own_k, layers))
    return found


def _split_layers(part: str, written: str) -> tuple[str, str | None]:
    """Return the router of one part of a name, and its layers as `1,3,5`, `even`, `first:2` and the like."""
    router, *rest = _AT.split(part)
    if not rest:
        return router.strip(), None
    layers = "@".join(rest).strip()
    kind, sign, number = layers.partition(":")
    if _INDICES.fullmatch(layers):
        return router.strip(), ",".join(sorted((index.strip() for index in layers.split(",")), key=int))
    if (sign and kind in ("first", "last") and number.isdecimal()) or (not sign and kind in ("all", "even", "odd")):
        return router.strip(), layers
    raise ValueError(
        f"@{layers} in {written!r} is no choice of layers: write indices such as @1,3,5, or @even, @odd, @first:2, @last:2 "
        "or @all, after the whole router and its options."
    )


def routers_by_layer(routers: list[LayerRouter], count: int) -> list[LayerRouter | None]:
    """Return the router for each of `count` layers, None for a layer that none is for.

    Raise ValueError if two routers are for one layer, or if a layer does not exist.
    """
    found: list[LayerRouter | None] = [None] * count
    for router in routers:
        for index in [] if router.layers is None else _indices(router, count):
            other = found[index]
            if other is not None:
                raise ValueError(
                    f"layer {index} is named twice, by {_layers_of(other)} and by {_layers_of(router)}; name it once "
                    f"(layers are counted from 0 to {count - 1})."
                )
            found[index] = router
    rest = next((router for router in routers if router.layers is None), None)
    return [rest if router is None else router for router in found]


def _indices(router: LayerRouter, count: int) -> list[int]:
    layers = str(router.layers)
    kind, sign, number = layers.partition(":")
    if sign:
        if not 1 <= int(number) <= count:
            raise ValueError(f"{_layers_of(router)} needs {number} layers; there are {count}, so 1 to {count} can be named.")
        return list(range(int(number))) if kind == "first" else list(range(count - int(number), count))
    if kind in ("all", "even", "odd"):
        chosen = list(range(int(kind == "odd"), count, 1 if kind == "all" else 2))
        if not chosen:
            raise ValueError(f"{_layers_of(router)} names no layer: there is only layer 0.")
        return chosen
    indices = [int(index) for index in layers.split(",")]
    for index in indices:
        if index >= count:
            raise ValueError(f"{_layers_of(router)}: there is no layer {index}; layers are counted from 0 to {count - 1}.")
    return indices


def _layers_of(router: LayerRouter) -> str:
    return f"'{router.router}@{router.layers}'"


def written_name(routers: list[LayerRouter]) -> str:
    """Return the name that `resolve_layers` reads as these routers: equal routers have equal names, however spelt."""
    return "|".join(map(_written, routers))


def _written(router: LayerRouter) -> str:
    options = {**({} if router.k is None else {"k": router.k}), **dict(sorted(router.options.items()))}
    brackets = ",".join(f"{name}={written_value(value)}" for name, value in options.items())
    layers = "" if router.layers is None else f"@{router.layers}"
    return f"{router.router}{f'[{brackets}]' if brackets else ''}{layers}"


def preset_names(written: str) -> list[str]:
    """Return all names that `+` and `|` join, without `native`."""
    if not has_layers(written):
        return split_options(written)[0]
    routers = (_split_layers(part, written)[0] for part in _BAR.split(written))
    return [name for router in routers for name in split_options(router)[0] if name != NATIVE]
