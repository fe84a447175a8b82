"""Routers as they enter a comparison, written as `smoe,similarity[causal=false,tau=2],symphony+smooth`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.routing.options import split_routers
from holdfast.routing.plugins import plugins_of
from holdfast.routing.presets import REGISTRY


@dataclass(frozen=True)
class Contender:
    """A router as it enters a comparison."""

    name: str  # for people
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # another number of experts than the recipe's

    def describe(self) -> dict[str, Any]:
        """Return what must agree for results to be of this router: the code of its plugins too, where it has any."""
        plugins = plugins_of(self.router)
        return {**asdict(self), **({"plugins": plugins} if plugins else {})}


def contenders(written: str) -> list[Contender]:
    """Return the routers that commas separate; names and options are checked here."""
    return [contender(part) for part in split_routers(written)]


def contender(written: str) -> Contender:
    """Return one router, under the name it is written as."""
    return Contender(written, *REGISTRY.resolve(written))
