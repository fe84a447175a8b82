"""What all metrics share: named sums that grow batch by batch and can be merged, and the rows of real tokens.

token_mask (B,N) or (T,) bool, True where the token is real; None if all tokens are
"""

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from holdfast.routing import Routing

Result = TypeVar("Result")


class Accumulator(ABC, Generic[Result]):
    """A metric as sums (abstract): `update(...)` adds a batch, `merge(other)` another part of a run, `result()` divides.

    The sums are float64 on the CPU for data on any device, so that parts from several devices can be merged (and, over
    ranks, pickled and gathered). Counts are exact up to 2^53.

    settings    the options that must be equal in two metrics that are merged
    """

    def __init__(self, *settings: object) -> None:
        self.settings = settings
        self._sums: dict[str, Tensor] = {}

    @abstractmethod
    def result(self) -> Result:
        """Return the metric over all added data. Raise ValueError if there is none."""

    @property
    def tokens(self) -> int:
        """The number of real tokens added so far."""
        return int(self._sums.get("tokens", 0))

    def merge(self, other: Self) -> Self:
        """Add the data of `other`, another part of the same run; change and return this metric."""
        if type(other) is not type(self) or other.settings != self.settings:
            one, into = (f"{type(each).__name__} {each.settings}" for each in (other, self))
            raise ValueError(f"cannot merge a {one} into a {into}; merge metrics of one class with the same settings.")
        self._add(**other._sums)
        return self

    def _add(self, **amounts: Tensor | float) -> None:
        """Add all amounts; raise ValueError and add none if a shape does not fit."""
        sums = dict(self._sums)
        for name, amount in amounts.items():
            added = torch.as_tensor(amount, dtype=torch.float64, device="cpu").detach()
            if name in sums and sums[name].shape != added.shape:
                raise ValueError(
                    f"{type(self).__name__} has {name} of shape {tuple(sums[name].shape)} and cannot add shape "
                    f"{tuple(added.shape)}; use one metric for each layer with another number of experts."
                )
            sums[name] = sums[name] + added if name in sums else added
        self._sums = sums

    def _per(self, unit: str) -> float:
        """Return the total to divide by. Raise ValueError if it is 0."""
        total = float(self._sums.get(unit, 0))
        if total == 0:
            raise ValueError(f"{type(self).__name__} has no {unit}: call update with data that are not padding.")
        return total

    def _mean(self, name: str, unit: str = "tokens") -> float:
        per = self._per(unit)
        return float(self._sums[name]) / per


def real_rows(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the rows of `values (T, ...)` that belong to real tokens."""
    if token_mask is None:
        return values
    tokens = values.shape[0]
    if token_mask.dtype != torch.bool or token_mask.numel() != tokens:
        raise ValueError(
            f"token_mask is {token_mask.dtype} of shape {tuple(token_mask.shape)}; expected {tokens} bools, "
            "True where the token is real (for an attention mask of 0 and 1: mask.bool())."
        )
    return values[token_mask.reshape(-1).to(values.device)]


def only_real(routing: Routing, token_mask: Tensor | None, device: torch.device | None = None) -> Routing:
    """Return the rows of real tokens, detached and without losses; moved to `device` if given."""
    return routing.map_tokens(lambda rows: real_rows(rows.detach(), token_mask).to(device or rows.device))
