"""The unperturbed model: its routing metrics, the certificates of its tokens, and the tokens most at risk.

`shown_tokens` chooses the tokens that a page shows one by one: the first texts or pictures of the first batch.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from holdfast.auditing.forwards import Observation
from holdfast.auditing.layer_certificates import (
    CertificateOptions,
    Undecided,
    certify_layer,
    flips_when_rounded,
    undecided_tokens,
)
from holdfast.auditing.layer_geometry import near_boundaries
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder, token_place
from holdfast.auditing.reports import DTYPES, AtRisk, AuditedLayer, Boundaries, Radii
from holdfast.certificates import Certificates
from holdfast.checked import from_mapping
from holdfast.data.tokenizers import token_texts
from holdfast.metrics import Boundary, RoutingReport
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.token_routes import Example, LayerRoutes, layer_routes, patch_rows, picture, tokens_to_show

DECADES, PER_DECADE = (-6, 1), 4  # the bins of the histogram
FINER = 16  # bins for the median, per bin of the histogram
LOW_RADIUS = 1e-3


@final
@dataclass(frozen=True)
class ShownTokens:
    examples: list[Example]
    rows: list[Tensor]  # by layer, of all tokens of the examples


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


class Mean(Accumulator[float | None]):
    """The mean of one number per token; None without tokens."""

    def update(self, values: Tensor) -> None:
        self._add(tokens=len(values), total=values.double().sum())

    def result(self) -> float | None:
        return self._mean("total") if self.tokens else None


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
        self.examples: list[Example] = []  # of the first batch, and the routes of their tokens by layer
        self.routes: list[LayerRoutes] = []
        self.boundaries: list[Boundaries] = []  # by layer, of the first batch

    def update(
        self, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None, shown: ShownTokens | None
    ) -> None:
        self.examples = [] if shown is None else shown.examples
        boundaries = self.audited.boundaries()
        for layer, record in enumerate(observed.layers):
            self.routing.each(layer, record.routing, observed.mask_of(layer))
            found: Certificates | None = None
            try:
                found = certify_layer(self.audited, layer, observed, CertificateOptions())
            except ValueError as reason:  # no certificate is known for this router
                self.refusals[layer] = str(reason)
            if shown is not None:
                about = boundaries.get(layer, Boundary()), self.audited.core(layer)
                radii = None if found is None else found.relative
                self.routes.append(layer_routes(record.routing, shown.rows[layer], *about, radii))
            if found is None:
                continue
            real = observed.real(layer)
            relative, radius = found.relative.reshape(-1)[real], found.radius.reshape(-1)[real]
            self.radii[layer].update(relative)
            self.radii[layer].kind = found.kind
            pairs = found.pair.reshape(-1, 2)[real]
            limit = _risk(self.at_risk[-1])[0] if len(self.at_risk) == self.keep else math.inf
            for place in relative.argsort(stable=True)[: self.keep].tolist():
                if float(relative[place]) < limit:
                    where, (leaves, enters) = vars(token_place(batch, int(real[place]), encoder)), pairs[place].tolist()
                    sizes: dict[str, Any] = {"relative": float(relative[place]), "radius": float(radius[place])}
                    self.at_risk.append(AtRisk(**where, layer=layer, **sizes, leaves=leaves, enters=enters))
            self.at_risk = heapq.nsmallest(self.keep, self.at_risk, key=_risk)
            for name, dtype in DTYPES.items():
                undecided = undecided_tokens(self.audited, layer, observed, dtype)[real]
                flips = flips_when_rounded(self.audited, layer, observed, dtype)[real]
                self.undecided[layer][name].update(undecided, flips)
        if batch.number == 0:
            self.boundaries = near_boundaries(self.audited, observed, batch, encoder)
        if observed.predictions is not None:
            self.loss.update(observed.predictions.scored)

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
        self.examples, self.routes = self.examples or other.examples, self.routes or other.routes
        return self

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


def shown_tokens(
    audited: AuditedModel, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None
) -> ShownTokens | None:
    """Return the tokens to show; None if they could not be read: there is no tokenizer, and there are no pictures."""
    lengths = [len(record.tokens) // batch.size for record in observed.layers]
    if batch.ids is not None:
        return None if encoder is None else _texts(observed, batch, encoder, lengths)
    pixels = batch.inputs.get("pixel_values")
    return None if pixels is None or pixels.dim() != 4 else _pictures(audited, observed, batch, pixels, lengths)


def _texts(observed: Observation, batch: AuditBatch, encoder: TextEncoder, lengths: list[int]) -> ShownTokens | None:
    assert batch.ids is not None
    ids = batch.ids.cpu()
    if set(lengths) != {ids.shape[1]}:  # layers that read other tokens than those of the text
        return None
    rows = observed.real(0).cpu()[: tokens_to_show(len(lengths))]
    of = rows // ids.shape[1]
    texts = [ids.flatten()[rows[of == sequence]].tolist() for sequence in of.unique().tolist()]
    return ShownTokens([Example(token_texts(encoder.decode, text)) for text in texts], [rows] * len(lengths))


def _pictures(
    audited: AuditedModel, observed: Observation, batch: AuditBatch, pixels: Tensor, lengths: list[int]
) -> ShownTokens:
    count = min(batch.size, max(1, tokens_to_show(len(lengths)) // max(lengths)))
    side, rows = patch_rows(lengths, count)
    names: dict[int, str] = getattr(audited.model.config, "id2label", None) or {}

    def name(classes: Any, place: int) -> str:
        number = None if classes is None or len(classes) != batch.size else int(classes[place])
        return "" if number is None or number < 0 else names.get(number, str(number))

    best = None if observed.predictions is None else observed.predictions.best
    examples = []
    for place, image in enumerate(pixels[:count].float()):
        low, high = torch.aminmax(image)  # the model's scale is not known here
        scaled = (image - low) / (high - low).clamp_min(1e-12)
        said = name(best, place)
        examples.append(Example(picture=picture(scaled, name(batch.labels, place) or said, said, side)))
    return ShownTokens(examples, rows)
