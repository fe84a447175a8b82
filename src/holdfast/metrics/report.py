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
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator, only_real, same_padding, selection_only
from holdfast.metrics.near_ties import WIDTHS, Boundary, NearTies
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


class LayerMetrics:
    """Every routing metric of one layer."""

    def __init__(self, widths: Sequence[float] = WIDTHS, boundary: Boundary | None = None) -> None:
        self.entropy, self.load, self.co_selection = GateEntropy(), ExpertLoad(), CoSelection()
        self.experts_per_token, self.weight_sum = ExpertsPerToken(), WeightSums()
        self.near_ties = NearTies(widths, boundary)
        self.dropped = DroppedExperts()  # without data if no limit drops experts
        self.instability = LayerInstability()  # against the layer before; the only metric of two layers

    @property
    def tokens(self) -> int:
        return self.load.tokens

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        routing = only_real(routing, token_mask)
        self.entropy.update(routing)
        self.load.update(routing)
        self.co_selection.update(routing)
        self.experts_per_token.update(routing)
        self.weight_sum.update(routing)
        self.near_ties.update(routing)
        self.dropped.update(routing)

    def merge(self, other: Self) -> Self:
        for name, metric in vars(self).items():
            assert isinstance(metric, Accumulator)
            metric.merge(getattr(other, name))
        return self

    def result(self) -> dict[str, Any]:
        load = self.load.result()
        return {
            "tokens": self.tokens,
            "experts": len(load.percent),
            "entropy": self.entropy.result(),
            "load": asdict(load),
            "experts_per_token": asdict(self.experts_per_token.result()),
            "weight_sum": asdict(self.weight_sum.result()),
            "near_ties": asdict(self.near_ties.result()),
            "instability": self.instability.result() if self.instability.tokens else None,
            "co_selection": asdict(self.co_selection.result()),
            **({"dropped": asdict(self.dropped.result())} if self.dropped.tokens else {}),
        }


class RoutingReport:
    """Collect `each(layer, routing, token_mask)` of all layers. Memory is O(E^2) per layer, and one layer's selection.

    names         of the layers, for the result
    widths        of the strips in which near-ties are counted
    boundaries    by layer, if a router's k or levels are not visible in its records: `boundary_of(router)`
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        widths: Sequence[float] = WIDTHS,
        boundaries: Mapping[int, Boundary] | None = None,
    ) -> None:
        self.names, self.widths, self.boundaries = list(names), tuple(widths), dict(boundaries or {})
        self._layers: dict[int, LayerMetrics] = {}
        self._last: tuple[int, Routing, Tensor | None] | None = None

    @torch.no_grad()
    def each(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """Add one layer's routing of one forward; call it for the layers of a forward in order."""
        metrics = self._layer(layer)
        metrics.update(routing, token_mask)
        if self._last is not None:
            place, previous, previous_padding = self._last
            same = len(previous.experts) == len(routing.experts) and same_padding(previous_padding, token_mask)
            if place == layer - 1 and same:
                metrics.instability.update(previous, routing, token_mask)
        self._last = (layer, selection_only(routing), token_mask)

    def merge(self, other: Self) -> Self:
        """Add the data of `other`; change and return this report."""
        for layer, metrics in other._layers.items():
            self._layer(layer).merge(metrics)
        return self

    def result(self, baseline: "RoutingReport | None" = None, *, graphs: bool = True) -> dict[str, Any]:
        """Return {"layers": [...], "overall": {...}}: dicts, lists, numbers, strings and None only.

        "overall" has means over layers (as ACMoE's Table 6), and the number of dead experts. "dropped" is there only if
        experts are limited in a layer, and its mean is over such layers. "instability" compares a layer
        with the one before; it is None for the first layer, and if the two do not get the same tokens. With a `baseline` on
        the same data, "entropy_ratio" is the entropy over that of the baseline's layer (Mutual-Inform, Figure 2), None if
        that is 0. `graphs=False` omits the E x E counts.
        """
        if not self._layers:
            raise ValueError("the report has no data: pass its `each` to holdfast.trace and run the model.")
        layers = []
        for layer, metrics in sorted(self._layers.items()):
            if not metrics.tokens:
                raise ValueError(f"layer {layer} got only padding; there is nothing to report.")
            result = {"layer": layer, **layer_name(self.names, layer), **metrics.result()}
            if baseline is not None:
                if layer not in baseline._layers:
                    raise ValueError(f"the baseline has no layer {layer} to compare with.")
                reference = baseline._layers[layer].entropy
                result["entropy_ratio"] = metrics.entropy.ratio(reference) if reference.result() > 0 else None
            if not graphs:
                del result["co_selection"]["counts"]
            layers.append(result)
        return without_nan({"layers": layers, "overall": _overall(layers)})

    def _layer(self, layer: int) -> LayerMetrics:
        if layer not in self._layers:
            self._layers[layer] = LayerMetrics(self.widths, self.boundaries.get(layer))
        return self._layers[layer]


def _overall(layers: list[dict[str, Any]]) -> dict[str, Any]:
    instability = [layer["instability"] for layer in layers if layer["instability"] is not None]
    ratios = [layer["entropy_ratio"] for layer in layers if layer.get("entropy_ratio") is not None]
    dropped = [layer["dropped"] for layer in layers if "dropped" in layer]
    strips = [
        {name: statistics.fmean(strip[name] for strip in same) for name in ("width", "share", "experts")}
        for same in zip(*(layer["near_ties"]["strips"] for layer in layers), strict=True)
    ]
    return {
        "layers": len(layers),
        "entropy": statistics.fmean(layer["entropy"] for layer in layers),
        **({"entropy_ratio": statistics.fmean(ratios)} if ratios else {}),
        "load": {
            "std": statistics.fmean(layer["load"]["std"] for layer in layers),
            "cv": statistics.fmean(layer["load"]["cv"] for layer in layers),
            "dead": sum(len(layer["load"]["dead"]) for layer in layers),
        },
        "experts_per_token": {"mean": statistics.fmean(layer["experts_per_token"]["mean"] for layer in layers)},
        "weight_sum": {"mean": statistics.fmean(layer["weight_sum"]["mean"] for layer in layers)},
        **({"dropped": {name: statistics.fmean(one[name] for one in dropped) for name in dropped[0]}} if dropped else {}),
        "near_ties": {
            "strips": strips,
            "explained": statistics.fmean(layer["near_ties"]["explained"] for layer in layers),
        },
        "instability": statistics.fmean(instability) if instability else None,
        "co_selection": {"spectral_gap": statistics.fmean(layer["co_selection"]["spectral_gap"] for layer in layers)},
    }


def layer_name(names: Sequence[str], layer: int) -> dict[str, str]:
    return {"name": names[layer]} if layer < len(names) else {}
