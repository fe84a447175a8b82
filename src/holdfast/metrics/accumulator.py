"""What all streaming metrics share: named sums in float64 that grow batch by batch and can be merged.

Rows of records: those of real tokens, and what is kept of them for later.

padding (B,N) or (T,) bool, True where the token is real; None if all are
"""

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from holdfast.routing import Routing

Result = TypeVar("Result")


class Accumulator(ABC, Generic[Result]):
    """A metric as sums (abstract): `update(...)` adds a batch, `merge(other)` another part of the run, `result()` divides.

    The sums are float64 on the CPU, whatever the data's device, so that parts computed anywhere can be merged (and, over
    processes, pickled and gathered). Counts are exact up to 2^53.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @abstractmethod
    def result(self) -> Result:
        """The metric over everything added so far; a `ValueError` where that is nothing."""

    @property
    def settings(self) -> tuple[object, ...]:
        """What must be equal in two metrics that are merged."""
        return ()

    @property
    def tokens(self) -> int:
        """How many real tokens have been counted."""
        return int(self._sums["tokens"]) if "tokens" in self._sums else 0

    def merge(self, other: Self) -> Self:
        """Add what `other` has seen, another part of the same run. Changes and returns this metric."""
        if type(other) is not type(self):
            raise ValueError(f"a {type(self).__name__} cannot take in a {type(other).__name__}; merge metrics of one kind.")
        if other.settings != self.settings:
            raise ValueError(
                f"two {type(self).__name__}s with different settings cannot be merged: {self.settings} and {other.settings}."
            )
        self._add(**other._sums)
        return self

    def _add(self, **amounts: Tensor | float) -> None:
        """All of them or, where one does not fit, none."""
        added = {name: _float64(amount) for name, amount in amounts.items()}
        for name, amount in added.items():
            if name in self._sums and self._sums[name].shape != amount.shape:
                raise ValueError(
                    f"{type(self).__name__} has seen {name} of shape {tuple(self._sums[name].shape)}, now "
                    f"{tuple(amount.shape)}; layers with different numbers of experts need a metric each."
                )
        for name, amount in added.items():
            self._sums[name] = self._sums[name] + amount if name in self._sums else amount

    def _per(self, unit: str) -> float:
        """The total to divide by; a `ValueError` where it is 0."""
        total = float(self._sums[unit]) if unit in self._sums else 0.0
        if total == 0:
            raise ValueError(f"{type(self).__name__} has seen no {unit}: update it first, with some that are not padding.")
        return total

    def _mean(self, name: str, unit: str = "tokens") -> float:
        per = self._per(unit)
        return float(self._sums[name]) / per


def _float64(amount: Tensor | float) -> Tensor:
    return amount.detach().cpu().double() if isinstance(amount, Tensor) else torch.tensor(amount, dtype=torch.float64)


def kept(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """The rows of `values (T, ...)` that belong to real tokens."""
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
    """The rows of the real tokens, detached and without losses; on `device`, where another record is, if given."""
    fields = (routing.logits, routing.gates, routing.experts, routing.weights)
    logits, gates, experts, weights = (kept(field.detach(), token_mask).to(device or field.device) for field in fields)
    return Routing(logits, gates, experts, weights)


def selection_only(routing: Routing) -> Routing:
    """Experts and weights, to be kept for a while: of logits and gates only the shape is left, one zero expanded."""
    gates = routing.gates.new_zeros(()).expand(routing.gates.shape)
    return Routing(gates, gates, routing.experts.detach(), routing.weights.detach())


def same_padding(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other.to(one.device))
