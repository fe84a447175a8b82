"""How many experts a token uses, and what their weights sum to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import only_real
from holdfast.routing import Routing


@dataclass(frozen=True)
class ExpertCount:
    mean: float
    histogram: list[int]  # how many tokens used 0, 1, ..., E experts


class ExpertsPerToken(Accumulator[ExpertCount]):
    """mean_t |S_t|: what a token costs. k for top-k, more for smooth top-k, anything for top-p and ReLU."""

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen
        used = chosen.sum(1)
        self._add(tokens=chosen.shape[0], used=used.sum(), histogram=torch.bincount(used, minlength=chosen.shape[1] + 1))

    def result(self) -> ExpertCount:
        return ExpertCount(self._mean("used"), [int(count) for count in self._sums["histogram"].tolist()])


@dataclass(frozen=True)
class WeightSum:
    mean: float
    std: float


class WeightSums(Accumulator[WeightSum]):
    """Mean and standard deviation over tokens of sum_e w_te: 1 and 0 where weights are renormalised.

    A mean that drifts tells that a router scales its layer's output up or down.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        sums = only_real(routing, token_mask).weights.double().sum(-1)
        # Centred at 1, where sums usually are: squares of the distance lose no digits to a difference of large numbers.
        self._add(tokens=sums.shape[0], excess=(sums - 1).sum(), squares=(sums - 1).square().sum())

    def result(self) -> WeightSum:
        excess = self._mean("excess")
        return WeightSum(1 + excess, max(0.0, self._mean("squares") - excess**2) ** 0.5)
