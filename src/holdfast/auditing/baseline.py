"""The model as it is, unperturbed: its routing metrics, its certificates, and the tokens most at risk."""

import heapq
import math
from typing import Any, Self, final

import torch
from torch import Tensor

from holdfast.auditing.layer_certificates import DTYPES, Undecided, ask_rounded, certify_layer, undecided_in
from holdfast.auditing.observation import Observation
from holdfast.auditing.subject import Audited, Reader, Sample
from holdfast.certificates import Certificates
from holdfast.metrics import RoutingReport
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import IGNORED

DECADES, PER_DECADE, FINER = (-6, 1), 4, 16  # of the histogram's bins; the median is read from finer ones
LOW_RADIUS = 1e-3
AROUND = 4  # tokens of context on either side
SHOWN = 128  # tokens of the view, at most


class Radii(Accumulator[dict[str, Any]]):
    """Relative certified radii: a histogram with fixed logarithmic bins, the median, the share below 0.001."""

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
        """The middle of its bin, within 2% of it; 0 below all bins, None above them."""
        place = int((fine.cumsum(0) * 2 >= fine.sum()).nonzero()[0])
        if place == 0:
            return 0.0
        return None if place == len(fine) - 1 else float(10 ** (DECADES[0] + (place - 0.5) / (PER_DECADE * FINER)))


@final
class Baseline:
    """Everything about the unperturbed forwards. One batch is one of these, merged into the whole."""

    def __init__(self, audited: Audited, keep: int) -> None:
        self.audited, self.keep = audited, keep
        layers = range(len(audited.sites))
        self.routing = RoutingReport(audited.names, boundaries=audited.boundaries())
        self.radii = [Radii() for _ in layers]
        self.undecided = [{name: Undecided() for name in DTYPES} for _ in layers]
        self.kinds: dict[int, str] = {}
        self.no_bound: dict[int, str] = {}
        self.loss = Mean()
        self.at_risk: list[dict[str, Any]] = []
        self.view: View | None = None

    def update(self, seen: Observation, sample: Sample, reader: Reader | None) -> None:
        if sample.number == 0 and reader is not None:
            self.view = View.of(sample, reader)
        for layer, record in enumerate(seen.layers):
            self.routing.each(layer, record.routing, seen.token_mask)
            try:
                self._certify(layer, seen, sample, reader)
            except ValueError as reason:  # no bound is known for this router
                self.no_bound[layer] = str(reason)
        if seen.predictions is not None:
            self.loss.update(seen.predictions.nll[seen.predictions.labels != IGNORED])

    def merge(self, other: Self) -> Self:
        self.routing.merge(other.routing)
        for mine, theirs in zip(self.radii, other.radii, strict=True):
            mine.merge(theirs)
        for layer, found in enumerate(other.undecided):
            for name, counts in found.items():
                self.undecided[layer][name].merge(counts)
        self.kinds |= other.kinds
        self.no_bound |= other.no_bound
        self.loss.merge(other.loss)
        self.at_risk = heapq.nsmallest(self.keep, [*self.at_risk, *other.at_risk], key=_risk)
        self.view = self.view or other.view
        return self

    def _certify(self, layer: int, seen: Observation, sample: Sample, reader: Reader | None) -> None:
        real, found = seen.real(layer), certify_layer(self.audited, layer, seen)
        self.radii[layer].update(found.relative.reshape(-1)[real])
        self.kinds[layer] = found.kind
        self._note_risk(layer, found, real, sample, reader)
        if self.view is not None:
            self.view.add(layer, found)
        for name, dtype in DTYPES.items():
            alarm = undecided_in(self.audited, layer, seen, dtype)[real]
            flips = ask_rounded(self.audited, layer, seen, dtype)[real]
            self.undecided[layer][name].update(alarm, flips)

    def _note_risk(self, layer: int, found: Certificates, real: Tensor, sample: Sample, reader: Reader | None) -> None:
        relative = found.relative.reshape(-1)[real]
        radius, pair = found.radius.reshape(-1)[real], found.pair.reshape(-1, 2)[real]
        worst = relative.argsort(stable=True)[: self.keep].tolist()
        bar = self.at_risk[-1]["relative"] if len(self.at_risk) == self.keep else math.inf
        for place in worst:
            if float(relative[place]) < bar:
                where = {"batch": sample.number, "layer": layer, **_where(sample, int(real[place]), reader)}
                leaves, enters = pair[place].tolist()
                size = {"relative": float(relative[place]), "radius": float(radius[place])}
                self.at_risk.append({**where, **size, "leaves": leaves, "enters": enters})
        self.at_risk = heapq.nsmallest(self.keep, self.at_risk, key=_risk)

    def result(self) -> dict[str, Any]:
        found = self.routing.result()
        for entry in found["layers"]:
            layer = entry["layer"]
            entry["entropy_share"] = entry["entropy"] / math.log(entry["experts"]) if entry["experts"] > 1 else 0.0
            entry["co_selection"]["groups"] = groups(entry["co_selection"]["counts"])
            if layer in self.no_bound or not self.radii[layer].tokens:
                entry["radius"] = entry["undecided"] = {"skipped": self.no_bound.get(layer, "nothing was certified.")}
                continue
            entry["radius"] = {"kind": self.kinds[layer], **self.radii[layer].result()}
            entry["undecided"] = {name: counts.result() for name, counts in self.undecided[layer].items()}
        found["loss"] = self.loss.result() if self.loss.tokens else None
        return found


@final
class View:
    """The beginning of the first sequence, token by token, with the relative radius of each in every layer."""

    def __init__(self, rows: Tensor, pieces: list[str]) -> None:
        self.rows, self.pieces = rows, pieces
        self.layers: dict[str, list[float | None]] = {}

    @classmethod
    def of(cls, sample: Sample, reader: Reader) -> Self | None:
        if sample.ids is None:
            return None
        mask = sample.inputs.get("attention_mask")
        real = torch.ones_like(sample.ids[0]) if mask is None or mask.dim() != 2 else mask[0]
        rows = real.nonzero().flatten()[:SHOWN].cpu()
        return cls(rows, [reader.decode([token]) for token in sample.ids[0].cpu()[rows].tolist()])

    def add(self, layer: int, found: Certificates) -> None:
        shown = found.relative.reshape(-1).cpu()[self.rows].tolist()
        self.layers[str(layer)] = [radius if math.isfinite(radius) else None for radius in shown]

    def result(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "layers": self.layers}


class Mean(Accumulator[float]):
    """Of numbers, one for each token."""

    def update(self, values: Tensor) -> None:
        self._add(tokens=len(values), total=values.double().sum())

    def result(self) -> float:
        return self._mean("total")


def groups(counts: list[list[int]]) -> int:
    """Of the experts in use, how many groups there are that no token joins."""
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


def _where(sample: Sample, row: int, reader: Reader | None) -> dict[str, Any]:
    """Which token it was, with a few around it, decoded where that can be done."""
    ids = sample.ids
    if ids is None or row >= ids.numel():
        nothing = ("sequence", "position", "token", "text", "before", "after", "context")
        return {"place": row, **dict.fromkeys(nothing)}
    sequence, position = divmod(row, ids.shape[1])
    mask = sample.inputs.get("attention_mask")
    line = ids[sequence].tolist()
    near = list(range(max(0, position - AROUND), min(len(line), position + AROUND + 1)))
    if mask is not None and mask.dim() == 2:
        near = [place for place in near if mask[sequence, place]]
    where = {"place": row, "sequence": sequence, "position": position, "token": line[position]}
    parts = {
        "text": [position],
        "before": [place for place in near if place < position],
        "after": [place for place in near if place > position],
        "context": near,  # decoded in one piece: where tokens share a character, the parts cannot show it
    }
    return where | {name: _decoded(reader, line, places) for name, places in parts.items()}


def _decoded(reader: Reader | None, line: list[int], places: list[int]) -> str | None:
    return None if reader is None else reader.decode([line[place] for place in places])
