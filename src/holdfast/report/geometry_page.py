"""The HTML page of a geometry report, and its tables for page and terminal: slices, ties, hitting times and jumps.

Plots are data for plotly, as in `holdfast.report.plots`. All of them show one layer at a time.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.auditing import GeometryReport
from holdfast.auditing.reports import (
    Clusters,
    Entropies,
    GraphPrecision,
    Jump,
    MeasuredLayer,
    Pictures,
    Slopes,
    Theory,
)
from holdfast.report.export import Page
from holdfast.report.first_screen import Tile, price
from holdfast.report.page_shell import (
    before_and_after,
    how_it_was_run,
    number,
    percent,
    short_share,
    visible_lines,
    write_report_page,
)
from holdfast.report.plot_data import (
    LEGEND,
    LOGARITHMIC,
    SYMBOLS,
    Plot,
    Trace,
    axis,
    curve_of,
    escaped,
    line_at,
    line_of,
    shares_axis,
    trace,
)
from holdfast.report.slice_plots import cells_caption, inked, slice_plot, token_name
from holdfast.report.tables import BEFORE_AND_AFTER, Table

OWN = "the model's own router"
NEAR = 0.01  # of a token's norm: the distance that sentences are about
LEAST = 1e-6  # shares below it are not drawn on a logarithmic axis
MOST_NAMED = 16  # experts in the legend of the t-SNE


def write_geometry(report: GeometryReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a report, given as such, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(GeometryReport, report, path, force=force)


def geometry_page(report: GeometryReport) -> Page:
    """Return the page as data, to be rendered or exported."""
    slices, curves = slice_plots(report), curve_plots(report)
    layers = [str(layer.layer) for layer in report.layers]
    with_pictures = [layer for layer, _ in pictured(report)]
    first = next(iter([*with_pictures, *layers]), "all")
    return Page(
        "geometry.html",
        [*slices, *curves],
        {"layer": first},
        brief=layers_table(report),
        sentences=[verdict(report)],
        title=report.model.name,
        slices=slices,
        curves=curves,
        layers=layers,
        first=first,
        pictured=with_pictures,
        table=layers_table(report),
        refused=Table.of(
            "Layers without a known geometry",
            [{"layer": layer.layer, "router": layer.router, "why": layer.reason} for layer in report.refused],
        ),
        tiles=what_if_tiles(report),
        what_if=what_if_table(report).title,
        jumps=[jump_row(layer, jump, report) for layer in report.layers for jump in layer.jumps.largest],
        theory={str(layer.layer): theory_table(layer.layer, layer.theory) for layer in report.layers if layer.theory},
        how=how_it_was_run(report),
        exported=(what_if_table(report), what_if_tiles(report), jumps_table(report)),
    )


def verdict(report: GeometryReport) -> str:
    """Return the main numbers as sentences."""
    parts = [] if report.status == "complete" else ["Interrupted: this page covers the finished batches."]
    if not report.layers:
        return " ".join([*parts, "No layer of this model has a known geometry; the reasons are below."])
    nearest = max(report.layers, key=lambda layer: within(layer, 1))
    parts.append(
        f"In layer {nearest.layer}, {short_share(within(nearest, 1))} of the tokens lie within {NEAR:.0%} of their norm of "
        "a place where their experts change."
    )
    jump = statistics.fmean(layer.jumps.routers[0].mean or 0.0 for layer in report.layers)
    if jump > 0:
        said = f"At a token's nearest such place, the output of a layer jumps by {short_share(jump)} of its norm on average"
        if report.what_if is not None and report.what_if.jump.after is not None:
            said += f"; with {report.what_if.router}, on the same weights, by {short_share(report.what_if.jump.after)}"
            if used := report.what_if.cost.get("experts_per_token"):
                said += f", with {number(used.after)} experts per token instead of {number(used.before)}"
        parts.append(f"{said}.")
    return " ".join(parts)


def within(layer: MeasuredLayer, order: int) -> float:
    """Return the share of a layer's tokens within about `NEAR` of order `order`, at the nearest stored width."""
    place = _nearest(layer.ties.widths, NEAR)
    return next((found.shares[place] for found in layer.ties.orders if found.order == order), 0.0)


def _nearest(values: Sequence[float], wanted: float) -> int:
    return min(range(len(values)), key=lambda place: abs(values[place] / wanted - 1))


def slice_plots(report: GeometryReport) -> list[Plot]:
    """Return the slices that there are: near a boundary and through three tokens, for one or two routers."""
    plots, around = [], "one token of the text and through its nearest points on two boundaries"
    for kind, title, what in (
        ("boundaries", "A token and its two nearest boundaries", around),
        ("tokens", "Three tokens of the text", "three tokens of the text"),
    ):
        slices = [(layer, found) for layer, drawn in pictured(report) for found in drawn.slices if found.kind == kind]
        for panel, router in enumerate(routers_of(report)):
            said = f"The same plane with {router}." if panel else f"A plane through {what}."
            said = f"{said} {cells_caption(slices, panel)}"
            plots.append(slice_plot(f"slice-{kind}-{panel}", slices, panel, f"{title}: {router}", said))
    return [plot for plot in plots if plot.data]


def curve_plots(report: GeometryReport) -> list[Plot]:
    """Return the curves that have data."""
    drawn = (draw(report) for draw in (along_normal, largest_difference, ties, hitting, tsne))
    return [plot for plot in drawn if plot.data]


def pictured(report: GeometryReport) -> list[tuple[str, Pictures]]:
    """Return the layers that have pictures, with these."""
    return [(str(layer.layer), layer.pictures) for layer in report.layers if layer.pictures]


def routers_of(report: GeometryReport) -> list[str]:
    return [OWN] if report.what_if is None else [OWN, report.what_if.router]


def along_normal(report: GeometryReport) -> Plot:
    """Draw the layer's output on the way through the nearest boundary of a token."""
    data: list[Trace] = []
    for layer, pictures in pictured(report):
        normal = pictures.normal
        for router, (name, change) in enumerate(zip(routers_of(report), normal.change, strict=False)):
            y = [None if value is None else 100 * value for value in change]
            x: list[float | None] = list(normal.positions)
            if router == 0:  # a gap at the boundary: a line through it would look continuous
                x.insert(len(x) // 2, None)
                y.insert(len(y) // 2, None)
            hover, look = f"{escaped(name)}: %{{y:.2f}}% at %{{x:.3g}}", "solid" if router == 0 else "dash"
            data.append(line_of(router, x, y, hover, look, 2.5, layer=layer, name=escaped(name)))
        _, start = min(
            zip(normal.positions, normal.change[0], strict=True), key=lambda point: abs(point[0] + normal.distance)
        )
        y = [None if start is None else 100 * start]
        mark = {"marker": {"size": 10, "symbol": "diamond"}, "name": f"the token {token_name(pictures.token.text)}"}
        data.append(inked([-normal.distance], y, layer, "full", mode="markers", hoverinfo="skip", **mark))
    along = axis("distance from the boundary / token's norm", zeroline=False)
    output = axis("output, % of its norm", zeroline=False)
    layout = {"xaxis": along, "yaxis": output, "shapes": [line_at("x", 0)], "legend": LEGEND}
    caption = (
        "The layer's output as its input moves straight through the nearest boundary (dotted), along the direction in which "
        "the output jumps there."
    )
    return Plot("along", "Output along the normal through a boundary", caption, data, layout)


def largest_difference(report: GeometryReport) -> Plot:
    """Draw the largest difference of outputs of two points on the normal against their distance."""
    data = []
    for layer, pictures in pictured(report):
        normal = pictures.normal
        for router, (name, differences) in enumerate(zip(routers_of(report), normal.largest, strict=False)):
            hover = f"{escaped(name)}: %{{y:.3g}}% between points %{{x:.3g}} apart<extra></extra>"
            y = [None if value is None else 100 * max(value, LEAST) for value in differences]
            data.append(curve_of(router, layer, normal.steps, y, hover, name=escaped(name)))
    apart = axis("distance of the two points / token's norm", **LOGARITHMIC)
    layout = {"xaxis": apart, "yaxis": axis("difference, % of the output", **LOGARITHMIC), "legend": LEGEND}
    caption = (
        "The largest difference between the outputs of two points on that way. A continuous layer's differences go to 0 "
        "with the distance (to the left); those of a layer that jumps do not."
    )
    return Plot("difference", "Largest difference against distance", caption, data, layout)


def ties(report: GeometryReport) -> Plot:
    """Draw the share of tokens within each distance of ties of each order, beside the law of a uniform ball."""
    data: list[Trace] = []
    for layer in report.layers:
        for place, order in enumerate(layer.ties.orders):
            name = f"order {order.order}"
            y = [100 * value if value > 0 else None for value in order.shares]
            hover = f"{name}: %{{y:.3g}}% of the tokens within %{{x:.3g}}<extra></extra>"
            data.append(curve_of(place, str(layer.layer), layer.ties.widths, y, hover, name=name))
            if order.law is not None:
                law = [None if value is None or value <= LEAST else 100 * min(1.0, value) for value in order.law]
                said = f"law of order {order.order}: %{{y:.3g}}% within %{{x:.3g}}"
                data.append(line_of(place, layer.ties.widths, law, said, "dot", 1.5, layer=str(layer.layer)))
    near = axis("distance / token's norm", **LOGARITHMIC)
    layout = {"xaxis": near, "yaxis": axis("% of the tokens", **LOGARITHMIC, range=[-2, 2.1]), "legend": LEGEND}
    has_law = any(order.law is not None for layer in report.layers for order in layer.ties.orders)
    caption = (
        "How many tokens lie within a distance of a tie at the threshold: of two experts (order 1), three (order 2) or four "
        "(order 3). Order m becomes rare as the m-th power of the distance."
        + (" Dotted: the law for inputs spread evenly over a ball." if has_law else "")
    )
    if any(not layer.ties.exact for layer in report.layers):
        caption += " Some distances to order 2 or 3 are upper bounds: there were too many sets of experts to try all."
    return Plot("ties", "Tokens near ties", caption, data, layout)


def hitting(report: GeometryReport) -> Plot:
    """Draw the probability that a random walk from a token has reached a boundary, with its bounds."""
    data: list[Trace] = []
    for own, found in ((str(layer.layer), layer.hitting) for layer in report.layers):
        if found is None:
            continue
        for name, values, look in (("upper bound", found.upper, "dot"), ("lower bound", found.lower, "dash")):
            y, hover = [100 * value for value in values], f"{name}: %{{y:.3g}}% before %{{x:.3g}}"
            data.append(line_of(6, found.times, y, hover, look, 1.5, layer=own, name=name))
        error = [100 * 1.96 * (value * (1 - value) / found.tokens) ** 0.5 for value in found.simulated]
        walks = {
            "marker": {"size": 7, "symbol": "circle"},
            "name": "simulated walks",
            "hovertemplate": "simulated: %{y:.3g}% before %{x:.3g}<extra></extra>",
            "error_y": {"type": "data", "array": error, "thickness": 1.2, "width": 3},
        }
        y = [100 * value for value in found.simulated]
        data.append(trace(0, found.times, y, layer=own, mode="markers", **walks))
    layout = {"xaxis": axis("time", **LOGARITHMIC), "yaxis": shares_axis("walks"), "legend": LEGEND}
    caption = (
        "The share of random walks from tokens that have reached a boundary. At time 1 a walk has added noise of "
        f"{report.settings.noise:.3g} of the token's norm, at time 4 twice as much. Bars: 95% intervals, with one walk of "
        "each token counted."
    )
    if drift := report.settings.drift:
        caption += (
            f" Besides, a walk drifts straight towards the nearest boundary of its token, by {drift:.3g} of the norm until "
            "time 1 and four times as far until time 4."
        )
    return Plot("hitting", "When noise reaches a boundary", caption, data, layout)


def layers_table(report: GeometryReport) -> Table:
    """Return the main numbers of each layer."""
    other, rows = report.what_if and report.what_if.router, []
    drift = report.settings.drift
    moved = f", and moved by {drift:g} of it straight towards the nearest boundary" if drift else ""
    for layer in report.layers:
        own, *after = layer.jumps.routers
        extra, hitting = layer.what_if, layer.hitting
        columns = {
            "layer": layer.layer,
            "experts": f"{layer.k} of {layer.experts}",
            "tokens": f"{layer.tokens:,}",
            **{f"within 1%, order {order.order}": percent(within(layer, order.order)) for order in layer.ties.orders},
            "median distance": number(layer.ties.orders[0].median if layer.ties.orders else None),
            "flipped before time 1": percent(hitting.simulated[_nearest(hitting.times, 1.0)] if hitting else None),
            "mean jump": short_share(own.mean),
        }
        if other is not None:
            columns[f"mean jump, {other}"] = short_share(after[0].mean if after else None)
            columns[f"extra experts, {other}"] = percent(extra.extra[0] if extra else None)
            columns["extra experts, law"] = percent(extra.extra_law[0] if extra and extra.extra_law else None)
        rows.append(columns)
    note = (
        "Within 1%: the share of tokens whose distance to a tie of this order, of m + 1 experts, is at most 0.01 of their "
        "norm. Median distance: to order 1. Flipped before time 1: the share of random walks that reach a tie before they "
        f"have added noise of {report.settings.noise:g} of the norm{moved}. Mean jump: of the layer's output at the nearest "
        "tie, as a share of its norm."
    )
    if other is not None:
        note += (
            " Extra experts: the share of tokens for which the other router runs more than k experts; law: of inputs spread "
            "evenly over a large ball."
        )
    return Table.of("All layers", rows, note)


def what_if_table(report: GeometryReport) -> Table:
    """Return the cost and the jump before and after the router was replaced."""
    if report.what_if is None:
        return Table("", [], [])

    rows = [{"": tile.name, BEFORE_AND_AFTER: tile.value} for tile in what_if_tiles(report)]
    return Table.of(f"What if: the router {report.what_if.router}, without training", rows)


def what_if_tiles(report: GeometryReport) -> list[Tile]:
    """Return the jump before and after the router was replaced, and the price: experts and loss."""
    if report.what_if is None:
        return []
    moved = Tile("mean jump at the nearest boundary", before_and_after(report.what_if.jump, short_share))
    return [moved, *price(report.what_if.cost)]


def jump_row(layer: MeasuredLayer, jump: Jump, report: GeometryReport) -> dict[str, str]:
    """Return a jump with the text around its token."""
    about = (
        f"the output jumps by {short_share(jump.size)} of its norm where expert {jump.enters} replaces {jump.leaves}, "
        f"{number(jump.distance, 2)} of the token's norm away"
    )
    if report.what_if is not None and jump.size_with_what_if is not None:
        about += f"; with {report.what_if.router} by {short_share(jump.size_with_what_if)}"
    text = f"row {jump.place} of batch {jump.batch}" if jump.text is None else jump.text
    texts = {"text": text, "before": jump.before or "", "after": jump.after or ""}
    return {"layer": str(layer.layer), "about": about, **{name: visible_lines(said) for name, said in texts.items()}}


def jumps_table(report: GeometryReport) -> Table:
    """Return the largest jumps of each layer."""
    jumps = [(layer.layer, jump, jump_row(layer, jump, report)) for layer in report.layers for jump in layer.jumps.largest]
    rows = (
        {
            "token": shown["text"],
            "layer": layer,
            "jump": short_share(jump.size),
            "distance": number(jump.distance, 2),
            "text around it": f"{shown['before']} {shown['text']} {shown['after']}",
            "what happens": shown["about"],
        }
        for layer, jump, shown in jumps
    )
    return Table.of("Largest jumps", rows)


def theory_table(layer: int, theory: Theory) -> Table:
    """Return a row for each statement: what it says, and what was measured."""
    statements: dict[str, tuple[str, Callable[[Any], tuple[str, str]]]] = {
        "co_selection": ("Expert graph of a batch (Symphony, theorem 1 and appendix B.2)", _graph),
        "entropy": ("Entropy of shared gates (Mutual-Inform, proposition 1)", _entropy),
        "clusters": ("Clusters of AC (ACMoE, lemmas 1 and 2, proposition 2)", _clusters),
        "slopes": ("Slope of gate weights (survey, section 6.1)", _slopes),
    }
    rows = []
    for name, (statement, words) in statements.items():
        found = getattr(theory, name)
        said, measured = ("", theory.skipped.get(name, "")) if found is None else words(found)
        rows.append({"statement": statement, "theory": said, "measured": measured})
    return Table.of(f"The papers' other statements, beside measurement: layer {layer}", rows)


def _graph(found: GraphPrecision) -> tuple[str, str]:
    last = len(found.noise) - 1
    noise = f"noise of {found.noise[last]:g} of the norm"
    thin = ""
    if found.regularity is not None:
        thin = f" The thinnest region contains a ball of {number(found.regularity)} of its diameter."
    return (
        f"An entry of one batch is within {number(found.half_width)} of its mean, with probability {1 - found.alpha:g}; "
        f"{noise} changes the share of tokens that two experts have in common by up to {percent(found.joint_bound[last])}.",
        f"Random {noise} moves entries by {number(found.mean[last])} on average and {number(found.largest[last])} at most, "
        f"{percent(found.beyond[last])} of them by more than that width, and shares by {percent(found.joint[last])} at most."
        f"{thin}",
    )


def _entropy(found: Entropies) -> tuple[str, str]:
    return (
        f"Gates that the tokens of a sequence share by similarity have at most {number(found.bound)} nats.",
        f"{number(found.informed)} nats; {number(found.own)} nats before they are shared.",
    )


def _clusters(found: Clusters) -> tuple[str, str]:
    plain, scaled = found.plain, found.scaled
    return (
        f"With noise of {found.noise:g}, {percent(plain.predicted)} of a cluster's tokens are nearer to another mean; "
        f"{percent(scaled.predicted)} after AC scales features.",
        f"{percent(plain.measured)}, and {percent(scaled.measured)} after. Separation {number(plain.distance)} and "
        f"{number(scaled.distance)}, condition number {number(plain.condition)} and {number(scaled.condition)} (medians of "
        f"{found.clusters} clusters).",
    )


def _slopes(found: Slopes) -> tuple[str, str]:
    return (
        "Softmax: at most 0.5. Top-k: infinite at a tie. Smooth: finite everywhere.",
        f"Largest slope on the way through the nearest tie: softmax {number(found.softmax.largest)}, top-k "
        f"{'infinite' if found.top_k.largest is None else number(found.top_k.largest)} (weights jump by "
        f"{number(found.top_k.jump)}), smooth {number(found.smooth.largest)} with a strip of {found.strip:g}.",
    )


def tsne(report: GeometryReport) -> Plot:
    """Draw the t-SNE of router inputs, in the colours and marks of their first experts."""
    data: list[Trace] = []
    for layer in report.layers:
        found = layer.theory.tsne if layer.theory else None
        if found is None:
            continue
        tokens = list(zip(found.x, found.y, found.experts, strict=True))
        experts = sorted(set(found.experts), key=lambda each: (-found.experts.count(each), each))
        for expert in sorted(experts[:MOST_NAMED]) + experts[MOST_NAMED:]:
            x, y = zip(*((x, y) for x, y, own in tokens if own == expert), strict=True)
            mark = {"size": 6, "symbol": SYMBOLS[(expert + expert // len(SYMBOLS)) % len(SYMBOLS)]}
            style = {"marker": mark, "opacity": 0.8, "hovertemplate": f"expert {expert}<extra></extra>"}
            name = {"name": f"expert {expert}"} if expert in experts[:MOST_NAMED] else {}
            data.append(trace(expert, x, y, layer=str(layer.layer), mode="markers", **style, **name))
    hidden = {"showticklabels": False, "showgrid": False, "zeroline": False}
    layout = {"xaxis": axis("t-SNE", **hidden), "yaxis": hidden, "height": 420, "legend": LEGEND}
    caption = (
        "Router inputs of the first batch, drawn by t-SNE so that neighbours stay neighbours, in the colour and mark of the "
        "expert with the largest score. Distances and directions between groups mean nothing."
    )
    return Plot("tsne", "Router inputs by expert", caption, data, layout)
