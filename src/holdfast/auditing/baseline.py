"""The unperturbed model: its routing metrics, the certificates of its tokens, and the tokens most at risk."""

import heapq
import math
from typing import Self, final

import torch
from torch import Tensor

from holdfast.auditing.forwards import Observation
from holdfast.auditing.layer_certificates import Undecided, certify_layer, flips_when_rounded, undecided_tokens
from holdfast.auditing.layer_geometry import near_boundaries
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder, token_place
from holdfast.auditing.reports import DTYPES, AtRisk, AuditedLayer, Boundaries, Radii, View
from holdfast.certificates import Certificates
from holdfast.checked import from_mapping
from holdfast.metrics import RoutingReport
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import IGNORED

DECADES, PER_DECADE = (-6, 1), 4  # the bins of the histogram
FINER = 16  # bins for the median, per bin of the histogram
LOW_RADIUS = 1e-3
MOST_SHOWN = 128  # tokens of the view


class RadiusHistogram(Accumulator[Radii]):
    """Relative certified radii: a histogram with fixed logarithmic bins, the median, and the share of low ones."""

    kind = ""  # of the certificates

    def update(self, relative: Tensor) -> None:
        bins = (DECADES[1] - DECADES[0]) * PER_DECADE * FINER
        place = (relative.double().clamp_min(1e-300).log10() - DECADES[0]) * PER_DECADE * FINER
        place = place.nan_to_num(posinf=bins).floor().clamp(-1, bins).long() + 1
        low = (relative < LOW_RADIUS).sum()
        self._add(tokens=len(relative), bins=torch.bincount(place, minlength=bins + 2), low=low, none=(relative <= 0).sum())

    def result(self) -> Radii:
        fine = self._sums["bins"]
        coarse = [float(fine[0]), *fine[1:-1].view(-1, FINER).sum(1).tolist(), float(fine[-1])]
        edges = [10 ** (DECADES[0] + place / PER_DECADE) for place in range((DECADES[1] - DECADES[0]) * PER_DECADE + 1)]
        counts = [int(count) for count in coarse]
        # The middle of the bin that contains the median, within 2% of it; 0 below all bins, None above them.
        place = int((fine.cumsum(0) * 2 >= fine.sum()).nonzero()[0])
        median = 10 ** (DECADES[0] + (place - 0.5) / (PER_DECADE * FINER)) if place else 0.0
        known = None if place == len(fine) - 1 else median
        return Radii(self.kind, known, self._mean("low"), self._mean("none"), edges, counts)


class Mean(Accumulator[float]):
    """The mean of one number per token."""

    def update(self, values: Tensor) -> None:
        self._add(tokens=len(values), total=values.double().sum())

    def result(self) -> float:
        return self._mean("total")


@final
class Baseline:
    """What is measured on unperturbed forwards. Each batch has its own, which is then merged into the total."""

    def __init__(self, audited: AuditedModel, keep: int) -> None:
        self.audited, self.keep = audited, keep
        layers = range(len(audited.moe_layers))
        self.routing = RoutingReport(audited.names, boundaries=audited.boundaries())
        self.radii = [RadiusHistogram() for _ in layers]
        self.undecided = [{name: Undecided() for name in DTYPES} for _ in layers]
        self.refusals: dict[int, str] = {}
        self.loss = Mean()
        self.at_risk: list[AtRisk] = []
        self.view: View | None = None  # of the first batch
        self.boundaries: list[Boundaries] = []  # by layer, of the first batch

    def update(self, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None) -> None:
        shown = None  # rows of the view
        if batch.number == 0 and encoder is not None and batch.ids is not None:
            real = torch.ones_like(batch.ids[0]) if batch.token_mask is None else batch.token_mask[0]
            shown = real.nonzero().flatten()[:MOST_SHOWN].cpu()
            self.view = View([encoder.decode([token]) for token in batch.ids[0].cpu()[shown].tolist()], {})
        for layer, record in enumerate(observed.layers):
            self.routing.each(layer, record.routing, observed.token_mask)
            try:
                found = certify_layer(self.audited, layer, observed)
            except ValueError as reason:  # no certificate is known for this router
                self.refusals[layer] = str(reason)
                continue
            if self.view is not None:
                radii = found.relative.reshape(-1).cpu()[shown].tolist()
                self.view.layers[str(layer)] = [radius if math.isfinite(radius) else None for radius in radii]
            real = observed.real(layer)
            self._record_risk(layer, found, real, batch, encoder)
            self.radii[layer].update(found.relative.reshape(-1)[real])
            self.radii[layer].kind = found.kind
            for name, dtype in DTYPES.items():
                undecided = undecided_tokens(self.audited, layer, observed, dtype)[real]
                flips = flips_when_rounded(self.audited, layer, observed, dtype)[real]
                self.undecided[layer][name].update(undecided, flips)
        if batch.number == 0:
            self.boundaries = near_boundaries(self.audited, observed, batch, encoder)
        if observed.predictions is not None:
            self.loss.update(observed.predictions.nll[observed.predictions.labels != IGNORED])

    def merge(self, other: Self) -> Self:
        self.boundaries = self.boundaries or other.boundaries
        self.routing.merge(other.routing)
        for radii, others in zip(self.radii, other.radii, strict=True):
            radii.merge(others)
            radii.kind = others.kind or radii.kind
        for layer, found in enumerate(other.undecided):
            for name, counts in found.items():
                self.undecided[layer][name].merge(counts)
        self.refusals |= other.refusals
        self.loss.merge(other.loss)
        self.at_risk = heapq.nsmallest(self.keep, [*self.at_risk, *other.at_risk], key=_risk)
        self.view = self.view or other.view
        return self

    def _record_risk(
        self, layer: int, found: Certificates, real: Tensor, batch: AuditBatch, encoder: TextEncoder | None
    ) -> None:
        """Keep the tokens with the smallest relative radii."""
        relative = found.relative.reshape(-1)[real]
        radius, pair = found.radius.reshape(-1)[real], found.pair.reshape(-1, 2)[real]
        limit = _risk(self.at_risk[-1])[0] if len(self.at_risk) == self.keep else math.inf
        for place in relative.argsort(stable=True)[: self.keep].tolist():
            if float(relative[place]) < limit:
                where = vars(token_place(batch, int(real[place]), encoder))
                (leaves, enters), size = pair[place].tolist(), float(relative[place])
                risk = AtRisk(**where, layer=layer, relative=size, radius=float(radius[place]), leaves=leaves, enters=enters)
                self.at_risk.append(risk)
        self.at_risk = heapq.nsmallest(self.keep, self.at_risk, key=_risk)

    def layers(self) -> list[AuditedLayer]:
        """Return the results of each layer."""
        layers = []
        for entry in self.routing.result()["layers"]:
            layer, entropy = entry["layer"], entry["entropy"]
            most = math.log(entry["experts"])
            entry["entropy_share"] = None if entropy is None else entropy / most if most else 0.0
            entry["boundaries"] = self.boundaries[layer]
            entry["co_selection"]["groups"] = count_groups(entry["co_selection"]["counts"])
            if layer in self.refusals or not self.radii[layer].tokens:
                entry["no_certificate"] = self.refusals.get(layer, "no token was certified.")
            else:
                entry["radius"] = self.radii[layer].result()
                entry["undecided"] = {name: counts.result() for name, counts in self.undecided[layer].items()}
            layers.append(from_mapping(AuditedLayer, entry))
        return layers


def count_groups(counts: list[list[int]]) -> int:
    """Return the number of groups of used experts that no token connects, from the counts of co-selections."""
    together = torch.tensor(counts, dtype=torch.float64)
    used = together.diagonal() > 0
    reached = together[used][:, used]
    for _ in range(len(counts).bit_length()):  # each time, through paths of twice the length
        reached = (reached @ reached > 0).double()
    return len({tuple(row) for row in reached.tolist()})


def _risk(entry: AtRisk) -> tuple[float, int, int, int]:
    assert entry.relative is not None
    return entry.relative, entry.layer, entry.batch, entry.place
