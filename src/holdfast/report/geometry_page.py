"""The HTML page of a geometry report, rendered from the stored JSON alone: slices, ties, hitting times and jumps.

Plots are data for plotly, as in `holdfast.report.plots`. All of them show one layer at a time.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.report.audit_page import Table, number, share
from holdfast.report.page_shell import decimal, flattened, render_template, write_report_page
from holdfast.report.plot_data import Plot, Trace, curve_of, escaped, trace
from holdfast.report.slice_plots import cells_caption, slice_plot, slices_of, token_name
from holdfast.report.stored_geometry import Geometry, Jump, Measured
from holdfast.report.theory_table import theory_table, tsne

OWN = "the model's own router"
NEAR = 0.01  # of a token's norm: the distance that sentences are about
LEAST = 1e-6  # shares below it are not drawn on a logarithmic axis


@dataclass(frozen=True)
class JumpRow:
    """A jump with the text around its token."""

    layer: str
    text: str
    before: str
    after: str
    about: str


def write_geometry(stored: Mapping[str, Any] | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a stored report, given as data, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(Geometry, stored, path, render_geometry, force=force)


def render_geometry(stored: Mapping[str, Any]) -> str:
    """Return the page as HTML. Raise ValueError with a one-line error if the stored report is not valid."""
    geometry = Geometry.parse(stored)
    slices, curves = slice_plots(geometry), [plot for plot in curve_plots(geometry) if plot.data]
    layers = [str(layer.layer) for layer in geometry.measured]
    first = next((str(layer.layer) for layer in geometry.measured if layer.pictures), layers[0] if layers else "all")
    return render_template(
        "geometry.html",
        {"plots": {plot.name: asdict(plot) for plot in [*slices, *curves]}, "layer": first},
        title=geometry.title,
        verdict=verdict(geometry),
        slices=slices,
        curves=curves,
        layers=layers,
        first=first,
        pictured=[str(layer.layer) for layer in geometry.measured if layer.pictures],
        table=layers_table(geometry),
        refused=Table(
            [str(layer.layer) for layer in geometry.refused],
            [{"router": layer.router, "why": layer.skipped} for layer in geometry.refused],
        ),
        what_if=None if geometry.what_if is None else what_if_table(geometry),
        router=other_router(geometry),
        jumps=[jump_row(layer, jump, geometry) for layer in geometry.measured for jump in layer.jumps.largest],
        theory={str(layer.layer): theory_table(layer.theory) for layer in geometry.measured if layer.theory},
        how=how(geometry),
    )


def other_router(geometry: Geometry) -> str | None:
    return None if geometry.what_if is None else geometry.what_if.router


def verdict(geometry: Geometry) -> str:
    """Return the main numbers as sentences."""
    parts = [] if geometry.status == "complete" else ["Interrupted: this page covers the finished batches."]
    if not geometry.measured:
        return " ".join([*parts, "No layer of this model has a known geometry; the reasons are below."])
    nearest = max(geometry.measured, key=lambda layer: within(layer, 1, NEAR))
    parts.append(
        f"In layer {nearest.layer}, {share(within(nearest, 1, NEAR))} of the tokens lie within {NEAR:.0%} of their norm of "
        "a place where their experts change."
    )
    jump = statistics.fmean(layer.jumps.routers[0].mean or 0.0 for layer in geometry.measured)
    if jump > 0:
        parts.append(f"At a token's nearest such place, the output of a layer jumps by {share(jump)} of its norm on average")
        after = None if geometry.what_if is None else geometry.what_if.jump.after
        parts[-1] += "." if after is None or geometry.what_if is None else (
            f"; with {geometry.what_if.router}, on the same weights, by {share(after)}."
        )  # fmt: skip
    return " ".join(parts)


def within(layer: Measured, order: int, width: float) -> float:
    """Return the share of a layer's tokens within about `width` of order `order`, at the nearest stored width."""
    place = min(range(len(layer.ties.widths)), key=lambda each: abs(layer.ties.widths[each] / width - 1))
    return next((found.shares[place] for found in layer.ties.orders if found.order == order), 0.0)


def slice_plots(geometry: Geometry) -> list[Plot]:
    """Return the slices that there are: near a boundary and through three tokens, for one or two routers."""
    other, plots = other_router(geometry), []
    about = {
        "boundaries": (
            "A token and its two nearest boundaries",
            "A plane through one token of the text and through its nearest points on two boundaries.",
        ),
        "tokens": ("Three tokens of the text", "A plane through three tokens of the text."),
    }
    for kind, (title, what) in about.items():
        for panel in (0, 1):
            if panel == 1 and other is None:
                continue
            slices = slices_of(geometry.measured, kind)
            said = what if panel == 0 else f"The same plane with {other}."
            said = f"{said} {cells_caption(slices, panel)}"
            name = OWN if panel == 0 else str(other)
            plot = slice_plot(f"slice-{kind}-{panel}", slices, panel, f"{title}: {name}", said)
            if plot.data:
                plots.append(plot)
    return plots


def curve_plots(geometry: Geometry) -> list[Plot]:
    return [along_normal(geometry), largest_difference(geometry), ties(geometry), hitting(geometry), tsne(geometry)]


def routers_of(geometry: Geometry) -> list[str]:
    other = other_router(geometry)
    return [OWN] if other is None else [OWN, other]


def along_normal(geometry: Geometry) -> Plot:
    """Draw the layer's output on the way through the nearest boundary of a token."""
    data: list[Trace] = []
    for layer in (layer for layer in geometry.measured if layer.pictures):
        assert layer.pictures is not None
        normal = layer.pictures.normal
        for router, (name, change) in enumerate(zip(routers_of(geometry), normal.change, strict=False)):
            y = [None if value is None else 100 * value for value in change]
            x: list[float | None] = list(normal.positions)
            if router == 0:  # a gap at the boundary: a line through it would look continuous
                x, y = [*x[: len(x) // 2], None, *x[len(x) // 2 :]], [*y[: len(y) // 2], None, *y[len(y) // 2 :]]
            hover = f"{escaped(name)}: %{{y:.2f}}% at %{{x:.3g}}<extra></extra>"
            line = {"width": 2.5, "dash": "solid" if router == 0 else "dash"}
            data.append(
                trace(router, x, y, layer=str(layer.layer), mode="lines", line=line, name=escaped(name), hovertemplate=hover)
            )
        mark = {"size": 10, "symbol": "diamond"}
        at = -normal.distance
        name = token_name(layer.pictures.token.text)
        near = min(range(len(normal.positions)), key=lambda place: abs(normal.positions[place] - at))
        start = normal.change[0][near]
        token = trace(0, [at], [None if start is None else 100 * start], layer=str(layer.layer), mode="markers", marker=mark)
        data.append({**token, "name": f"the token {name}", "meta": {**token["meta"], "ink": "full"}, "hoverinfo": "skip"})
    layout = {
        "xaxis": {"title": {"text": "distance from the boundary, in shares of the token's norm"}, "zeroline": False},
        "yaxis": {"title": {"text": "output, % of its norm"}, "zeroline": False},
        "shapes": [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot"}}],
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = (
        "The layer's output as its input moves straight through the nearest boundary (dotted), along the direction in which "
        "the output jumps there."
    )
    return Plot("along", "Output along the normal through a boundary", caption, data, layout)


def largest_difference(geometry: Geometry) -> Plot:
    """Draw the largest difference of outputs of two points on the normal against their distance."""
    data = []
    for layer in (layer for layer in geometry.measured if layer.pictures):
        assert layer.pictures is not None
        normal = layer.pictures.normal
        for router, (name, differences) in enumerate(zip(routers_of(geometry), normal.largest, strict=False)):
            hover = f"{escaped(name)}: %{{y:.3g}}% between points %{{x:.3g}} apart<extra></extra>"
            y = [None if value is None else 100 * max(value, LEAST) for value in differences]
            data.append(curve_of(router, str(layer.layer), normal.steps, y, hover, name=escaped(name)))
    layout = {
        "xaxis": {"title": {"text": "distance of the two points, in shares of the token's norm"}, **logarithmic()},
        "yaxis": {"title": {"text": "difference, % of the output"}, **logarithmic()},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = (
        "The largest difference between the outputs of two points on that way. A continuous layer's differences go to 0 "
        "with the distance (to the left); those of a layer that jumps do not."
    )
    return Plot("difference", "Largest difference against distance", caption, data, layout)


def ties(geometry: Geometry) -> Plot:
    """Draw the share of tokens within each distance of ties of each order, beside the law of a uniform ball."""
    data: list[Trace] = []
    for layer in geometry.measured:
        for place, order in enumerate(layer.ties.orders):
            name = f"order {order.order}"
            y = [100 * value if value > 0 else None for value in order.shares]
            hover = f"{name}: %{{y:.3g}}% of the tokens within %{{x:.3g}}<extra></extra>"
            data.append(curve_of(place, str(layer.layer), layer.ties.widths, y, hover, name=name))
            if order.law is not None:
                law = [None if value is None or value <= LEAST else 100 * min(1.0, value) for value in order.law]
                line = {"width": 1.5, "dash": "dot"}
                said = f"law of order {order.order}: %{{y:.3g}}% within %{{x:.3g}}<extra></extra>"
                data.append(
                    trace(place, layer.ties.widths, law, layer=str(layer.layer), mode="lines", line=line, hovertemplate=said)
                )
    layout = {
        "xaxis": {"title": {"text": "distance, in shares of the token's norm"}, **logarithmic()},
        "yaxis": {"title": {"text": "% of the tokens"}, **logarithmic(), "range": [-2, 2.1]},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    has_law = any(order.law is not None for layer in geometry.measured for order in layer.ties.orders)
    caption = (
        "How many tokens lie within a distance of a tie at the threshold: of two experts (order 1), three (order 2) or four "
        "(order 3). Order m becomes rare as the m-th power of the distance."
        + (" Dotted: the law for inputs spread evenly over a ball." if has_law else "")
    )
    if any(not layer.ties.exact for layer in geometry.measured):
        caption += " Some distances to order 2 or 3 are upper bounds: there were too many sets of experts to try all."
    return Plot("ties", "Tokens near ties", caption, data, layout)


def hitting(geometry: Geometry) -> Plot:
    """Draw the probability that a random walk from a token has reached a boundary, with its bounds."""
    data: list[Trace] = []
    noise = geometry.settings.get("noise")
    for layer in (layer for layer in geometry.measured if layer.hitting):
        assert layer.hitting is not None
        found, own = layer.hitting, str(layer.layer)
        for name, values, style in (("upper bound", found.upper, "dot"), ("lower bound", found.lower, "dash")):
            y = [100 * value for value in values]
            hover = f"{name}: %{{y:.3g}}% before %{{x:.3g}}<extra></extra>"
            line = {"width": 1.5, "dash": style}
            data.append(trace(6, found.times, y, layer=own, mode="lines", line=line, name=name, hovertemplate=hover))
        y = [100 * value for value in found.simulated]
        error = [100 * 1.96 * (value * (1 - value) / found.tokens) ** 0.5 for value in found.simulated]
        hover = "simulated: %{y:.3g}% before %{x:.3g}<extra></extra>"
        marker = {"size": 7, "symbol": "circle"}
        bars = {"type": "data", "array": error, "thickness": 1.2, "width": 3}
        data.append(
            trace(
                0,
                found.times,
                y,
                layer=own,
                mode="markers",
                marker=marker,
                name="simulated walks",
                hovertemplate=hover,
                error_y=bars,
            )
        )
    layout = {
        "xaxis": {"title": {"text": "time"}, **logarithmic()},
        "yaxis": {"title": {"text": "% of the walks"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    level = f"{float(noise):.3g}" if isinstance(noise, int | float) else "the noise level"
    caption = (
        f"The share of random walks from tokens that have reached a boundary. At time 1 a walk has added noise of {level} "
        "of the token's norm, at time 4 twice as much. Bars: 95% intervals, with one walk of each token counted."
    )
    return Plot("hitting", "When noise reaches a boundary", caption, data, layout)


def logarithmic() -> dict[str, Any]:
    return {"type": "log", "exponentformat": "power", "dtick": 1}


def layers_table(geometry: Geometry) -> Table:
    """Return the main numbers of each layer."""
    rows = []
    for layer in geometry.measured:
        own, after = layer.jumps.routers[0], layer.jumps.routers[1:]
        other = other_router(geometry)
        rows.append(
            {
                "experts": f"{layer.k} of {layer.experts}",
                "tokens": f"{layer.tokens:,}",
                **{
                    f"within 1%, order {order.order}": share(within(layer, order.order, NEAR)) for order in layer.ties.orders
                },
                "median distance": number(layer.ties.orders[0].median if layer.ties.orders else None),
                "flipped before time 1": share(_before(layer, 1.0)),
                "mean jump": share(own.mean),
                **({f"mean jump, {other}": share(after[0].mean if after else None)} if other else {}),
                **({f"extra experts, {other}": share(layer.what_if.extra[0] if layer.what_if else None)} if other else {}),
                **({"extra experts, law": share(_extra_law(layer))} if other else {}),
            }
        )
    return Table([str(layer.layer) for layer in geometry.measured], rows)


def _extra_law(layer: Measured) -> float | None:
    return None if layer.what_if is None or not layer.what_if.extra_law else layer.what_if.extra_law[0]


def _before(layer: Measured, time: float) -> float | None:
    if layer.hitting is None:
        return None
    place = min(range(len(layer.hitting.times)), key=lambda each: abs(layer.hitting.times[each] / time - 1))  # type: ignore[union-attr]
    return layer.hitting.simulated[place]


def what_if_table(geometry: Geometry) -> Table:
    """Return the cost and the jump before and after the router was replaced."""
    assert geometry.what_if is not None
    pairs = {name.replace("_", " "): pair for name, pair in geometry.what_if.cost.items()}
    rows = [{"before": number(pair.before, 4), "after": number(pair.after, 4)} for pair in pairs.values()]
    jump = geometry.what_if.jump
    rows.append({"before": share(jump.before), "after": share(jump.after)})
    return Table([*pairs, "mean jump at the nearest boundary"], rows)


def jump_row(layer: Measured, jump: Jump, geometry: Geometry) -> JumpRow:
    """Return a jump with its text."""
    other = other_router(geometry)
    about = (
        f"the output jumps by {share(jump.size)} of its norm where expert {jump.enters} replaces {jump.leaves}, "
        f"{number(jump.distance, 2)} of the token's norm away"
    )
    if other is not None and jump.size_with_what_if is not None:
        about += f"; with {other} by {share(jump.size_with_what_if)}"
    text = f"row {jump.place} of batch {jump.batch}" if jump.text is None else jump.text
    return JumpRow(str(layer.layer), _lines(text), _lines(jump.before or ""), _lines(jump.after or ""), about)


def _lines(text: str) -> str:
    return "↵".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def how(geometry: Geometry) -> dict[str, dict[str, str]]:
    """Return how the report was made: model, data, settings, versions."""
    groups: dict[str, Mapping[str, Any]] = {
        "Model": geometry.model,
        "Data": geometry.data,
        "Settings": geometry.settings,
        "Versions": geometry.versions,
        "Run": {"status": geometry.status, "seconds": decimal(geometry.seconds, 1)},
    }
    return {title: dict(flattened(group)) for title, group in groups.items() if group}
