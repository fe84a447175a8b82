"""What all plots are made of: traces as plain data for plotly, marks, labels and axes.

A trace's `meta` says which router it belongs to, by place among the rows, and where needed which layer; the page's script
shows and hides by these.
"""

import html
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.report.results import Cell, Layer

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "triangle-down", "cross", "x", "star")  # plotly's names
DASHES = ("solid", "dash", "dot", "dashdot")
WIDTH = 22  # of names on an axis, in characters
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
        """Whether it shows one layer at a time."""
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
    """A layer's mean over seeds, with a bar from the lowest seed to the highest."""
    means = [statistics.fmean(values) for _, values in found]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - mean for (_, values), mean in zip(found, means, strict=True)],
        "arrayminus": [mean - min(values) for (_, values), mean in zip(found, means, strict=True)],
        "thickness": 1.5,
        "width": 3,
    }
    # side by side, or the bars of the routers hide each other
    x = [layer + 0.06 * (router - (routers - 1) / 2) for layer, _ in found]
    return curve_of(router, None, x, means, hover, error_y=bars)


def layer_axis(layers: int) -> dict[str, Any]:
    return {"title": {"text": "layer"}, "tick0": 0, "dtick": every(layers), "zeroline": False}


def every(count: int) -> int:
    """Ticks on whole numbers, about ten of them at most."""
    return max(1, math.ceil(count / 10))


def symbol(router: int) -> str:
    return SYMBOLS[router % len(SYMBOLS)]


def dash(router: int) -> str:
    return DASHES[router // len(SYMBOLS) % len(DASHES)]


def label(name: str) -> str:
    """A name as it is: plotly reads tags in its texts, and fields in braces in its templates."""
    return html.escape(name, quote=False).replace("%", "&#37;")


def folded(name: str) -> str:
    """A label in lines of at most WIDTH, broken between words where it can be: on a phone long names leave no room."""
    lines = [""]
    for word in re.findall(rf"[^+, ]{{1,{WIDTH - 2}}}[+, ]{{0,2}}|[+, ]", name):
        if len(lines[-1]) + len(word.rstrip()) > WIDTH:
            lines.append("")
        lines[-1] += word
    return "<br>".join(map(label, lines))


def height(data: Sequence[Trace]) -> int:
    """For names on the y axis, with room for those of several lines."""
    names = {name for trace in data for name in trace["y"]}
    return 100 + sum(22 + 16 * (1 + name.count("<br>")) for name in names)


def names_axis() -> dict[str, Any]:
    return {"type": "category", "automargin": True, "ticksuffix": " "}


def by_layer(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Layer]]]:
    """The routing on the clean data of all seeds: first of all layers together, then of each."""
    found: dict[int, list[Layer]] = {}
    for layer in (layer for cell in cells for layer in cell.clean.routing.layers):
        found.setdefault(layer.layer, []).append(layer)
    if found:
        yield ALL_LAYERS, [layer for same in found.values() for layer in same]
    for place, same in sorted(found.items()):
        yield str(place), same


def mean_of(values: Iterable[Any], read: Callable[[Any], float | None]) -> float | None:
    """Over those that have one."""
    numbers = [number for number in map(read, values) if number is not None]
    return statistics.fmean(numbers) if numbers else None
