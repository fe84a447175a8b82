"""`holdfast geometry`: measure how near a saved model's tokens are to the discontinuities of its routers, and draw them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from holdfast.cli.common import MeasuredData, free_files, show, token_row, write_report_files

if TYPE_CHECKING:
    from holdfast.auditing import GeometryReport

NO_ROUTER = "none"  # --what-if: measure the model's own router only
DEFAULT_ROUTER = "smooth"
SHOWN_JUMPS = 5


@dataclass(frozen=True)
class Geometry(MeasuredData):
    """Measure the geometry of a model's routing: how near its tokens are to ties of experts, when noise takes them there,
    how far the output jumps, and what another router changes about it. Draw slices through the space of tokens.

    Examples: `holdfast geometry comparison/cells/smoe-seed0 --out geometry`,
    `holdfast geometry path/to/olmoe --text my.txt --tokens 2000`,
    `holdfast geometry path/to/olmoe --noise 0.01 --what-if none`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    noise: float = 0.05
    """Noise that a random walk has added at time 1, as a share of each token's norm."""
    drift: float = 0.0
    """How far a random walk has moved straight towards the nearest boundary at time 1, besides the noise, as a share of each
    token's norm."""
    walks: int = 4
    """Random walks of each token."""
    walking: int = 512
    """Tokens of each layer that walk."""
    pictures: int = 8
    """Layers with pictures at most, evenly spaced."""
    what_if: str | None = None
    """Compare with this router on the same weights, without training; none: no other router. By default smooth, or none if
    the model is rerouted already. The model is not changed."""
    out: Path | None = None
    """Write geometry.json and geometry.html to this folder."""

    def run(self) -> None:
        from holdfast.report import write_geometry

        files = free_files(self.out, "geometry.json", "geometry.html", force=self.force)
        report = self._measure()
        print_geometry(report)
        write_report_files(report, files, write_geometry)

    def _measure(self) -> GeometryReport:
        from holdfast.auditing import GeometrySettings, measure_geometry
        from holdfast.auditing.run import is_rerouted
        from holdfast.checked import from_mapping
        from holdfast.hub.layers import moe_layers
        from holdfast.routing.presets import resolve_layers

        other = None if self.what_if == NO_ROUTER else self.what_if or DEFAULT_ROUTER
        names = ("noise", "drift", "walks", "walking", "pictures", "seed", "batch", "length", "tokens")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        from_mapping(GeometrySettings, settings)  # a mistake must not cost the time to load a model
        if other is not None:
            resolve_layers(other, native=True)
        model, material = self.read_model(self.model)
        if self.what_if is None and is_rerouted(moe_layers(model)):
            print(f"{self.model} is rerouted, so it is not compared with {other}.")
            other = None
        given = {**settings, "tokenizer": material.tokenizer, "name": self.model}
        report = measure_geometry(model, material, what_if=other, **given)
        return replace(report, data=replace(report.data, source=material.source))


def print_geometry(report: GeometryReport) -> None:
    """Print the main numbers of each layer, why layers were refused, the largest jumps and the what-if."""
    from holdfast.report.geometry_page import layers_table, what_if_table
    from holdfast.report.page_shell import number, short_share
    from holdfast.report.tables import Table

    if report.layers:
        print(f"{report.model.name}: {report.data.tokens} tokens")
        show(layers_table(report).without("tokens", "extra experts, law"))
    jumps = [(layer.layer, jump) for layer in report.layers for jump in layer.jumps.largest if jump.text is not None]
    jumps.sort(key=lambda each: -(each[1].size or 0))
    rows = []
    for place, jump in jumps[:SHOWN_JUMPS]:
        other = {} if report.what_if is None else {f"with {report.what_if.router}": short_share(jump.size_with_what_if)}
        numbers = {"jump": short_share(jump.size), **other, "distance": number(jump.distance)}
        rows.append(token_row(jump, place, numbers))
    if rows:
        show(Table.of("Largest jumps", rows))
    for layer in report.refused:
        print(f"layer {layer.layer} is not measured: {layer.reason}")
    if report.layers and report.what_if is not None:
        show(what_if_table(report))
    if report.status == "interrupted":
        print(f"Interrupted: these are the results of the {report.data.batches} finished batches.")
