"""A layer's change of output, split into what flips cause and the rest.

x, r the tokens and routing of the first forward, x', r' of the second, y(x, r) the layer's output. Let r* send each token to
the experts of r, weighted as the scores behind r' weight them. Then, as vectors and exactly,

    y(x', r') - y(x, r)  =  [y(x', r') - y(x', r*)]  +  [y(x', r*) - y(x, r)]
    total                =  flip                     +  rest

A token whose set stays has r* = r' and no flip part. Where experts fade in and out (smooth top-k, ReLU), one that has left
has faded to nothing, and r* are the weights of r' that are left, rescaled to their sum where the layer renormalises: so the
flip part of a continuous router goes to 0 with the perturbation, and that of top-k does not.


Two forwards over the same tokens, compared: routes, gate weights, outputs, predictions, losses, as sums that merge.
"""

import statistics
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from holdfast.auditing.observation import LayerRecord, Observation
from holdfast.auditing.subject import Audited
from holdfast.hub.layers import Site
from holdfast.metrics import PredictionStability, RoutingChanges
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Routing, Scores, Selection


@final
@dataclass(frozen=True)
class OutputChange:
    """(T,d) float64 each: total = flip + rest."""

    before: Tensor
    total: Tensor
    flip: Tensor
    rest: Tensor


def rows_of(routing: Routing, rows: Tensor) -> Routing:
    """The routing of some tokens."""
    rows = rows.to(routing.experts.device)
    return Routing(routing.logits[rows], routing.gates[rows], routing.experts[rows], routing.weights[rows])


def split(site: Site, before: LayerRecord, after: LayerRecord, rows: tuple[Tensor, Tensor]) -> OutputChange:
    """Of the tokens in `rows` of the first forward and of the second. Runs experts for the tokens that flipped only."""
    first, second = rows_of(before.routing, rows[0]), rows_of(after.routing, rows[1])
    output = before.output[rows[0]].double()
    total = after.output[rows[1]].double() - output
    flip = torch.zeros_like(total)
    flipped = (first.chosen != second.chosen.to(first.chosen.device)).any(-1).nonzero().flatten()
    if len(flipped):
        kept, there = rows_of(first, flipped), rows_of(second, flipped)
        weights = kept_weights(site, kept.experts, there)
        tokens, routed = after.tokens[rows[1]][flipped], after.routed[rows[1]][flipped]
        stayed = site.experts(tokens, kept.experts.to(tokens.device), weights.to(tokens.device, after.weights))
        flip[flipped] = routed.double() - stayed.double()
    return OutputChange(output, total, flip, total - flip)


def kept_weights(site: Site, experts: Tensor, after: Routing) -> Tensor:
    """(T,K): the weights of r*, of `experts (T,K)` of the first routing under the scores of the second."""
    experts = experts.to(after.gates.device)
    if site.router is not None:
        return site.router.held_weights(experts, after)
    assert site.family is not None
    scale = 1.0 if site.family.scale is None else float(getattr(site.gate, site.family.scale))
    live = Selection.recorded(after, scale)
    rule, scores = site.family.rule(site.gate), Scores.recorded(after, informed=False)
    return rule.held_weights(experts.unsqueeze(0), scores, live).squeeze(0)


Rows = tuple[Tensor, Tensor]  # of the first forward and of the second: the same tokens


@final
@dataclass(frozen=True)
class Outputs:
    """Means over tokens of |.| / |y|. The norms of two parts do not add up to that of the whole; `flip_share` does."""

    total: float
    flip: float
    rest: float
    flip_share: float  # sum <flip, total> / sum |total|^2: with the same of the rest, exactly 1; 0 where nothing changed


class OutputChanges(Accumulator[Outputs]):
    """How much a layer's output changes, and how much of it because tokens took other experts."""

    def update(self, change: OutputChange) -> None:
        size = change.before.norm(dim=-1)
        counted = size > 0  # a silent layer has nothing to be relative to
        parts = {"total": change.total, "flip": change.flip, "rest": change.rest}
        relative = {name: (part.norm(dim=-1) / size)[counted].sum() for name, part in parts.items()}
        along, squared = (change.flip * change.total).sum(), change.total.square().sum()
        self._add(tokens=int(counted.sum()), along=along, squared=squared, **relative)

    def result(self) -> Outputs:
        if not self.tokens:
            return Outputs(0.0, 0.0, 0.0, 0.0)
        squared = float(self._sums["squared"])
        share = float(self._sums["along"]) / squared if squared > 0 else 0.0
        return Outputs(self._mean("total"), self._mean("flip"), self._mean("rest"), share)


class LossChanges(Accumulator[dict[str, float]]):
    """Of the loss a token, in nats: before, after, its mean change and the mean of the change's size."""

    def update(self, before: Tensor, after: Tensor) -> None:
        change = after - before
        self._add(tokens=len(change), before=before.sum(), after=after.sum(), size=change.abs().sum())

    def result(self) -> dict[str, float]:
        before, after = self._mean("before"), self._mean("after")
        return {"before": before, "after": after, "change": after - before, "size": self._mean("size")}


@final
class Tally:
    """One perturbation's changes, layer by layer and of the model's predictions. `details` are the perturbation's own."""

    def __init__(self, audited: Audited) -> None:
        self.audited = audited
        self.routes = [RoutingChanges(audited.core(layer)) for layer in range(len(audited.sites))]
        self.outputs = [OutputChanges() for _ in audited.sites]
        self.predictions, self.predicted, self.losses = PredictionStability(), 0, LossChanges()
        self.details: list[dict[str, Any]] = []

    @property
    def tokens(self) -> int:
        return max(changes.tokens for changes in self.routes)

    def compare(self, before: Observation, after: Observation, rows: list[Rows] | None = None) -> None:
        """`rows` of each layer that are the same tokens; by default all that are real.

        To be called while the model is still perturbed, because experts are run.
        """
        rows = [(before.real(layer),) * 2 for layer in range(len(before.layers))] if rows is None else rows
        for layer, pair in enumerate(rows):
            self.compare_layer(layer, before, after, pair)
        self.compare_predictions(before, after, rows[0])

    def compare_layer(self, layer: int, before: Observation, after: Observation, rows: Rows) -> None:
        one, two = before.layers[layer], after.layers[layer]
        if not len(rows[0]):
            return
        self.routes[layer].update(rows_of(one.routing, rows[0]), rows_of(two.routing, rows[1]))
        self.outputs[layer].update(split(self.audited.sites[layer], one, two, rows))

    def compare_predictions(self, before: Observation, after: Observation, rows: Rows | None = None) -> None:
        """Of these tokens, by default of all that are real; of models that predict one thing for a whole input, of all."""
        if before.predictions is None or after.predictions is None:
            return
        rows = (before.real(0),) * 2 if rows is None else rows
        self._compare_predictions(before, after, rows if before.predictions.per_token else None)

    def compare_pictures(self, before: Observation, after: Observation, pair: Rows) -> None:
        """Predictions that are of whole examples, of these examples."""
        self._compare_predictions(before, after, pair)

    def _compare_predictions(self, before: Observation, after: Observation, rows: Rows | None) -> None:
        one, two = before.predictions, after.predictions
        assert one is not None and two is not None
        every = torch.arange(len(one.best), device=one.best.device)
        first, second = (every, every) if rows is None else (row.to(every.device) for row in rows)
        self.predictions.update(one.best[first], two.best[second])
        self.predicted += len(first)
        scored = (one.labels[first] == two.labels[second]) & (one.labels[first] != IGNORED)
        self.losses.update(one.nll[first][scored], two.nll[second][scored])

    def merge(self, other: Self) -> Self:
        for layer in range(len(self.routes)):
            self.routes[layer].merge(other.routes[layer])
            self.outputs[layer].merge(other.outputs[layer])
        self.predictions.merge(other.predictions)
        self.predicted += other.predicted
        self.losses.merge(other.losses)
        self.details += other.details
        return self

    def result(self) -> dict[str, Any]:
        layers = []
        for layer, (routes, outputs) in enumerate(zip(self.routes, self.outputs, strict=True)):
            if routes.tokens:
                found, out = routes.result(), outputs.result()
                layers.append(
                    {
                        "layer": layer,
                        "tokens": routes.tokens,
                        "flips": found.fluctuation,
                        "first_flips": found.first_flips,
                        "weight_change": found.weight_change,
                        "output": dict(vars(out)),
                    }
                )
        return {"tokens": self.tokens, "layers": layers, "overall": self._overall(layers), "details": self.details}

    def _overall(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        """Means over layers; the predictions and losses are the model's."""
        routes = ("flips", "first_flips", "weight_change")
        means = {name: statistics.fmean(layer[name] for layer in layers) for name in routes}
        parts = ("total", "flip", "rest", "flip_share")
        output = {name: statistics.fmean(layer["output"][name] for layer in layers) for name in parts}
        return {
            **means,
            "output": output,
            "prediction_flips": 1 - self.predictions.result() if self.predicted else None,
            "loss": self.losses.result() if self.losses.tokens else None,
        }
