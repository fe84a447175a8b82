"""What changes between two runs over the same tokens: two checkpoints, or clean and perturbed inputs.

What changes between two runs, layer by layer, as plain data that JSON can hold.

```python
report = ChangeReport()
for batch, perturbed in batches:
    with holdfast.trace(model, each=report.before):
        model(**batch)
    with holdfast.trace(model, each=report.after):
        model(**perturbed)
report.result()
```
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor

from holdfast.metrics.accumulator import Accumulator, kept, only_real, same_padding, selection_only
from holdfast.metrics.report import layer_name, plain
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


class ChangeReport:
    """Pairs the routings of two runs over the same tokens: two checkpoints, or clean and perturbed inputs.

    The two runs may take turns batch by batch, or one forward after another as long as the order is the same; experts and
    weights of the first are kept until the second has come. `names` of the layers are for the result, `k` is that of
    `RoutingChanges`.
    """

    def __init__(self, names: Sequence[str] = (), *, k: int | None = None) -> None:
        self.names, self.k = list(names), k
        self._layers: dict[int, RoutingChanges] = {}
        self._waiting: dict[int, deque[tuple[Routing, Tensor | None]]] = {}

    def before(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """One layer's routing in the first run."""
        self._waiting.setdefault(layer, deque()).append((selection_only(routing), token_mask))

    def after(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """The same layer's routing of the same tokens in the second run."""
        if not self._waiting.get(layer):
            raise ValueError(f"layer {layer} has no routing of the first run to compare with: call `before` first.")
        before, real = self._waiting[layer].popleft()
        if not same_padding(real, token_mask):
            raise ValueError(f"layer {layer}: the two runs have different padding; they must be over the same tokens.")
        self.update(layer, before, routing, token_mask)

    def update(self, layer: int, before: Routing, after: Routing, token_mask: Tensor | None = None) -> None:
        """Both routings at once."""
        self._layers.setdefault(layer, RoutingChanges(self.k)).update(before, after, token_mask)

    def merge(self, other: Self) -> Self:
        """Add what `other` has seen. Changes and returns this report."""
        for layer, changes in other._layers.items():
            self._layers.setdefault(layer, RoutingChanges(self.k)).merge(changes)
        return self

    def result(self) -> dict[str, Any]:
        """{"layers": [...], "overall": {...}}: fluctuation, consistency, first_flips, weight_change; overall their means."""
        unmatched = [layer for layer, waiting in sorted(self._waiting.items()) if waiting]
        if unmatched:
            raise ValueError(f"layer {unmatched[0]} has routings of the first run only; the second must see them too.")
        if not self._layers:
            raise ValueError("the report has seen no pair of routings: pass `before` and `after` to holdfast.trace in turn.")
        layers = [
            {"layer": layer, **layer_name(self.names, layer), "tokens": changes.tokens, **asdict(changes.result())}
            for layer, changes in sorted(self._layers.items())
        ]
        names = ("fluctuation", "consistency", "first_flips", "weight_change")
        overall = {name: statistics.fmean(layer[name] for layer in layers) for name in names}
        return plain({"layers": layers, "overall": {"layers": len(layers), **overall}})
