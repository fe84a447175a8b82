"""What changes between two runs, layer by layer, as plain data that JSON can hold.

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
from dataclasses import asdict
from typing import Any, Self

from torch import Tensor

from holdfast.metrics.changes import RoutingChanges
from holdfast.metrics.report import layer_name, plain
from holdfast.metrics.rows import same_padding, selection_only
from holdfast.routing import Routing


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
