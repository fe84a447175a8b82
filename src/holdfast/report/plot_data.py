"""What all plots are made of (traces for plotly, marks, labels, axes), and the plots of attacks and of routing stability.

A trace's `meta` has the index of its router among the rows, and where needed its layer; the page's script shows and hides
traces by these. `plots` has the other plots of a comparison.
"""

import html
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.report.page_shell import decimal, listed, rise
from holdfast.report.stored_comparison import EVERYTHING, Cell, Layer, Results

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "triangle-down", "cross", "x", "star")  # plotly's names
DASHES = ("solid", "dash", "dot", "dashdot")
WIDTH = 22  # characters of a line of a name on an axis
ALL_LAYERS = "all"

Trace = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]

    @property
    def layered(self) -> bool:
        """Whether the plot shows one layer at a time."""
        return any("layer" in trace["meta"] for trace in self.data)


def trace(router: int, x: Sequence[Any], y: Sequence[Any], *, layer: str | None = None, **style: Any) -> Trace:
    meta = {"router": router} if layer is None else {"router": router, "layer": layer}
    return {"type": "scatter", "meta": meta, "x": list(x), "y": list(y), "hoverlabel": {"namelength": 0}, **style}


def curve_of(
    router: int, layer: str | None, x: Sequence[float], y: Sequence[float | None], hover: str, **style: Any
) -> Trace:
    marker = {"size": 8, "symbol": symbol(router)}
    line = {"width": 2, "dash": dash(router)}
    return trace(router, x, y, layer=layer, mode="lines+markers", marker=marker, line=line, hovertemplate=hover, **style)


def range_over_layers(router: int, routers: int, found: Sequence[tuple[int, Sequence[float]]], hover: str) -> Trace:
    """Return the curve of each layer's mean over seeds, with bars from the lowest seed to the highest."""
    means = [statistics.fmean(values) for _, values in found]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - mean for (_, values), mean in zip(found, means, strict=True)],
        "arrayminus": [mean - min(values) for (_, values), mean in zip(found, means, strict=True)],
        "thickness": 1.5,
        "width": 3,
    }
    # next to each other, or the bars of the routers would hide each other
    x = [layer + 0.06 * (router - (routers - 1) / 2) for layer, _ in found]
    return curve_of(router, None, x, means, hover, error_y=bars)


def layer_axis(layers: int) -> dict[str, Any]:
    return {"title": {"text": "layer"}, "tick0": 0, "dtick": tick_step(layers), "zeroline": False}


def tick_step(count: int) -> int:
    """Return the step between ticks on whole numbers, for about ten ticks at most."""
    return max(1, math.ceil(count / 10))


def symbol(router: int) -> str:
    return SYMBOLS[router % len(SYMBOLS)]


def dash(router: int) -> str:
    return DASHES[router // len(SYMBOLS) % len(DASHES)]


def escaped(name: str) -> str:
    """Return a name that plotly shows literally: it reads tags in its texts, and fields in braces in its templates."""
    return html.escape(name, quote=False).replace("%", "&#37;")


def wrapped_label(name: str) -> str:
    """Return an escaped name in lines of at most WIDTH, broken between words if possible, so that it fits on a phone."""
    lines = [""]
    for word in re.findall(rf"[^+, ]{{1,{WIDTH - 2}}}[+, ]{{0,2}}|[+, ]", name):
        if len(lines[-1]) + len(word.rstrip()) > WIDTH:
            lines.append("")
        lines[-1] += word
    return "<br>".join(map(escaped, lines))


def plot_height(data: Sequence[Trace]) -> int:
    """Return the height of a plot with names on its y axis, with room for names of several lines."""
    names = {name for trace in data for name in trace["y"]}
    return 100 + sum(22 + 16 * (1 + name.count("<br>")) for name in names)


def names_axis() -> dict[str, Any]:
    return {"type": "category", "automargin": True, "ticksuffix": " "}


def by_layer(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Layer]]]:
    """Yield the routing metrics of all seeds on clean data: first of all layers together, then of each layer."""
    found: dict[int, list[Layer]] = {}
    for layer in (layer for cell in cells for layer in cell.clean.routing.layers):
        found.setdefault(layer.layer, []).append(layer)
    if found:
        yield ALL_LAYERS, [layer for same in found.values() for layer in same]
    for place, same in sorted(found.items()):
        yield str(place), same


def mean_of(values: Iterable[Any], read: Callable[[Any], float | None]) -> float | None:
    """Return the mean over the values that have a number; None if none has."""
    numbers = [number for number in map(read, values) if number is not None]
    return statistics.fmean(numbers) if numbers else None


def every_attack_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router its result under every attack; yield nothing if there was no attack."""
    names = _names(results)
    for row in results.rows if names else []:
        cells = results.cells_of(row)
        columns = {}
        for name in names:
            columns[name] = decimal(mean_of(_results_of(cells, name), float), results.run.measure.digits)
            if any(trial.cost for cell in results.cells if (trial := cell.trials.get(name))):
                nats = [trial.cost.mean for cell in cells if (trial := cell.trials.get(name)) and trial.cost]
                mean = mean_of([number for number in nats if number is not None], float)
                columns[f"{name}, cost on untouched words"] = decimal(None) if mean is None else f"{rise(mean):+.2f}%"
            changed = [trial.changed for cell in cells if (trial := cell.trials.get(name)) and trial.changed is not None]
            if changed:
                columns[f"{name}, predictions changed"] = f"{100 * sum(changed) / len(changed):.2f}%"
        yield columns


def every_attack(results: Results) -> Plot:
    """Draw each router's result under every attack."""
    measure, data = results.run.measure, list[Trace]()
    for place, row in enumerate(results.rows):
        means: dict[str, float] = {}
        for name in _names(results):
            seeds = _results_of(results.cells_of(row), name)
            mean = mean_of(seeds, float)
            if mean is None:
                continue
            means[wrapped_label(name)] = mean
            small = {"size": 5, "symbol": symbol(place)}
            where = [wrapped_label(name)] * len(seeds)
            data.append(trace(place, seeds, where, mode="markers", marker=small, opacity=0.45, hoverinfo="skip"))
        if means:
            large = {"size": 11, "symbol": symbol(place), "line": {"width": 2}}
            hover = f"{escaped(row.label)}, %{{y}}: %{{x:.{measure.digits}f}}<extra></extra>"
            data.append(trace(place, [*means.values()], [*means], mode="markers", marker=large, hovertemplate=hover))
    layout = {"xaxis": {"title": {"text": escaped(measure.name)}}, "yaxis": names_axis(), "height": plot_height(data)}
    caption = f"{measure.sentence} Large marks are means over seeds, small ones single seeds."
    return Plot("every-attack", "Every attack", caption, data, layout)


def cost(results: Results) -> Plot:
    """Draw the cost of the attack on untouched words, with its interval; the plot is empty if that was not measured."""
    data = list[Trace]()
    for place, row in enumerate(results.rows):
        if row.cost is None or row.cost.mean is None:
            continue
        mean, low, high = (None if nats is None else rise(nats) for nats in (row.cost.mean, row.cost.low, row.cost.high))
        error: dict[str, Any] = {"visible": False}
        if mean is not None and low is not None and high is not None:
            error = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
        marker = {"size": 10, "symbol": symbol(place), "line": {"width": 2}}
        hover = f"{escaped(row.label)}: %{{x:+.2f}}%<extra></extra>"
        data.append(
            trace(
                place, [mean], [wrapped_label(row.label)], mode="markers", marker=marker, error_x=error, hovertemplate=hover
            )
        )
    layout = {
        "xaxis": {"title": {"text": "perplexity rise, %"}, "rangemode": "tozero"},
        "yaxis": names_axis(),
        "shapes": [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot"}}],
        "height": plot_height(data),
    }
    caption = (
        "How much the attack raises the perplexity of the untouched words, which are the same in both texts, with 95% "
        "intervals. Left of 0 the perplexity falls."
    )
    if all(row.cost is None or row.cost.over != EVERYTHING for row in results.rows):
        caption += " The intervals are for these models only."
    return Plot("cost", "Cost of the attack on untouched words", caption, data, layout)


def _names(results: Results) -> list[str]:
    """Return the names of all attacks, in the order of the stored results."""
    return list(dict.fromkeys(name for cell in results.cells for name in cell.trials))


def _results_of(cells: Sequence[Cell], name: str) -> list[float]:
    """Return the results of the seeds that have one."""
    found = [cell.trials[name].figure for cell in cells if name in cell.trials]
    return [number for number in found if number is not None]


def fluctuation(results: Results) -> Plot:
    """Draw the share of flips between snapshots of the training."""
    data: list[Trace] = []
    for place, row in enumerate(results.rows):
        for layer, changes in _changes(results.cells_of(row)).items():
            steps = sorted(changes)
            means = [statistics.fmean(changes[step]) for step in steps]
            hover = f"{escaped(row.label)}, up to step %{{x}}: %{{y:.2f}}% of the tokens<extra></extra>"
            data.append(curve_of(place, layer, steps, means, hover))
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
    }
    caption = (
        "Routing fluctuation: the share of tokens that flip between a snapshot and the one before, the mean over seeds. "
        "Lower is more stable."
    )
    return Plot("fluctuation", "Fluctuation while training", caption, data, layout)


def consistency(results: Results) -> Plot:
    """Draw the share of tokens that keep their experts under a perturbation, by layer."""
    data: list[Trace] = []
    layers = 0
    for place, row in enumerate(results.rows):
        found: dict[int, list[float]] = {}
        for cell in results.cells_of(row):
            for layer, share in enumerate(cell.consistency.layers if cell.consistency else []):
                if share is not None:
                    found.setdefault(layer, []).append(100 * share)
        if found:
            hover = f"{escaped(row.label)}, layer %{{x:.0f}}: %{{y:.2f}}% of the tokens<extra></extra>"
            data.append(range_over_layers(place, len(results.rows), sorted(found.items()), hover))
            layers = max(layers, max(found) + 1)
    layout = {"xaxis": layer_axis(layers), "yaxis": {"title": {"text": "% of the tokens"}}}
    perturbations = list(dict.fromkeys(cell.consistency.what for cell in results.cells if cell.consistency))
    caption = (
        f"The share of tokens that keep their experts under {listed(perturbations) if perturbations else 'noise'}: "
        "the mean over seeds, with bars from the lowest seed to the highest. Higher is more stable."
    )
    return Plot("consistency", "Consistency per layer", caption, data, layout)


def _changes(cells: list[Cell]) -> dict[str, dict[int, list[float]]]:
    """Return the percentage of tokens that flipped, by layer and by the step of the later snapshot."""
    found: dict[str, dict[int, list[float]]] = {ALL_LAYERS: {}}
    for snapshots in (cell.snapshots for cell in cells if cell.snapshots):
        for layer in snapshots.layers:
            for step, share in zip(snapshots.steps[1:], layer.fluctuation, strict=True):
                if share is not None:
                    for name in (ALL_LAYERS, str(layer.layer)):
                        found.setdefault(name, {}).setdefault(step, []).append(100 * share)
    return {name: changes for name, changes in found.items() if changes}
