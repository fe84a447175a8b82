"""Plots of slices through token space: cells in the colour of their selected set, order-1 lines and order-2 points.

The page's script colours cells by the theme: a trace's `meta` has "fill": "cells" with the colour of each set and its name
for the hover text, or "fill": "strip" for experts beyond k. Lines and marks with "ink" are in the colour of text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.auditing.reports import Slice
from holdfast.report.page_shell import visible_lines
from holdfast.report.plot_data import LEGEND, Plot, Trace, axis, escaped, trace

COLOURS = 8  # of cells in each theme
SMALLEST = 0.012  # share of the picture that a cell needs to have its name written on it
LONGEST_NAME = 24  # characters of a token's text
MOST_NAMED = 6  # experts of a set that are written on a cell
MOST_EXTRA = 3  # experts beyond k that have a shade of their own


def cells_caption(slices: Sequence[tuple[str | None, Slice]], panel: int = 0) -> str:
    """Return a sentence that says what is seen: hard boundaries, or strips in which experts fade in and out."""
    if any(panel < len(found.extra) and found.extra[panel] is not None for _, found in slices):
        return (
            "Inputs in one cell have the same k best experts, whose numbers are in it; in the shaded strips the router runs "
            "more experts and fades them in and out, so that the output does not jump."
        )
    return "Inputs in one cell use the same experts, whose numbers are in it; the layer's output jumps from cell to cell."


def slice_plot(name: str, slices: Sequence[tuple[str | None, Slice]], panel: int, title: str, caption: str) -> Plot:
    """Draw a slice for each layer, as routed by the model (panel 0) or the what-if (1); layer None: shown for all layers."""
    data = [part for layer, found in slices if panel < len(found.extra) for part in _traces(found, panel, layer)]
    plain = {"zeroline": False, "showgrid": False, "constrain": "domain", "nticks": 6}
    x, y = axis("shares of the token's norm", **plain), {**plain, "scaleanchor": "x"}
    return Plot(name, title, caption, data, {"xaxis": x, "yaxis": y, "height": 470, "legend": LEGEND})


def _traces(found: Slice, panel: int, layer: str | None) -> list[Trace]:
    size = len(found.cells)
    grids = (found.cells, *(grid for grid in found.extra if grid is not None))
    if any(len(grid) != size or any(len(row) != size for row in grid) for grid in grids):
        raise ValueError("the grids of a slice are not square, or differ in size")
    steps = [(high - low) / size for low, high in zip(found.low, found.high, strict=True)]
    grid = {"x0": found.low[0] + steps[0] / 2, "dx": steps[0], "y0": found.low[1] + steps[1] / 2, "dy": steps[1]}
    own = {} if layer is None else {"layer": layer}
    names = [set_name(experts) for experts in found.sets]
    cells = {"fill": "cells", "colours": cell_colours(found.cells, len(found.sets)), "names": names, **own}
    traces: list[Trace] = [
        {"type": "heatmap", "meta": cells, "z": found.cells, **grid, "showscale": False, "zsmooth": False}
    ]
    extra = found.extra[panel]
    if extra is not None:
        shown = [[min(count, MOST_EXTRA) or None for count in row] for row in extra]
        look = {"showscale": False, "hoverinfo": "skip", "hoverongaps": False, "zmin": 0, "zmax": MOST_EXTRA}
        traces.append({"type": "heatmap", "meta": {"fill": "strip", **own}, "z": shown, **grid, **look})
        for count in range(1, 1 + max(count or 0 for row in shown for count in row)):
            more = " or more" if count == MOST_EXTRA else ""
            mark = {"size": 12, "symbol": "square"}
            key = inked([None], [None], layer, "strip", mode="markers", marker=mark, name=f"+{count}{more} experts")
            key["meta"]["share"] = count / MOST_EXTRA
            traces.append(key)
    dash = "solid" if extra is None else "dot"
    across: list[float | None] = []  # all lines as one curve with gaps
    up: list[float | None] = []
    texts: list[str | None] = []
    for x0, y0, x1, y1, one, two in found.lines:
        across += [x0, (x0 + x1) / 2, x1, None]
        up += [y0, (y0 + y1) / 2, y1, None]
        texts += [f"experts {one} and {two} tie"] * 3 + [None]
    name = "2 experts tie (order 1)"
    traces.append(inked(across, up, layer, "line", mode="lines", line={"width": 1.6, "dash": dash}, name=name, text=texts))
    if found.points:
        x, y = [point[0] for point in found.points], [point[1] for point in found.points]
        tied = [f"experts {set_name(point[2:])} tie" for point in found.points]
        mark = {"size": 9, "symbol": "circle", "line": {"width": 2}}
        traces.append(inked(x, y, layer, "ring", mode="markers", marker=mark, name="3 tie (order 2)", text=tied))
    x, y, names = _centres(found)
    traces.append(inked(x, y, layer, "line", mode="text", text=names, hoverinfo="skip", textfont={"size": 12}))
    x, y = [mark.x for mark in found.tokens], [mark.y for mark in found.tokens]
    said = [token_name(mark.text) for mark in found.tokens]
    look = {"marker": {"size": 10, "symbol": "diamond"}, "textfont": {"size": 13}, "textposition": "top center"}
    traces.append(inked(x, y, layer, "full", mode="markers+text", name="tokens", text=said, **look))
    return traces


def inked(x: Sequence[Any], y: Sequence[Any], layer: str | None, ink: str, **style: Any) -> Trace:
    """Return a trace in the colour of text, or of the strip."""
    hover = {} if "hoverinfo" in style else {"hovertemplate": "%{text}<extra></extra>"}
    made = trace(0, x, y, layer=layer, **hover, **style)
    return {**made, "meta": {**made["meta"], "ink": ink}}


def _centres(found: Slice) -> tuple[list[float], list[float], list[str]]:
    """Return the middle of each large cell, which is convex, and its name."""
    cells, width = np.array(found.cells), found.high[0] - found.low[0]
    x, y, names = [], [], []
    for number, experts in enumerate(found.sets):
        rows, columns = (cells == number).nonzero()
        if len(rows) >= SMALLEST * cells.size:
            shares = ((float(each.mean()) + 0.5) / len(cells) for each in (columns, rows))
            place = [low + width * share for low, share in zip(found.low, shares, strict=True)]
            # The name of a token is above its mark: keep the name of the cell clear of both.
            near = any(
                abs(mark.x - place[0]) < 0.12 * width and -0.06 < (mark.y - place[1]) / width < 0.06 for mark in found.tokens
            )
            x.append(place[0])
            y.append(place[1] - (0.1 * width if near else 0.0))
            names.append(set_name(experts))
    return x, y, names


def set_name(experts: Sequence[float]) -> str:
    """Return a set of experts as text, {3, 7}; a large set is cut."""
    shown = ", ".join(map(str, experts[:MOST_NAMED]))
    return f"{{{shown}, …}}" if len(experts) > MOST_NAMED else f"{{{shown}}}"


def token_name(text: str | None) -> str:
    """Return a token's text for a plot: escaped, on one line, not long; a word for one without text."""
    if text is None:
        return "token"
    shown = visible_lines(text)
    cut = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}…"
    return f"“{escaped(cut)}”"


def cell_colours(cells: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return a colour for each cell, so that neighbours differ: largest cells first, the first colour that is free.

    With more neighbours than colours, two cells may share one; the line between them still shows.
    """
    grid = np.array(cells)
    sides = (
        (grid[:, :-1], grid[:, 1:]),
        (grid[:-1], grid[1:]),
        (grid[:-1, :-1], grid[1:, 1:]),
        (grid[:-1, 1:], grid[1:, :-1]),
    )
    near = np.zeros((count, count), dtype=bool)
    for one, two in sides:
        near[one, two] = near[two, one] = True
    colours = np.full(count, -1)
    for cell in np.argsort(-np.bincount(grid.ravel(), minlength=count), kind="stable"):
        taken = set(colours[near[cell]]) - {-1}
        colours[cell] = next((colour for colour in range(COLOURS) if colour not in taken), cell % COLOURS)
    return [int(colour) for colour in colours]
