"""The unperturbed model: its routing metrics, the certificates of its tokens, and the tokens most at risk."""

import heapq
import math
from typing import Any, Self, final

import torch
from torch import Tensor

from holdfast.auditing.forwards import Observation
from holdfast.auditing.layer_certificates import DTYPES, Undecided, certify_layer, flips_when_rounded, undecided_tokens
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder
from holdfast.auditing.near_boundaries import near_boundaries
from holdfast.certificates import Certificates
from holdfast.metrics import RoutingReport
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import IGNORED

DECADES, PER_DECADE = (-6, 1), 4  # the bins of the histogram
FINER = 16  # bins for the median, per bin of the histogram
LOW_RADIUS = 1e-3
CONTEXT = 4  # tokens shown before and after a token at risk
MOST_SHOWN = 128  # tokens of the view


class RadiusHistogram(Accumulator[dict[str, Any]]):
    """Relative certified radii: a histogram with fixed logarithmic bins, the median, and the share below 0.001."""

    def update(self, relative: Tensor) -> None:
        bins = (DECADES[1] - DECADES[0]) * PER_DECADE * FINER
        place = (relative.double().clamp_min(1e-300).log10() - DECADES[0]) * PER_DECADE * FINER
        place = place.nan_to_num(posinf=bins).floor().clamp(-1, bins).long() + 1
        low = (relative < LOW_RADIUS).sum()
        self._add(tokens=len(relative), bins=torch.bincount(place, minlength=bins + 2), low=low, none=(relative <= 0).sum())

    def result(self) -> dict[str, Any]:
        fine = self._sums["bins"]
        coarse = [float(fine[0]), *fine[1:-1].view(-1, FINER).sum(1).tolist(), float(fine[-1])]
        edges = [10 ** (DECADES[0] + place / PER_DECADE) for place in range((DECADES[1] - DECADES[0]) * PER_DECADE + 1)]
        return {
            "median": self._median(fine),
            "below_0.001": self._mean("low"),
            "none": self._mean("none"),
            "edges": edges,
            "counts": [int(count) for count in coarse],
        }

    def _median(self, fine: Tensor) -> float | None:
        """Return the middle of the bin that contains the median, within 2% of it; 0 below all bins, None above them."""
        place = int((fine.cumsum(0) * 2 >= fine.sum()).nonzero()[0])
        if place == 0:
            return 0.0
        return None if place == len(fine) - 1 else float(10 ** (DECADES[0] + (place - 0.5) / (PER_DECADE * FINER)))


@final
class Baseline:
    """What is measured on unperturbed forwards. Each batch has its own, which is then merged into the total."""

    def __init__(self, audited: AuditedModel, keep: int) -> None:
        self.audited, self.keep = audited, keep
        layers = range(len(audited.moe_layers))
        self.routing = RoutingReport(audited.names, boundaries=audited.boundaries())
        self.radii = [RadiusHistogram() for _ in layers]
        self.undecided = [{name: Undecided() for name in DTYPES} for _ in layers]
        self.kinds: dict[int, str] = {}
        self.refusals: dict[int, str] = {}
        self.loss = Mean()
        self.at_risk: list[dict[str, Any]] = []
        self.view: View | None = None
        self.boundaries: list[dict[str, Any]] = []  # by layer, of the first batch

    def update(self, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None) -> None:
        if batch.number == 0 and encoder is not None:
            self.view = View.of(batch, encoder)
        for layer, record in enumerate(observed.layers):
            self.routing.each(layer, record.routing, observed.token_mask)
            try:
                self._certify(layer, observed, batch, encoder)
            except ValueError as reason:  # no certificate is known for this router
                self.refusals[layer] = str(reason)
        if batch.number == 0:
            self.boundaries = near_boundaries(self.audited, observed)
            self._name_tokens(batch, encoder)
        if observed.predictions is not None:
            self.loss.update(observed.predictions.nll[observed.predictions.labels != IGNORED])

    def _name_tokens(self, batch: AuditBatch, encoder: TextEncoder | None) -> None:
        """Add the text of the token in the slice."""
        for found in (found["slice"] for found in self.boundaries if found.get("slice")):
            found["tokens"][0]["text"] = where_in_batch(batch, found.pop("row"), encoder)["text"]

    def merge(self, other: Self) -> Self:
        self.boundaries = self.boundaries or other.boundaries
        self.routing.merge(other.routing)
        for radii, others in zip(self.radii, other.radii, strict=True):
            radii.merge(others)
        for layer, found in enumerate(other.undecided):
            for name, counts in found.items():
                self.undecided[layer][name].merge(counts)
        self.kinds |= other.kinds
        self.refusals |= other.refusals
        self.loss.merge(other.loss)
        self.at_risk = heapq.nsmallest(self.keep, [*self.at_risk, *other.at_risk], key=_risk)
        self.view = self.view or other.view
        return self

    def _certify(self, layer: int, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None) -> None:
        real, found = observed.real(layer), certify_layer(self.audited, layer, observed)
        self.radii[layer].update(found.relative.reshape(-1)[real])
        self.kinds[layer] = found.kind
        self._record_risk(layer, found, real, batch, encoder)
        if self.view is not None:
            self.view.add(layer, found)
        for name, dtype in DTYPES.items():
            undecided = undecided_tokens(self.audited, layer, observed, dtype)[real]
            flips = flips_when_rounded(self.audited, layer, observed, dtype)[real]
            self.undecided[layer][name].update(undecided, flips)

    def _record_risk(
        self, layer: int, found: Certificates, real: Tensor, batch: AuditBatch, encoder: TextEncoder | None
    ) -> None:
        """Keep the tokens with the smallest relative radii."""
        relative = found.relative.reshape(-1)[real]
        radius, pair = found.radius.reshape(-1)[real], found.pair.reshape(-1, 2)[real]
        worst = relative.argsort(stable=True)[: self.keep].tolist()
        limit = self.at_risk[-1]["relative"] if len(self.at_risk) == self.keep else math.inf
        for place in worst:
            if float(relative[place]) < limit:
                where = {"batch": batch.number, "layer": layer, **where_in_batch(batch, int(real[place]), encoder)}
                leaves, enters = pair[place].tolist()
                size = {"relative": float(relative[place]), "radius": float(radius[place])}
                self.at_risk.append({**where, **size, "leaves": leaves, "enters": enters})
        self.at_risk = heapq.nsmallest(self.keep, self.at_risk, key=_risk)

    def result(self) -> dict[str, Any]:
        found = self.routing.result()
        for entry in found["layers"]:
            layer = entry["layer"]
            entry["entropy_share"] = entry["entropy"] / math.log(entry["experts"]) if entry["experts"] > 1 else 0.0
            entry["boundaries"] = self.boundaries[layer] if self.boundaries else {"skipped": "no token was measured."}
            entry["co_selection"]["groups"] = count_groups(entry["co_selection"]["counts"])
            if layer in self.refusals or not self.radii[layer].tokens:
                entry["radius"] = entry["undecided"] = {"skipped": self.refusals.get(layer, "no token was certified.")}
                continue
            entry["radius"] = {"kind": self.kinds[layer], **self.radii[layer].result()}
            entry["undecided"] = {name: counts.result() for name, counts in self.undecided[layer].items()}
        found["loss"] = self.loss.result() if self.loss.tokens else None
        return found


@final
class View:
    """The first tokens of the first sequence, with the relative radius of each token in every layer."""

    def __init__(self, rows: Tensor, pieces: list[str]) -> None:
        self.rows, self.pieces = rows, pieces
        self.layers: dict[str, list[float | None]] = {}

    @classmethod
    def of(cls, batch: AuditBatch, encoder: TextEncoder) -> Self | None:
        if batch.ids is None:
            return None
        mask = batch.inputs.get("attention_mask")
        real = torch.ones_like(batch.ids[0]) if mask is None or mask.dim() != 2 else mask[0]
        rows = real.nonzero().flatten()[:MOST_SHOWN].cpu()
        return cls(rows, [encoder.decode([token]) for token in batch.ids[0].cpu()[rows].tolist()])

    def add(self, layer: int, found: Certificates) -> None:
        shown = found.relative.reshape(-1).cpu()[self.rows].tolist()
        self.layers[str(layer)] = [radius if math.isfinite(radius) else None for radius in shown]

    def result(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "layers": self.layers}


class Mean(Accumulator[float]):
    """The mean of one number per token."""

    def update(self, values: Tensor) -> None:
        self._add(tokens=len(values), total=values.double().sum())

    def result(self) -> float:
        return self._mean("total")


def count_groups(counts: list[list[int]]) -> int:
    """Return the number of groups of used experts that no token connects, from the counts of co-selections."""
    left = {expert for expert, row in enumerate(counts) if row[expert]}
    found = 0
    while left:
        found += 1
        reached = [left.pop()]
        for expert in reached:
            near = {other for other in left if counts[expert][other]}
            left -= near
            reached.extend(near)
    return found


def _risk(entry: dict[str, Any]) -> tuple[float, int, int, int]:
    return entry["relative"], entry["layer"], entry["batch"], entry["place"]


def where_in_batch(batch: AuditBatch, row: int, encoder: TextEncoder | None) -> dict[str, Any]:
    """Return the position of a token and the tokens around it, decoded if there is a tokenizer."""
    ids = batch.ids
    if ids is None or row >= ids.numel():
        nothing = ("sequence", "position", "token", "text", "before", "after", "context")
        return {"place": row, **dict.fromkeys(nothing)}
    sequence, position = divmod(row, ids.shape[1])
    mask = batch.inputs.get("attention_mask")
    line = ids[sequence].tolist()
    near = list(range(max(0, position - CONTEXT), min(len(line), position + CONTEXT + 1)))
    if mask is not None and mask.dim() == 2:
        near = [place for place in near if mask[sequence, place]]
    where = {"place": row, "sequence": sequence, "position": position, "token": line[position]}
    parts = {
        "text": [position],
        "before": [place for place in near if place < position],
        "after": [place for place in near if place > position],
        "context": near,  # decoded together, because tokens may share a character
    }
    return where | {name: _decoded(encoder, line, places) for name, places in parts.items()}


def _decoded(encoder: TextEncoder | None, line: list[int], places: list[int]) -> str | None:
    return None if encoder is None else encoder.decode([line[place] for place in places])
