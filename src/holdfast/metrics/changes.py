"""What changes between two runs over the same tokens: two checkpoints, or clean and perturbed inputs.

`RoutingChanges` compares the routings of one layer, `PredictionStability` the predictions, and `ChangeReport` all layers:

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

from holdfast.metrics.accumulator import Accumulator, only_real, real_rows, same_padding, selection_only
from holdfast.metrics.report import layer_name
from holdfast.routing import Routing
from holdfast.stored import without_nan


@dataclass(frozen=True)
class Changes:
    fluctuation: float  # share of tokens that flip (Mutual-Inform, Figure 2: between checkpoints)
    consistency: float  # share of tokens that keep their selected set (survey 5.2: under a perturbation)
    first_flips: float  # share of tokens whose expert with the largest weight changes
    weight_change: float  # mean over tokens of sum_e |w_te - w'_te|, w = 0 for experts that are not selected


class RoutingChanges(Accumulator[Changes]):
    """Shares of tokens whose selected set or first expert differs between two routings, and the L1 distance of weights.

    The two may have different numbers of slots. With `k`, only the k experts with the largest weights are compared: smooth
    top-k adds and drops experts at weight 0, which is no flip, so its own k makes it comparable to top-k.
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
                f"the two routings have {_size(before)} and {_size(after)}; expected the same tokens, in layers with "
                "the same number of experts."
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
    """Return (T,) bool: which tokens flip; with `k`, compare the k experts with the largest weights."""
    return (_sets(before, k) != _sets(after, k)).any(-1)


class PredictionStability(Accumulator[float]):
    """The share of predictions that a perturbation does not change, 1 - mean [y(x) != y(x + delta)] (survey 5.2)."""

    def update(self, before: Tensor, after: Tensor, token_mask: Tensor | None = None) -> None:
        """Add predicted classes or tokens of the same shape (...), for example `logits.argmax(-1)`."""
        if before.shape != after.shape:
            raise ValueError(f"predictions have shapes {tuple(before.shape)} and {tuple(after.shape)}; they must be equal.")
        same = real_rows((before == after.to(before.device)).reshape(-1), token_mask)
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
    """Compare the routings of two runs over the same tokens, layer by layer.

    The two runs may alternate batch by batch, or follow each other, as long as their batches have the same order; experts
    and weights of the first run are stored until the second run has the same batch. `names` are the layers' names in the
    result, `k` is that of `RoutingChanges`.
    """

    def __init__(self, names: Sequence[str] = (), *, k: int | None = None) -> None:
        self.names, self.k = list(names), k
        self._layers: dict[int, RoutingChanges] = {}
        self._waiting: dict[int, deque[tuple[Routing, Tensor | None]]] = {}

    def before(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """Add one layer's routing in the first run."""
        self._waiting.setdefault(layer, deque()).append((selection_only(routing), token_mask))

    def after(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """Compare with the same layer's routing of the same tokens in the second run."""
        if not self._waiting.get(layer):
            raise ValueError(f"layer {layer} has no routing of the first run to compare with: call `before` first.")
        before, real = self._waiting[layer].popleft()
        if not same_padding(real, token_mask):
            raise ValueError(f"layer {layer}: the two runs have different padding; they must be over the same tokens.")
        self.update(layer, before, routing, token_mask)

    def update(self, layer: int, before: Routing, after: Routing, token_mask: Tensor | None = None) -> None:
        """Add both routings of a layer at once."""
        self._layers.setdefault(layer, RoutingChanges(self.k)).update(before, after, token_mask)

    def merge(self, other: Self) -> Self:
        """Add the data of `other`; change and return this report."""
        for layer, changes in other._layers.items():
            self._layers.setdefault(layer, RoutingChanges(self.k)).merge(changes)
        return self

    def result(self) -> dict[str, Any]:
        """Return {"layers": [...], "overall": {...}} with the fields of `Changes` by layer, and their means."""
        unmatched = [layer for layer, waiting in sorted(self._waiting.items()) if waiting]
        if unmatched:
            raise ValueError(f"layer {unmatched[0]} has routings of the first run only; the second needs the same batches.")
        if not self._layers:
            raise ValueError("the report has no pair of routings: pass `before`, then `after` to holdfast.trace.")
        layers = [
            {"layer": layer, **layer_name(self.names, layer), "tokens": changes.tokens, **asdict(changes.result())}
            for layer, changes in sorted(self._layers.items())
        ]
        names = ("fluctuation", "consistency", "first_flips", "weight_change")
        overall = {name: statistics.fmean(layer[name] for layer in layers) for name in names}
        return without_nan({"layers": layers, "overall": {"layers": len(layers), **overall}})
