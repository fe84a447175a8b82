"""Routers as they enter a comparison, and how they are written: `smoe,similarity[causal=false,tau=2],symphony+smooth`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from holdfast.routing.presets import REGISTRY
from holdfast.suggest import unknown
from holdfast.train.typed import fitting

_WRITTEN = re.compile(r"(?P<router>[^\[\]]+)(\[(?P<options>[^\[\]]*)\])?")
_OUTSIDE = re.compile(r",(?![^\[]*\])")  # a comma that is not within brackets


@dataclass(frozen=True)
class Contender:
    """A router as it enters a comparison."""

    name: str  # for people
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # another number of experts than the recipe's


def contenders(written: str) -> list[Contender]:
    """Names joined by commas, each with its options in brackets where it has any; they are checked here."""
    return [contender(part.strip()) for part in _OUTSIDE.split(written) if part.strip()]


def contender(written: str) -> Contender:
    """One router, by the name it is written as."""
    found = _WRITTEN.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r} is no router; write a name, or a name and its options as similarity[causal=false].")
    router, options = found["router"].strip(), _options(found["options"] or "", written)
    known = REGISTRY.options(router)
    for option in options:
        if option not in known:
            raise ValueError(f"{unknown('option', option, known)[:-1]} for router {router!r}.")
    kinds = {name: kind for part in REGISTRY.parts(router) for name, kind in get_type_hints(part.__init__).items()}
    typed = {name: fitting(kinds.get(name, Any), value, f"the option {name}") for name, value in options.items()}
    return Contender(written, router, typed)


def _options(text: str, written: str) -> dict[str, Any]:
    import yaml

    options = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"{pair!r} in {written!r} is no option; write option=value.")
        if key.strip() in options:
            raise ValueError(f"{written!r} gives the option {key.strip()} twice.")
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{pair!r} in {written!r} has no value that can be read.") from None
    return options
