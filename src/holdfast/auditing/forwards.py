"""Observe a forward of a model, and compare two forwards over the same tokens.

`observe` records what every MoE layer reads, selects and returns, and what the model predicts. `ForwardComparison` sums up,
batch by batch, how much routing, gate weights, layer outputs, predictions and losses differ between two observations.

`split_change` splits the change of a layer's output into the part that flips cause and the rest. Let x, r be the tokens and
the routing of the first forward, x', r' those of the second, and y(x, r) the layer's output. Let r* send each token to its
held set, the experts of r, weighted by the scores of the second forward. Then, as vectors and exactly,

    y(x', r') - y(x, r)  =  [y(x', r') - y(x', r*)]  +  [y(x', r*) - y(x, r)]
    total                =  flip                     +  rest

A token that keeps its selected set has r* = r' and no flip part. With smooth top-k and ReLU, experts enter and leave the
selected set with weight 0. For these, r* has the weights that r' gives to the held set, and 0 for experts that r' does not
select; they are rescaled to the sum of the weights of r' if the layer renormalises. So the flip part of such a continuous
router goes to 0 with the size of the perturbation, and that of top-k does not.

T tokens, R predictions (one per token for language models, one per image for classifiers)
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from holdfast.auditing.model_and_data import AuditBatch, AuditedModel
from holdfast.auditing.reports import Changes, LossChange, Outputs, Perturbed
from holdfast.hub import RouterCall, router_calls, trace
from holdfast.hub.layers import MoELayerRef
from holdfast.hub.tracing import own_hooks
from holdfast.metrics import PredictionStability, RoutingChanges
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import IGNORED, token_nll
from holdfast.metrics.token_routes import RouteChanges
from holdfast.routing import Routing, Scores, Selection

PerturbInput = Callable[[int, Tensor], Tensor]  # (number of the MoE layer, router's input) -> perturbed input
Rows = tuple[Tensor, Tensor]  # row indices of the same tokens in the first and in the second forward


@final
@dataclass(frozen=True)
class LayerRecord:
    """One MoE layer in one forward."""

    routing: Routing
    tokens: Tensor  # (T,d): the inputs of the experts
    routed: Tensor  # (T,d): the outputs of the experts, weighted and summed
    output: Tensor  # (T,d): the output of the whole layer, with shared experts
    weights: torch.dtype  # the dtype of the gate weights that the experts received


@final
@dataclass(frozen=True)
class Predictions:
    """What a model predicts: the most likely class or token, and the loss if there is a label."""

    best: Tensor  # (R,) int64
    nll: Tensor  # (R,) float64
    labels: Tensor  # (R,) int64, -100 where there is none
    per_token: bool

    @property
    def scored(self) -> Tensor:
        """The losses of the predictions that have a label."""
        return self.nll[self.labels != IGNORED]


@final
@dataclass(frozen=True)
class Observation:
    """One forward of one batch."""

    layers: list[LayerRecord]
    router_calls: list[RouterCall]
    token_mask: Tensor | None  # (T,) bool, True where a token is real
    predictions: Predictions | None
    sequences: int
    of_images: frozenset[int] = frozenset()  # layers whose tokens are parts of images, which the mask does not cover

    def mask_of(self, layer: int) -> Tensor | None:
        """Return the mask (T,) of a layer's tokens; None if all are real."""
        return None if layer in self.of_images else self.token_mask

    def real(self, layer: int) -> Tensor:
        """Return the row indices of a layer's tokens that are not padding."""
        rows = torch.arange(len(self.layers[layer].tokens), device=self.layers[layer].tokens.device)
        mask = self.mask_of(layer)
        return rows if mask is None else rows[mask.to(rows.device)]

    def require_finite(self) -> None:
        """Raise ValueError if a router's input is not finite: activations may overflow, mostly in float16."""
        for layer, call in enumerate(self.router_calls):
            if not bool(_rows(call.tokens)[self.real(layer)].isfinite().all()):
                raise ValueError(f"{call.name}: its inputs contain NaN or infinity; audit the model in another dtype.")


def observe(audited: AuditedModel, batch: AuditBatch, *, perturb_input: PerturbInput | None = None) -> Observation:
    """Run the model on a batch and record it; `perturb_input` changes the input of every router."""
    recorded: list[dict[str, Any]] = [{} for _ in audited.moe_layers]

    def perturb(layer: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return None if perturb_input is None else ((perturb_input(layer, given[0]), *given[1:]), named)

    def record_experts(layer: int, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        recorded[layer].update(tokens=_rows(given[0]), routed=_rows(output), weights=given[2].dtype)

    def record_output(layer: int, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        recorded[layer]["output"] = _rows(output[0] if isinstance(output, tuple) else output)

    with own_hooks() as hooks:
        for layer, site in enumerate(audited.moe_layers):
            hooks.before(audited.routes[layer], partial(perturb, layer))
            hooks.after(site.experts, partial(record_experts, layer))
            hooks.after(site.block, partial(record_output, layer))
        with router_calls(audited.model) as captured, trace(audited.model) as routes:
            out = audited.forward(batch.inputs)
            layers = [LayerRecord(routing, **record) for routing, record in zip(routes, recorded, strict=True)]
            token_mask = None if routes.token_mask is None else routes.token_mask.reshape(-1)
    images = frozenset(layer for layer, site in enumerate(audited.moe_layers) if site.of_images)
    return Observation(layers, list(captured), token_mask, _predictions(out, batch.labels), batch.size, images)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _predictions(out: Any, labels: Tensor | None) -> Predictions | None:
    """Return the model's predictions; None if it neither predicts tokens nor classifies (one output is a number)."""
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3) or logits.shape[-1] == 1:
        return None
    best = logits.argmax(-1)
    targets = torch.full_like(best, IGNORED) if labels is None or labels.shape != best.shape else labels.to(best.device)
    nll = token_nll(logits, targets).double()
    return Predictions(best.reshape(-1), nll.reshape(-1), targets.reshape(-1), per_token=logits.dim() == 3)


@final
@dataclass(frozen=True)
class OutputChange:
    """The change of a layer's output, (T,d) float64 each: total = flip + rest."""

    before: Tensor
    total: Tensor
    flip: Tensor
    rest: Tensor


def split_change(site: MoELayerRef, before: LayerRecord, after: LayerRecord, rows: Rows) -> OutputChange:
    """Return the change of the outputs of `rows`. Experts run again only for the tokens that flipped."""
    first, second = select_rows(before.routing, rows[0]), select_rows(after.routing, rows[1])
    output = before.output[rows[0]].double()
    total = after.output[rows[1]].double() - output
    flip = torch.zeros_like(total)
    flipped = (first.chosen != second.chosen.to(first.chosen.device)).any(-1).nonzero().flatten()
    if len(flipped):
        held, perturbed = select_rows(first, flipped), select_rows(second, flipped)
        weights = held_weights(site, held.experts, perturbed)
        tokens, routed = after.tokens[rows[1]][flipped], after.routed[rows[1]][flipped]
        on_held_set = site.experts(tokens, held.experts.to(tokens.device), weights.to(tokens.device, after.weights))
        flip[flipped] = routed.double() - on_held_set.double()
    return OutputChange(output, total, flip, total - flip)


def select_rows(routing: Routing, rows: Tensor) -> Routing:
    """Return the routing of some tokens."""
    rows = rows.to(routing.experts.device)
    return routing.map_tokens(lambda values: values[rows])


def held_weights(site: MoELayerRef, experts: Tensor, after: Routing) -> Tensor:
    """Return the weights (T,K) of r*: of the first routing's `experts (T,K)` under the scores of the second routing."""
    experts = experts.to(after.gates.device)
    if site.router is not None:
        return site.router.held_weights(experts, after)
    assert site.family is not None
    scale = 1.0 if site.family.scale is None else float(getattr(site.gate, site.family.scale))
    selection = Selection.from_routing(after, scale)
    rule, scores = site.family.rule_of(site.block), Scores.from_routing(after, informed=False)
    return rule.held_weights(experts.unsqueeze(0), scores, selection).squeeze(0)


class OutputChanges(Accumulator[Outputs]):
    """How much a layer's output changes, and how much of the change is caused by flips."""

    def update(self, change: OutputChange) -> None:
        size = change.before.norm(dim=-1)
        counted = size > 0  # the relative change of a zero output is not defined
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


class LossChanges(Accumulator[LossChange]):
    """How much the loss per token changes."""

    def update(self, before: Tensor, after: Tensor) -> None:
        change = after - before
        self._add(tokens=len(change), before=before.sum(), after=after.sum(), size=change.abs().sum())

    def result(self) -> LossChange:
        before, after = self._mean("before"), self._mean("after")
        return LossChange(before, after, after - before, self._mean("size"))


@final
class ForwardComparison:
    """Sum up what one perturbation changes in every layer and in the predictions; `details` depend on the perturbation.

    shown   by layer, rows of the unperturbed forward whose routes are kept; None: of none
    """

    def __init__(self, audited: AuditedModel, shown: Sequence[Tensor] | None = None) -> None:
        self.audited = audited
        self.shown = RouteChanges([] if shown is None else shown)
        self.routes = [RoutingChanges(audited.core(layer)) for layer in range(len(audited.moe_layers))]
        self.outputs = [OutputChanges() for _ in audited.moe_layers]
        self.predictions, self.predicted, self.losses = PredictionStability(), 0, LossChanges()
        self.details: list[dict[str, Any]] = []

    @property
    def tokens(self) -> int:
        return max(changes.tokens for changes in self.routes)

    def compare(
        self, before: Observation, after: Observation, rows: list[Rows] | None = None, examples: Rows | None = None
    ) -> None:
        """Compare two forwards; `rows` says for each layer which tokens to compare, by default all real tokens.

        Call it while the model is still perturbed, because it runs experts of the model.
        """
        rows = [(before.real(layer),) * 2 for layer in range(len(before.layers))] if rows is None else rows
        for layer, pair in enumerate(rows):
            self.compare_layer(layer, before, after, pair)
        self.compare_predictions(before, after, rows[0], examples)

    def compare_layer(self, layer: int, before: Observation, after: Observation, rows: Rows) -> None:
        one, two = before.layers[layer], after.layers[layer]
        if not len(rows[0]):
            return
        self.routes[layer].update(select_rows(one.routing, rows[0]), select_rows(two.routing, rows[1]))
        self.shown.add(layer, one.routing, two.routing, rows)
        self.outputs[layer].update(split_change(self.audited.moe_layers[layer], one, two, rows))

    def compare_predictions(self, before: Observation, after: Observation, rows: Rows, examples: Rows | None = None) -> None:
        """Compare the predictions of tokens at `rows`; those of a classifier at `examples`, by default all."""
        one, two = before.predictions, after.predictions
        if one is None or two is None:
            return
        every = torch.arange(len(one.best), device=one.best.device)
        first, second = (each.to(every.device) for each in (rows if one.per_token else examples or (every, every)))
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
        self.shown = self.shown if self.shown.compared else other.shown
        return self

    def result(self, about: str, harmless: bool) -> Perturbed:
        layers = []
        for layer, (routes, outputs) in enumerate(zip(self.routes, self.outputs, strict=True)):
            if routes.tokens:
                found = routes.result()
                rates: dict[str, Any] = {"first_flips": found.first_flips, "weight_change": found.weight_change}
                flips, output = found.fluctuation, outputs.result()
                layers.append(Changes(layer=layer, tokens=routes.tokens, flips=flips, output=output, **rates))
        parts = [entry.output for entry in layers]
        means: dict[str, Any] = {name: _mean(layers, name) for name in ("flips", "first_flips", "weight_change")}
        overall = Changes(
            tokens=self.tokens,
            **means,
            output=Outputs(*(_mean(parts, name) for name in ("total", "flip", "rest", "flip_share"))),
            predictions=self.predicted,
            prediction_flips=1 - self.predictions.result() if self.predicted else None,
            loss=self.losses.result() if self.losses.tokens else None,
        )
        return Perturbed(about, harmless, layers, overall, self.details)


def _mean(records: list[Any], name: str) -> float:
    return statistics.fmean(getattr(record, name) for record in records)
