"""`holdfast geometry`: measure how near a saved model's tokens are to the discontinuities of its routers, and draw them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, bar, plain_text, require_free, show, slim_table

if TYPE_CHECKING:
    from holdfast.auditing import GeometryReport

NAME = "geometry.json"
NO_ROUTER = "none"  # --what-if: measure the model's own router only
DEFAULT_ROUTER = "smooth"
NEAR = 0.01  # of a token's norm: the distance in the table
SHOWN_JUMPS = 5


@dataclass(frozen=True)
class Geometry:
    """Measure the geometry of a model's routing: how near its tokens are to ties of experts, when noise takes them there,
    how far the output jumps, and what another router changes about it. Draw slices through the space of tokens.

    Examples: `holdfast geometry comparison/cells/smoe-seed0 --out geometry`,
    `holdfast geometry path/to/olmoe --text my.txt --tokens 2000`,
    `holdfast geometry path/to/olmoe --noise 0.01 --what-if none`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    source: Annotated[str | None, arg(aliases=["--text"])] = None
    """Use this text or image set instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    class_index: Path | None = None
    """For folders of images that are named by WordNet id, if the model's classes have names: ImageNet's folder of class
    folders, LOC_synset_mapping.txt or imagenet_class_index.json."""
    tokens: int = 4096
    """How many tokens of the text to read, rounded to whole batches."""
    length: int = 128
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per batch."""
    noise: float = 0.05
    """Noise that a random walk has added at time 1, as a share of each token's norm."""
    walks: int = 4
    """Random walks of each token."""
    walking: int = 512
    """Tokens of each layer that walk."""
    pictures: int = 8
    """Layers with pictures at most, evenly spaced."""
    seed: int = 0
    """Seed of all random numbers."""
    what_if: str | None = None
    """Compare with this router on the same weights, without training; none: no other router. By default smooth, or none if
    the model is rerouted already. The model is not changed."""
    out: Path | None = None
    """Write geometry.json and geometry.html to this folder."""
    force: bool = False
    """Overwrite these files if they exist."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.report import write_geometry

        self.plugins.load()
        target = None if self.out is None else self.out / NAME
        page = None if target is None else target.with_suffix(".html")
        for file in (target, page):
            require_free(file, self.force)
        report = self._measure()
        print_geometry(report)
        if target is not None and page is not None:
            print(f"All numbers: {report.save(target)}")
            print(f"Report: {write_geometry(target, page, force=True)}")
        if report.status == "interrupted":
            raise KeyboardInterrupt

    def _measure(self) -> GeometryReport:
        from holdfast.auditing import measure_geometry
        from holdfast.auditing.geometry_run import GeometrySettings
        from holdfast.auditing.run import is_rerouted
        from holdfast.hub.layers import moe_layers
        from holdfast.hub.tracing import require_positions
        from holdfast.routing.layer_names import resolve_layers
        from holdfast.train.saved_model import AuditData, load_model_and_task
        from holdfast.train.training import quiet

        other = None if self.what_if == NO_ROUTER else self.what_if or DEFAULT_ROUTER
        names = ("noise", "walks", "walking", "pictures", "seed", "batch", "length", "tokens")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        GeometrySettings(what_if=other, **settings)  # a mistake must not cost the time to load a model
        if other is not None:
            resolve_layers(other, native=True)
        quiet()
        where: dict[str, Any] = {"source": self.source, "data": self.data, "class_index": self.class_index}
        model, task = load_model_and_task(self.model, **where, loading=self.loading.options())
        if self.what_if is None and is_rerouted(moe_layers(model)):
            print(f"{self.model} is rerouted, so it is not compared with {other}.")
            other = None
        material = AuditData(task, self.tokens)
        if material.tokenizer is not None:
            require_positions(model, self.length)
        total = self.tokens if material.tokenizer is not None else None
        with bar(total, leave=False) as tell:
            report = measure_geometry(
                model,
                material,
                tokenizer=material.tokenizer,
                what_if=other,
                name=self.model,
                progress=lambda done, what: tell(done, f"{self.model}: {what}"),
                **settings,
            )
        return replace(report, data={**report.data, "source": material.source})


def print_geometry(report: GeometryReport) -> None:
    """Print the main numbers of each layer, why layers were skipped, the largest jumps and the what-if."""
    other = None if report.what_if is None else report.what_if["router"]
    if report.measured:
        _print_layers(report, other)
        _print_jumps(report, other)
    for layer in report.layers:
        if layer["skipped"] is not None:
            print(f"layer {layer['layer']} is not measured: {layer['skipped']}")
    if report.what_if is not None and report.measured:
        shown = slim_table(f"With {other} instead, untrained", "", "unchanged", f"with {other}")
        for name, pair in {**report.what_if["cost"], "mean jump": report.what_if["jump"]}.items():
            shown.add_row(name.replace("_", " "), _number(pair["before"]), _number(pair["after"]))
        show(shown)
    if report.status == "interrupted":
        print(f"Interrupted: these are the results of the {report.data['batches']} finished batches.")


def _print_layers(report: GeometryReport, other: str | None) -> None:
    orders = [order["order"] for order in report.measured[0]["ties"]["orders"]]
    columns = ["layer", "experts", *(f"order {order}" for order in orders), "median", "flipped", "jump"]
    columns += [] if other is None else [f"jump, {other}", f"extra, {other}"]
    shown = slim_table(
        f"{report.model['name']}: {report.data['tokens']} tokens",
        *columns,
        caption=f"order m: share of tokens within {NEAR:g} of their norm of a tie of m + 1 experts. median: distance to "
        "order 1. flipped: share of random walks that reach a tie before they have added noise of "
        f"{report.settings['noise']:g} of the norm. jump: of the layer's output at the nearest tie, mean share of its norm. "
        "extra: share of tokens with more than k experts.",
    )
    for layer in report.measured:
        ties, jumps = layer["ties"], layer["jumps"]["routers"]
        place = min(range(len(ties["widths"])), key=lambda each: abs(ties["widths"][each] / NEAR - 1))
        hits = layer["hitting"]
        before = (
            None
            if hits is None
            else hits["simulated"][min(range(len(hits["times"])), key=lambda n: abs(hits["times"][n] - 1))]
        )
        row = [
            str(layer["layer"]),
            f"{layer['k']} of {layer['experts']}",
            *(_share(each["shares"][place]) for each in ties["orders"]),
        ]
        row += [_number(ties["orders"][0]["median"]), _share(before), _share(jumps[0]["mean"])]
        if other is not None:
            extra = layer.get("what_if")
            row += [
                _share(jumps[1]["mean"] if len(jumps) > 1 else None),
                _share(None if extra is None else extra["extra"][0]),
            ]
        shown.add_row(*row)
    show(shown)


def _print_jumps(report: GeometryReport, other: str | None) -> None:
    found = [(layer["layer"], jump) for layer in report.measured for jump in layer["jumps"]["largest"]]
    found = sorted((each for each in found if each[1]["text"] is not None), key=lambda each: -(each[1]["size"] or 0))
    if not found:
        return
    columns = ["token", "in", "layer", "jump", *([] if other is None else [f"with {other}"]), "distance", "from", "to"]
    shown = slim_table("Largest jumps", *columns)
    for layer, jump in found[:SHOWN_JUMPS]:
        # As Python writes strings, and not as markup: a text may contain anything.
        cells = [repr(jump["text"]), repr(jump["context"]), layer, _share(jump["size"])]
        cells += [] if other is None else [_share(jump["size_with_what_if"])]
        shown.add_row(*map(plain_text, [*cells, _number(jump["distance"]), jump["leaves"], jump["enters"]]))
    show(shown)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
