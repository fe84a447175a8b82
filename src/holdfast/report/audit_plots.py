"""The plots of an audit as plain data for plotly, as in `holdfast.report.plots`."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from holdfast.report.audits import Audit, Radii, Skipped
from holdfast.report.traces import (
    ALL_LAYERS,
    Plot,
    Trace,
    curve_of,
    every,
    folded,
    height,
    label,
    layer_axis,
    names_axis,
    trace,
)

DECADES = (-5, 0)  # of the shares that change: from what stands for 0 to all
LEAST = -4.5  # the logarithm that the smallest change above 0 is drawn with
MOST_GAPS = 32  # cells in a row with a pixel between them; with more there would be little else on a phone
LOW = 1e-3  # a relative radius that nobody would notice


def audit_plots(audit: Audit) -> list[Plot]:
    """Those that have something to show."""
    return [plot for plot in (make(audit) for make in (flips, radii, undecided, load)) if plot.data]


def flips(audit: Audit) -> Plot:
    layers = [layer.layer for layer in audit.layers]
    names, shares, texts = [], [], []
    for name, (one, _) in audit.ran.items():
        found = {layer.layer: layer.flips for layer in one.layers}
        names.append(folded(name))
        shares.append([_logarithm(found.get(layer)) for layer in layers])
        texts.append([f"{label(name)}, layer {layer}: {_percent(found.get(layer))}" for layer in layers])
    ticks = list(range(DECADES[0], DECADES[1] + 1))
    bar = {
        "tickvals": ticks,
        "ticktext": ["0", *(f"{100 * 10.0**decade:g}" for decade in ticks[1:])],
        **_bar("% of the tokens"),
    }
    data = [_heat(layers, names, shares, texts, zmin=DECADES[0], zmax=DECADES[1], colorbar=bar)] if names else []
    layout = {"xaxis": _cells(layers, "layer"), "yaxis": names_axis(), "height": 90 + height(data)}
    caption = (
        "The share of tokens whose set of experts changes, by perturbation and layer, on a logarithmic scale. "
        "What has no effect on a token should be at 0 in every layer; a gap is a layer without such tokens."
    )
    return Plot("flips", "What changes, layer by layer", caption, data, layout)


def radii(audit: Audit) -> Plot:
    """Bars over the logarithms of the radii. What is below all edges, and above, stands beside them in bins of their own."""
    known = {str(layer.layer): layer.radius for layer in audit.layers if isinstance(layer.radius, Radii)}
    data: list[Trace] = []
    if known:
        edges = [math.log10(edge) for edge in next(iter(known.values())).edges]
        edges = [2 * edges[0] - edges[1], *edges, 2 * edges[-1] - edges[-2]]
        together = [sum(same) for same in zip(*(found.counts for found in known.values()), strict=True)]
        for layer, counts in [(ALL_LAYERS, together), *((layer, found.counts) for layer, found in known.items())]:
            data.append(_histogram(layer, edges, counts))
        decades = range(math.ceil(edges[1] - 1e-9), math.floor(edges[-2] + 1e-9) + 1)
    ticks = {"tickvals": list(decades), "ticktext": [f"10<sup>{decade}</sup>" for decade in decades]} if known else {}
    layout = {
        "xaxis": {"title": {"text": "relative radius"}, "zeroline": False, **ticks},
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
        "bargap": 0,
        "shapes": [
            {"type": "line", "x0": math.log10(LOW), "x1": math.log10(LOW), "yref": "paper", "y0": 0, "y1": 1,
             "line": {"dash": "dot"}}
        ],
    }  # fmt: skip
    kinds = " and ".join(sorted({found.kind for found in known.values()}))
    caption = (
        "How far a router's input may move, in shares of its length, before its token can change experts "
        f"({label(kinds)} certificates). Left of the dotted line, at {LOW:g}, nobody would notice the change. "
        "The outermost bars hold everything beyond."
    )
    return Plot("radii", "Certified radii", caption, data, layout)


def undecided(audit: Audit) -> Plot:
    found: dict[str, list[tuple[int, float]]] = {}
    for layer in audit.layers:
        if not isinstance(layer.undecided, Skipped):
            for name, one in layer.undecided.items():
                found.setdefault(name, []).append((layer.layer, 100 * one.share))
    data = []
    for place, (name, shares) in enumerate(found.items()):
        hover = f"{label(name)}, layer %{{x}}: %{{y:.3g}}% of the tokens<extra></extra>"
        x, y = [layer for layer, _ in shares], [share for _, share in shares]
        data.append(curve_of(place, None, x, y, hover, name=label(name)))
    layout = {
        "xaxis": layer_axis(1 + max(layer.layer for layer in audit.layers)),
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = "The share of tokens that rounding to a dtype, of a router's input and weights, may send to other experts."
    return Plot("undecided", "Undecided tokens", caption, data, layout)


def load(audit: Audit) -> Plot:
    layers = [str(layer.layer) for layer in audit.layers]
    most = max(len(layer.load.percent) for layer in audit.layers)
    rows, texts = [], []
    for layer in audit.layers:
        even = statistics.fmean(layer.load.percent)
        row = [percent / even if even else 0.0 for percent in layer.load.percent]
        said = [f"layer {layer.layer}, expert {place}: {value:.2f} times the even load" for place, value in enumerate(row)]
        rows.append([*row, *[None] * (most - len(row))])
        texts.append([*said, *[""] * (most - len(row))])
    highest = max(value for row in rows for value in row if value is not None)
    experts = list(range(most))
    data = [_heat(experts, layers, rows, texts, zmin=0, zmax=max(2.0, highest), colorbar=_bar("load / even load"))]
    tall = max(320, min(900, 150 + 18 * len(layers)))
    layout = {
        "xaxis": _cells(experts, "expert"),
        "yaxis": {**names_axis(), "title": {"text": "layer"}},
        "height": tall,
    }
    caption = (
        "How many tokens chose each expert, over what it would be if all of its layer were chosen equally often (1); "
        "0 is a dead expert."
    )
    return Plot("load", "Load per expert", caption, data, layout)


def _histogram(layer: str, edges: Sequence[float], counts: Sequence[int]) -> Trace:
    total = sum(counts) or 1
    shares = [100 * count / total for count in counts]
    centres = [(low + high) / 2 for low, high in pairwise(edges)]
    widths = [high - low for low, high in pairwise(edges)]
    texts = [f"{said}: {share:.3g}% of the tokens" for said, share in zip(_bins(edges), shares, strict=True)]
    hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    return trace(0, centres, shares, layer=layer, type="bar", width=widths, **hover)


def _bins(edges: Sequence[float]) -> Iterator[str]:
    """In words. The outermost edges are only drawn."""
    values = [f"{10**edge:.2g}" for edge in edges]
    yield f"below {values[1]}"
    for low, high in pairwise(values[1:-1]):
        yield f"{low} to {high}"
    yield f"above {values[-2]}"


def _heat(x: Sequence[Any], y: Sequence[Any], z: list[Any], texts: list[list[str]], **style: Any) -> Trace:
    hover = {"text": texts, "hovertemplate": "%{text}<extra></extra>", "hoverongaps": False}
    gaps = {"xgap": int(len(x) <= MOST_GAPS), "ygap": int(len(y) <= MOST_GAPS)}
    return {"type": "heatmap", "meta": {}, "x": list(x), "y": list(y), "z": z, **gaps, **hover, **style}


def _bar(title: str) -> dict[str, Any]:
    """A colour scale above the plot: beside it, a phone would have no room."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 1}
    return {**place, "thickness": 10, "outlinewidth": 0, "tickangle": 0, "title": {"text": title, "side": "top"}}


def _cells(numbers: Sequence[int], title: str) -> dict[str, Any]:
    """The title begins with an empty line, or plotly sets it between two numbers where they are far apart."""
    ticks = {"tick0": 0, "dtick": every(len(numbers))}
    return {"title": {"text": f"<br>{title}"}, **ticks, "zeroline": False, "showgrid": False}


def _logarithm(share: float | None) -> float | None:
    if share is None:
        return None
    return max(LEAST, math.log10(share)) if share > 0 else float(DECADES[0])


def _percent(share: float | None) -> str:
    return "nothing to compare" if share is None else f"{100 * share:.3g}%"
