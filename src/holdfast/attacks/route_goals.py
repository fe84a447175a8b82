"""What the search for routes wants of a token: to lose its selected set, or to get certain experts.

A goal says which tokens have reached it, and gives each token a margin that is below 0 until then and that gradient steps
raise. With S the set of the clean token, S' that of the perturbed one x', and key_e what expert e is ranked by:

    LeaveSet         max_{j not in S} key_j(x') - min_{i in S} key_i(x')
    JoinExperts(W)   min_{w in W - S'} key_w(x') - min_{i in S' - W} key_i(x')    while W is not in S'
                     min_{w in W} key_w(x') - max_{j not in S'} key_j(x')         then

T tokens, E experts
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.routing import Routing


class Layer(NamedTuple):
    keys: Tensor  # (T,E), differentiable: an expert with a higher key is more likely to be selected
    chosen: Tensor  # (T,E) bool


class Goal(ABC):
    """What the search wants of each token in a layer (abstract)."""

    @abstractmethod
    def sets(self, routing: Routing, k: int | None) -> Tensor:
        """Return (T,E) bool: the sets that the goal reads; with `k`, those of the first k slots."""

    @abstractmethod
    def reached(self, now: Layer, clean: Layer) -> Tensor:
        """Return (T,) bool: which tokens have reached the goal."""

    @abstractmethod
    def margin(self, now: Layer, clean: Layer) -> Tensor:
        """Return (T,): what to raise; negative until the goal is reached. An empty side counts as a key of 0."""

    @abstractmethod
    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        """Return (T,E) bool twice: the experts that may leave, and those that may come in, on the way to the goal."""

    @abstractmethod
    def pace(self, number: int) -> float:
        """Return the length of a gradient step, as a share of the radius; the first step has number 0."""


@final
class LeaveSet(Goal):
    """The selected set changes."""

    def sets(self, routing: Routing, k: int | None) -> Tensor:
        return routing.sets_of_slots(k)

    def reached(self, now: Layer, clean: Layer) -> Tensor:
        return (now.chosen != clean.chosen).any(-1)

    def margin(self, now: Layer, clean: Layer) -> Tensor:
        return _highest(now.keys, ~clean.chosen) - _lowest(now.keys, clean.chosen)

    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        return clean.chosen, ~clean.chosen

    def pace(self, number: int) -> float:
        return 1.0  # the first step is exact for linear keys, and shorter steps found fewer flips for others


@final
class JoinExperts(Goal):
    """The token asks for all of these experts. A limit of capacity may then drop it, which does not count here."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.experts = list(experts)

    def sets(self, routing: Routing, k: int | None) -> Tensor:
        return routing.requested_sets if k is None else routing.sets_of_slots(k)

    def reached(self, now: Layer, clean: Layer) -> Tensor:
        return now.chosen[:, self.experts].all(-1)

    def margin(self, now: Layer, clean: Layer) -> Tensor:
        wanted = self._wanted(now)
        far = _lowest(now.keys, wanted & ~now.chosen) - _lowest(now.keys, now.chosen & ~wanted)
        return torch.where(self.reached(now, clean), _lowest(now.keys, wanted) - _highest(now.keys, ~now.chosen), far)

    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        wanted = self._wanted(clean)
        return clean.chosen & ~wanted, wanted & ~clean.chosen

    def pace(self, number: int) -> float:
        # An expert comes in if it beats the weakest of the set, whichever that is: with equal steps, two experts that take
        # turns as the weakest are each beaten at the cost of the other.
        return float((1 + number) ** -0.5)

    def _wanted(self, layer: Layer) -> Tensor:
        wanted = torch.zeros_like(layer.chosen)
        wanted[:, self.experts] = True
        return wanted


def _highest(keys: Tensor, member: Tensor) -> Tensor:
    """Return (T,): the highest key of the members; 0 if there are none."""
    return keys.masked_fill(~member, -torch.inf).amax(-1).where(member.any(-1), 0.0)


def _lowest(keys: Tensor, member: Tensor) -> Tensor:
    """Return (T,): the lowest key of the members; 0 if there are none."""
    return keys.masked_fill(~member, torch.inf).amin(-1).where(member.any(-1), 0.0)
