"""`measure_geometry`: the geometry of routing on a model's own tokens, and what another router changes about it.

The model runs once unchanged. At its router inputs, ties, random walks and jumps are measured, the jumps and pictures with
the what-if's router too, on the same weights and points. Then the model runs once more with that router, for its cost.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, final

import torch
from torch import Tensor

from holdfast.attacks.threat import check_seed
from holdfast.auditing.baseline import Mean
from holdfast.auditing.batches import audit_batches
from holdfast.auditing.forwards import Observation, observe
from holdfast.auditing.geometry_layers import GeometryOptions, LayerGeometry, measure_batch, overall_jump
from holdfast.auditing.geometry_report import GeometryReport
from holdfast.auditing.model_and_data import (
    AuditedModel,
    Checksum,
    TextEncoder,
    check_size,
    evaluation_mode,
    resident,
)
from holdfast.auditing.run import require_not_rerouted
from holdfast.auditing.token_geometry import LayerTokens
from holdfast.errors import unknown_name
from holdfast.geometry import NoGeometry
from holdfast.hub import reroute, restore
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import require_finite
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router
from holdfast.routing.layer_names import resolve_layers, routers_by_layer
from holdfast.stored import without_nan
from holdfast.version import versions

Progress = Callable[[int, str], None]  # (tokens done, what is being done)


@final
@dataclass(frozen=True)
class GeometrySettings:
    """Everything that determines a report, apart from the model and its inputs."""

    what_if: str | None = "smooth"
    noise: float = 0.05  # of the random walks at time 1, as a share of each token's norm
    walks: int = 4  # of each token that walks
    walking: int = 512  # tokens of a layer that walk
    pictures: int = 8  # layers with pictures at most, evenly spaced
    seed: int = 0
    batch: int = 8  # sequences per batch, for texts
    length: int = 128  # tokens per sequence, for texts
    tokens: int | None = None  # stop after this number of tokens, rounded up to whole batches

    def __post_init__(self) -> None:
        if not isinstance(self.noise, int | float) or not 0 < self.noise <= 1:
            raise ValueError(f"noise is {self.noise!r}; expected a share of each token's norm, above 0 and at most 1.")
        for name in ("walks", "walking", "pictures"):
            check_size(name, getattr(self, name), 0 if name == "pictures" else 1)
        check_seed(self.seed)
        for name, least in (("batch", 1), ("length", 2), ("tokens", 1)):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), least)

    @property
    def options(self) -> GeometryOptions:
        return GeometryOptions(self.noise, self.walks, self.walking, self.seed)


def measure_geometry(
    model: Any,
    texts_or_inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    what_if: str | None = "smooth",
    name: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> GeometryReport:
    """Measure how near a model's tokens are to the discontinuities of its routers, and when noise takes them there.

    model            of any MoE family, or sparsified; it is not changed. A rerouted one needs `what_if=None`
    texts_or_inputs  strings, with the model's `tokenizer`; or batches, dicts for its forward. With a what-if they are read
                     twice
    what_if          a router that reads one token at a time, to be compared with the model's own on the same weights; None:
                     no other router
    name             of the model in the report
    progress         called with the number of tokens done and a description of the current work
    settings         noise, walks, walking, pictures, seed, batch, length, tokens: those of `GeometrySettings`

    Layers whose ties are not flats (no affine scores, or no top-k) have the reason under "skipped". After Ctrl-C it reports
    on the finished batches, with the status "interrupted".

    Example:
        report = holdfast.measure_geometry(model, ["The quick brown fox jumps over the dog."], tokenizer=tokenizer)
        print([layer["ties"]["orders"][0]["median"] for layer in report.measured])
    """
    checked = _settings(what_if=what_if, **settings)
    audited = AuditedModel(model)
    require_finite(model)
    encoder = None if tokenizer is None else TextEncoder(tokenizer, audited.pad)
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    run = _Run(audited, checked, encoder, progress, what_if_routers(audited, what_if))
    started = time.monotonic()
    with evaluation_mode(model), resident(audited.scorers()):
        interrupted = run.consume(inputs)
        if what_if is not None and not interrupted:
            reroute(model, what_if)
            try:
                interrupted = run.consume_rerouted(inputs)
            finally:
                restore(model)
    return run.report(name, interrupted, time.monotonic() - started)


def _settings(**given: Any) -> GeometrySettings:
    known = [entry.name for entry in fields(GeometrySettings)]
    for name in given:
        if name not in known:
            raise ValueError(unknown_name("setting of a geometry report", name, known))
    return GeometrySettings(**given)


def what_if_routers(audited: AuditedModel, name: str | None) -> list[Router | None]:
    """Return the router that `name` puts into each layer, None where it changes nothing. The model is left as it is.

    A router keeps its references to the weights of the gate, so it can be called after the model is restored.
    """
    if name is None:
        return [None] * len(audited.moe_layers)
    require_not_rerouted(audited)
    routers_by_layer(resolve_layers(name, None, native=True), len(audited.moe_layers))  # a mistake ends it here
    own = [site.router for site in audited.moe_layers]
    model = audited.model
    with evaluation_mode(model), resident(audited.scorers()):
        reroute(model, name)
        try:
            found = [site.router for site in moe_layers(model)]
        finally:
            restore(model)
    changed = [None if router is before else router for router, before in zip(found, own, strict=True)]
    for router in changed:
        if router is not None:
            router.eval()
            if router.traits.sequence_aware or any(part.reads for part in router.all_parts) or router.fixed_sets:
                raise ValueError(
                    f"the what-if {name!r} reads more than one token; routers are compared at points that are no tokens of "
                    "a text, so name a router that reads one token at a time, for example smooth."
                )
    return changed


@final
class _Run:
    """The sums of a report in progress. A batch is added when all layers have been measured on it."""

    def __init__(
        self,
        audited: AuditedModel,
        settings: GeometrySettings,
        encoder: TextEncoder | None,
        progress: Progress | None,
        routers: list[Router | None],
    ) -> None:
        self.audited, self.settings, self.encoder, self.progress, self.routers = (
            audited,
            settings,
            encoder,
            progress,
            routers,
        )
        self.layers = [LayerGeometry(layer) for layer in range(len(audited.moe_layers))]
        self.before, self.after = _Cost(len(self.layers)), _Cost(len(self.layers))
        self.checksum, self.kind = Checksum(), "inputs"
        self.batches = self.sequences = self.tokens = 0

    def consume(self, inputs: Iterable[Any]) -> bool:
        """Measure all batches; return whether the user interrupted. Raise KeyboardInterrupt if no batch was finished."""
        try:
            for batch in self._batches(inputs):
                self._tell(self.tokens, "the model's own forward")
                observed = observe(self.audited, batch)
                observed.require_finite()
                news = [self._measure(layer, observed, batch) for layer in range(len(self.layers))]
                for layer, new in zip(self.layers, news, strict=True):
                    layer.merge(new)
                self.before.add(observed)
                self.checksum.add(batch)
                self.batches, self.sequences = self.batches + 1, self.sequences + batch.size
                self.tokens += batch.tokens or len(observed.real(0))
                self.kind = "inputs" if batch.texts is None else "texts"
        except KeyboardInterrupt:
            if not self.batches:
                raise
            return True
        return False

    def consume_rerouted(self, inputs: Iterable[Any]) -> bool:
        """Run the rerouted model on the same batches; return whether the user interrupted."""
        done = 0
        try:
            for batch in self._batches(inputs):
                self._tell(done, f"the model with {self.settings.what_if}")
                self.after.add(observe(self.audited, batch))
                done += batch.tokens
        except KeyboardInterrupt:
            return True
        return False

    def _batches(self, inputs: Iterable[Any]) -> Iterator[Any]:
        chosen = self.settings
        return audit_batches(
            inputs, self.audited, self.encoder, batch=chosen.batch, length=chosen.length, tokens=chosen.tokens
        )

    def _measure(self, layer: int, observed: Observation, batch: Any) -> LayerGeometry:
        known = self.layers[layer]
        if known.reason is not None:
            return LayerGeometry(layer)
        try:
            tokens = LayerTokens.of(self.audited, layer, observed)
        except NoGeometry as reason:
            return LayerGeometry(layer, reason=str(reason))
        pictures = batch.number == 0 and layer in spread(len(self.layers), self.settings.pictures)
        self._tell(self.tokens, f"layer {layer}: ties, walks and jumps{', pictures and t-SNE' if pictures else ''}")
        options, router = self.settings.options, self.routers[layer]
        before = observed.layers[layer - 1].routing.experts[:, 0][tokens.rows] if layer else None
        try:
            return measure_batch(tokens, layer, batch, self.encoder, options, router, known.walked, pictures, before)
        except ValueError as problem:
            raise ValueError(f"{self.audited.names[layer]}: {problem}") from None

    def _tell(self, done: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, what)

    def report(self, name: str | None, interrupted: bool, seconds: float) -> GeometryReport:
        about = self.audited.describe(name)
        layers = []
        for layer, (place, router) in enumerate(zip(self.audited.names, about["routers"], strict=True)):
            found = {"layer": layer, "name": place, "router": router, **self.layers[layer].result()}
            if self.settings.what_if is not None and found["skipped"] is None and self.after.tokens:
                extra = self.after.extra_shares(layer, found["k"])
                found["what_if"] = {"extra": extra, "extra_law": self.layers[layer].laws.get("extra")}
            layers.append(found)
        data = {"kind": self.kind, "checksum": str(self.checksum), "batches": self.batches, "sequences": self.sequences}
        status: Literal["complete", "interrupted"] = "interrupted" if interrupted else "complete"
        return GeometryReport(
            status=status,
            model=about,
            data={**data, "tokens": self.tokens},
            settings=asdict(self.settings),
            versions=versions(),
            seconds=round(seconds, 3),
            layers=without_nan(layers),
            what_if=without_nan(self._what_if(layers)),
        )

    def _what_if(self, layers: list[dict[str, Any]]) -> dict[str, Any] | None:
        if self.settings.what_if is None:
            return None
        cost = {key: {"before": before, "after": self.after.numbers()[key]} for key, before in self.before.numbers().items()}
        jumps = {"before": overall_jump(layers, 0), "after": overall_jump(layers, 1)}
        return {"router": self.settings.what_if, "cost": cost, "jump": jumps}


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [0] * most if most <= 1 else [round(place * (count - 1) / (most - 1)) for place in range(most)]


@final
class _Cost:
    """Loss and number of experts of a model, over the batches that it has run on."""

    def __init__(self, layers: int) -> None:
        self.loss, self.tokens = Mean(), 0
        self.used: list[list[Tensor]] = [[] for _ in range(layers)]  # experts of each token

    def add(self, observed: Observation) -> None:
        if observed.predictions is not None:
            self.loss.update(observed.predictions.nll[observed.predictions.labels != IGNORED])
        for layer, record in enumerate(observed.layers):
            self.used[layer].append(record.routing.used.sum(-1)[observed.real(layer)].cpu())
        self.tokens += len(observed.real(0))

    def numbers(self) -> dict[str, float | None]:
        if not self.tokens:
            return {"loss": None, "perplexity": None, "experts_per_token": None}
        loss = self.loss.result() if self.loss.tokens else None
        used = torch.cat([torch.cat(part) for part in self.used]).double()
        perplexity = None if loss is None else math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "experts_per_token": float(used.mean())}

    def extra_shares(self, layer: int, k: int) -> list[float]:
        """Return the shares of tokens with at least 1, 2 and 3 experts beyond k."""
        extra = torch.cat(self.used[layer]) - k
        return [float((extra >= least).double().mean()) for least in (1, 2, 3)]
