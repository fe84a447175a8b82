"""What changes between two runs over the same tokens: two checkpoints, or clean and perturbed inputs."""

from dataclasses import dataclass

from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import kept, only_real
from holdfast.routing import Routing


@dataclass(frozen=True)
class Changes:
    fluctuation: float  # share of tokens whose set changes (Mutual-Inform, Figure 2: between checkpoints)
    consistency: float  # share of tokens whose set survives (survey 5.2: a perturbation)
    first_flips: float  # share of tokens whose expert with the largest weight changes
    weight_change: float  # mean over tokens of sum_e |w_te - w'_te|, w = 0 where an expert was not chosen


class RoutingChanges(Accumulator[Changes]):
    """Shares of tokens whose set, or first expert, differs between two routings, and the L1 distance of their weights.

    The two may have different numbers of slots. `k` compares the sets of the k experts with the largest weights only: smooth
    top-k lets experts in and out at weight 0, which is no switch, so there it is its k that is comparable to top-k's.
    """

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        if k is not None and k < 1:
            raise ValueError(f"k is {k}; it must be at least 1, or None for whole sets.")
        self.k = k

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.k,)

    def update(self, before: Routing, after: Routing, token_mask: Tensor | None = None) -> None:
        if before.gates.shape != after.gates.shape:
            raise ValueError(
                f"the two routings have {_size(before)} and {_size(after)}; changes are between runs over the same tokens, "
                "of layers with equally many experts."
            )
        before, after = only_real(before, token_mask), only_real(after, token_mask, before.experts.device)
        changed = set_changes(before, after, self.k)
        weights = (before.dense_weights.double() - after.dense_weights.double()).abs()
        self._add(
            tokens=changed.shape[0],
            changed=changed.sum(),
            flipped=(before.experts[:, 0] != after.experts[:, 0]).sum(),
            weights=weights.sum(),
        )

    def result(self) -> Changes:
        changed = self._mean("changed")
        return Changes(changed, 1 - changed, self._mean("flipped"), self._mean("weights"))


def set_changes(before: Routing, after: Routing, k: int | None = None) -> Tensor:
    """(T,) bool: which tokens' sets differ; with `k`, the sets of the k experts with the largest weights."""
    return (_sets(before, k) != _sets(after, k)).any(-1)


class PredictionStability(Accumulator[float]):
    """The share of predictions that survive a perturbation, 1 - mean [y(x) != y(x + delta)] (survey 5.2)."""

    def update(self, before: Tensor, after: Tensor, token_mask: Tensor | None = None) -> None:
        """Predicted classes or tokens of the same shape (...), for example `logits.argmax(-1)`."""
        if before.shape != after.shape:
            raise ValueError(f"predictions have shapes {tuple(before.shape)} and {tuple(after.shape)}; they must be equal.")
        same = kept((before == after.to(before.device)).reshape(-1), token_mask)
        self._add(same=same.sum(), predictions=same.numel())

    def result(self) -> float:
        return self._mean("same", "predictions")


def _sets(routing: Routing, k: int | None) -> Tensor:
    if k is None:
        return routing.chosen
    return Routing(routing.logits, routing.gates, routing.experts[:, :k], routing.weights[:, :k]).chosen


def _size(routing: Routing) -> str:
    return "{} tokens x {} experts".format(*routing.gates.shape)
