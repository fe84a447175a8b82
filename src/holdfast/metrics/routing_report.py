"""All routing metrics of all layers in one pass over the data, as values that JSON can store.

```python
report = RoutingReport()
with holdfast.trace(model, each=report.each):
    for batch in batches:
        model(**batch)
report.result()
```
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator, only_real
from holdfast.metrics.near_ties import Boundary, NearTies
from holdfast.metrics.selection import (
    CoSelection,
    DroppedExperts,
    ExpertLoad,
    ExpertsPerToken,
    GateEntropy,
    LayerInstability,
    WeightSums,
)
from holdfast.routing import Routing
from holdfast.stored import without_nan


class RoutingReport:
    """Collect `each(layer, routing, token_mask)` of all layers. Memory is O(E^2) per layer, and one layer's selection.

    names         of the layers, for the result
    boundaries    by layer, if a router's k or levels are not visible in its records: `boundary_of(router)`
    """

    def __init__(self, names: Sequence[str] = (), *, boundaries: Mapping[int, Boundary] | None = None) -> None:
        self.names, self.boundaries = list(names), dict(boundaries or {})
        self._layers: dict[int, dict[str, Any]] = {}  # of each layer, its metrics by name
        self._last: tuple[int, Routing, Tensor | None] | None = None

    @torch.no_grad()
    def each(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """Add one layer's routing of one forward; call it for the layers of a forward in order."""
        metrics, real = self._layer(layer), only_real(routing, token_mask)
        for name, metric in metrics.items():
            if name != "instability":
                metric.update(real)
        if self._last is not None:
            place, previous, mask = self._last
            same_mask = mask is token_mask
            if mask is not None and token_mask is not None:
                same_mask = torch.equal(mask, token_mask.to(mask.device))
            if place == layer - 1 and len(previous.experts) == len(routing.experts) and same_mask:
                metrics["instability"].update(previous, routing, token_mask)
        # Logits and gates become one expanded zero of their shape, to save memory.
        gates = routing.gates.new_zeros(()).expand(routing.gates.shape)
        self._last = (layer, Routing(gates, gates, routing.experts.detach(), routing.weights.detach()), token_mask)

    def merge(self, other: Self) -> Self:
        """Add the data of `other`; change and return this report."""
        for layer, metrics in other._layers.items():
            for name, metric in self._layer(layer).items():
                metric.merge(metrics[name])
        return self

    def result(self) -> dict[str, Any]:
        """Return {"layers": [...], "overall": {...}}: dicts, lists, numbers, strings and None only.

        "overall" has means over layers (as ACMoE's Table 6), and the number of dead experts. "dropped" is there only if
        experts are limited in a layer, and its mean is over such layers. "instability" compares a layer
        with the one before; it is None for the first layer, and if the two do not get the same tokens.
        """
        if not self._layers:
            raise ValueError("the report has no data: pass its `each` to holdfast.trace and run the model.")
        layers = []
        for layer, metrics in sorted(self._layers.items()):
            tokens = metrics["load"].tokens
            if not tokens:
                raise ValueError(f"layer {layer} got only padding; there is nothing to report.")
            found: dict[str, Any] = {name: metric.result() if metric.tokens else None for name, metric in metrics.items()}
            if found["dropped"] is None:
                del found["dropped"]
            values = {name: asdict(value) if is_dataclass(value) else value for name, value in found.items()}  # type: ignore[arg-type]
            name = {"name": self.names[layer]} if layer < len(self.names) else {}
            layers.append({"layer": layer, **name, "tokens": tokens, "experts": len(found["load"].percent), **values})
        return without_nan({"layers": layers, "overall": _overall(layers)})  # type: ignore[no-any-return]

    def _layer(self, layer: int) -> dict[str, Any]:
        """Return the metrics of a layer by their names in the result."""
        if layer not in self._layers:
            metrics: dict[str, Accumulator[Any]] = {
                "entropy": GateEntropy(),
                "load": ExpertLoad(),
                "experts_per_token": ExpertsPerToken(),
                "weight_sum": WeightSums(),
                "near_ties": NearTies(boundary=self.boundaries.get(layer)),
                "instability": LayerInstability(),  # against the layer before; the only metric of two layers
                "co_selection": CoSelection(),
                "dropped": DroppedExperts(),  # without data if no limit drops experts
            }
            self._layers[layer] = metrics
        return self._layers[layer]


def _overall(layers: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(*keys: str) -> float | None:
        """Return the mean of an entry over the layers that have it."""
        values = [reduce(dict.__getitem__, keys, layer) for layer in layers if layer.get(keys[0]) is not None]
        return statistics.fmean(values) if values else None  # type: ignore[arg-type]

    strips = [
        {name: statistics.fmean(strip[name] for strip in same) for name in same[0]}
        for same in zip(*(layer["near_ties"]["strips"] for layer in layers), strict=True)
    ]
    dropped = {name: mean("dropped", name) for name in ("share", "tokens")}
    dead = sum(len(layer["load"]["dead"]) for layer in layers)
    return {
        "layers": len(layers),
        "entropy": mean("entropy"),
        "load": {"std": mean("load", "std"), "cv": mean("load", "cv"), "dead": dead},
        "experts_per_token": {"mean": mean("experts_per_token", "mean")},
        "weight_sum": {"mean": mean("weight_sum", "mean")},
        **({} if dropped["share"] is None else {"dropped": dropped}),
        "near_ties": {"strips": strips, "explained": mean("near_ties", "explained")},
        "instability": mean("instability"),
        "co_selection": {"spectral_gap": mean("co_selection", "spectral_gap")},
    }
