"""What all plots are made of: traces for plotly, marks, labels, axes.

A trace's `meta` has the index of its router among the rows, and where needed its layer; the page's script shows and hides
traces by these.
"""

import html
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "triangle-down", "cross", "x", "star")  # plotly's names
MARKS = "●◆■▲▼✚✖★"  # the same as text
DASHES = ("solid", "dash", "dot", "dashdot")
WIDTH = 22  # characters of a line of a name on an axis
ALL_LAYERS = "all"
THIN = {"thickness": 1.5, "width": 3}  # bars on a curve
LOGARITHMIC = {"type": "log", "exponentformat": "power", "dtick": 1}
LEGEND = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}  # above a plot: beside it there is no room on a phone

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
    if len(x) != len(y):
        raise ValueError(f"a curve has {len(x)} places and {len(y)} values")
    meta = {"router": router} if layer is None else {"router": router, "layer": layer}
    return {"type": "scatter", "meta": meta, "x": list(x), "y": list(y), "hoverlabel": {"namelength": 0}, **style}


def error_bars(*points: tuple[float | None, float | None, float | None], scale: float = 1.0) -> dict[str, Any]:
    """Return bars from low to high of points (mean, low, high), as distances from the means; none if a number is None."""
    means, lows, highs = scale * np.array(points, dtype=float).T
    above, below = highs - means, means - lows
    if np.isnan([above, below]).any():
        return {"visible": False}
    return {"type": "data", "symmetric": False, "array": above.tolist(), "arrayminus": below.tolist()}


def curve_of(router: int, layer: str | None, x: Sequence[Any], y: Sequence[Any], hover: str, **style: Any) -> Trace:
    marker = {"size": 8, "symbol": symbol(router)}
    line = {"width": 2, "dash": dash(router)}
    return trace(router, x, y, layer=layer, mode="lines+markers", marker=marker, line=line, hovertemplate=hover, **style)


def line_of(router: int, x: Sequence[Any], y: Sequence[Any], hover: str, dash: str, width: float = 2, **style: Any) -> Trace:
    line = {"width": width, "dash": dash}
    return trace(router, x, y, mode="lines", line=line, hovertemplate=f"{hover}<extra></extra>", **style)


def styles(labels: Sequence[str]) -> list[dict[str, str]]:
    """Return how the curves of each router look, for curves that the page's script makes."""
    return [{"label": escaped(label), "symbol": symbol(at), "dash": dash(at)} for at, label in enumerate(labels)]


def range_over_layers(router: int, routers: int, found: Sequence[tuple[int, Sequence[float]]], hover: str) -> Trace:
    """Return the curve of each layer's mean over seeds, with bars from the lowest seed to the highest."""
    means = [statistics.fmean(values) for _, values in found]
    bars = error_bars(*((mean, min(values), max(values)) for mean, (_, values) in zip(means, found, strict=True))) | THIN
    return curve_of(router, None, beside((layer for layer, _ in found), router, routers), means, hover, error_y=bars)


def beside(layers: Iterable[int], place: int, count: int) -> list[float]:
    """Return places on the axis of layers, next to those of the other curves, whose bars would otherwise hide these."""
    return [layer + 0.06 * (place - (count - 1) / 2) for layer in layers]


def relative_load(percent: Sequence[float]) -> list[float]:
    """Return the load of each expert, divided by the even load."""
    even = statistics.fmean(percent) if percent else 0.0
    return [share / even if even else 0.0 for share in percent]


def line_at(axis: str, level: float) -> dict[str, Any]:
    """Return a dotted line across the plot, at a level of the axis "x" or "y"."""
    along = "y" if axis == "x" else "x"
    ends = {f"{axis}0": level, f"{axis}1": level, f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1}
    return {"type": "line", **ends, "line": {"dash": "dot"}}


def axis(title: str, **style: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **style}


def shares_axis(of: str = "tokens") -> dict[str, Any]:
    return axis(f"% of the {of}", rangemode="tozero")


def layer_axis(layers: int) -> dict[str, Any]:
    return axis("layer", tick0=0, dtick=tick_step(layers), zeroline=False)


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
