"""The HTML page of an audit, and its tables for page and terminal: verdict, tables, tokens at risk and plots.

Plots are data for plotly, as in `holdfast.report.plots`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.auditing import AuditReport, WhatIf, diagnose
from holdfast.auditing.reports import AtRisk, Pair
from holdfast.report.page_shell import (
    decimal,
    how_it_was_run,
    listed,
    number,
    percent,
    render_template,
    short_share,
    signed,
    visible_lines,
    with_text_colour,
    write_report_page,
)
from holdfast.report.plot_data import (
    ALL_LAYERS,
    LEGEND,
    Plot,
    Trace,
    axis,
    curve_of,
    escaped,
    layer_axis,
    line_at,
    names_axis,
    plot_height,
    relative_load,
    shares_axis,
    tick_step,
    trace,
    wrapped_label,
)
from holdfast.report.slice_plots import cells_caption, slice_plot
from holdfast.report.tables import Table

DECADES = (-5, 0)  # powers of ten of the shares that flip; the lowest stands for 0
LEAST = -4.5  # the smallest shares above 0 are drawn at this power of ten
MOST_GAPS = 32  # rows of more cells have no gaps, which would fill a phone's screen
LOW = 1e-3  # a perturbation of this relative size is too small to notice
NEAR = 0.01  # of a token's norm
EXPERTS = {1: "two experts tie (order 1)", 2: "three experts tie (order 2)"}


def audit_plots(report: AuditReport) -> list[Plot]:
    """Return the plots that have data."""
    drawn = (draw(report) for draw in (flips, radii, undecided, load, near_ties, boundary_slice))
    return [plot for plot in drawn if plot.data]


def flips(report: AuditReport) -> Plot:
    """Draw the share of flips by perturbation and layer as a heat map."""
    layers = [layer.layer for layer in report.layers]
    names, shares, texts = [], [], []
    for name, perturbed in report.perturbations.items():
        known = {entry.layer: entry.flips for entry in perturbed.layers}
        said = {layer: f"{100 * share:.3g}%" for layer, share in known.items()}
        names.append(wrapped_label(name))
        shares.append([None if layer not in known else _logarithm(known[layer]) for layer in layers])
        texts.append([f"{escaped(name)}, layer {layer}: {said.get(layer, 'nothing to compare')}" for layer in layers])
    ticks = list(range(DECADES[0], DECADES[1] + 1))
    texts_of_ticks = ["0", *(f"{100 * 10.0**decade:g}" for decade in ticks[1:])]
    bar = _bar("% of the tokens", tickvals=ticks, ticktext=texts_of_ticks)
    data = [_heat(layers, names, shares, texts, zmin=DECADES[0], zmax=DECADES[1], colorbar=bar)] if names else []
    layout = {"xaxis": _cells(layers, "layer"), "yaxis": names_axis(), "height": 90 + plot_height(data)}
    caption = (
        "The share of tokens that flip, by perturbation and layer, on a logarithmic scale. A perturbation that does not "
        "change the token itself should flip none; a gap is a layer without tokens to compare."
    )
    return Plot("flips", "Flips by layer", caption, data, layout)


def radii(report: AuditReport) -> Plot:
    """Draw a histogram of the logarithms of the radii. Radii below and above all edges have bins of their own."""
    known = {str(layer.layer): layer.radius for layer in report.layers if layer.radius is not None}
    data: list[Trace] = []
    if known:
        edges = [math.log10(edge) for edge in next(iter(known.values())).edges]
        edges = [2 * edges[0] - edges[1], *edges, 2 * edges[-1] - edges[-2]]
        together = [sum(same) for same in zip(*(found.counts for found in known.values()), strict=True)]
        for layer, counts in [(ALL_LAYERS, together), *((layer, found.counts) for layer, found in known.items())]:
            data.append(_histogram(layer, edges, counts))
        decades = range(math.ceil(edges[1] - 1e-9), math.floor(edges[-2] + 1e-9) + 1)
    ticks = {"tickvals": list(decades), "ticktext": [f"10<sup>{decade}</sup>" for decade in decades]} if known else {}
    x = axis("relative radius", zeroline=False, **ticks)
    layout = {"xaxis": x, "yaxis": shares_axis(), "bargap": 0, "shapes": [line_at("x", math.log10(LOW))]}
    kinds = " and ".join(sorted({found.kind for found in known.values()}))
    caption = (
        "The relative radius: no perturbation of the router's input up to this share of its norm can flip the token "
        f"({escaped(kinds)} certificates). Left of the dotted line, at {LOW:g}, a change too small to notice may flip it. "
        "The outermost bars contain all smaller and all larger radii."
    )
    return Plot("radii", "Certified radii", caption, data, layout)


def undecided(report: AuditReport) -> Plot:
    """Draw the share of undecided tokens by layer, a curve for each dtype."""
    shares: dict[str, list[tuple[int, float]]] = {}
    for layer in report.layers:
        for name, tokens in layer.undecided.items():
            shares.setdefault(name, []).append((layer.layer, tokens.share))
    caption = "The share of tokens that may flip if the router's input and weights are rounded to a dtype."
    return _shares_by_layer("undecided", "Undecided tokens", caption, shares, report)


def near_ties(report: AuditReport) -> Plot:
    """Draw the share of tokens near ties of each order, by layer."""
    shares: dict[str, list[tuple[int, float]]] = {}
    tokens = 0
    for layer in report.layers:
        near = layer.boundaries
        place = min(range(len(near.widths)), key=lambda each: abs(near.widths[each] - NEAR), default=0)
        tokens = max(tokens, near.tokens)
        for order in near.orders:
            name = EXPERTS.get(order.order, f"order {order.order}")
            shares.setdefault(name, []).append((layer.layer, order.shares[place]))
    caption = (
        f"The share of tokens within {NEAR:g} of their norm of a place where experts tie at the threshold, so that one may "
        f"replace the other there ({tokens} tokens of the first batch). `holdfast geometry` measures more of this."
    )
    return _shares_by_layer("near-ties", "Tokens near ties", caption, shares, report)


def _shares_by_layer(
    name: str, title: str, caption: str, shares: dict[str, list[tuple[int, float]]], report: AuditReport
) -> Plot:
    """Draw curves of shares, each of (layer, share)."""
    data = []
    for place, (label, curve) in enumerate(shares.items()):
        hover = f"{escaped(label)}, layer %{{x}}: %{{y:.3g}}% of the tokens<extra></extra>"
        x, y = [layer for layer, _ in curve], [100 * share for _, share in curve]
        data.append(curve_of(place, None, x, y, hover, name=escaped(label)))
    last = max(layer.layer for layer in report.layers)
    layout = {"xaxis": layer_axis(1 + last), "yaxis": shares_axis(), "legend": LEGEND}
    return Plot(name, title, caption, data, layout)


def boundary_slice(report: AuditReport) -> Plot:
    """Draw the slice of the layer that has one."""
    drawn = [(layer.layer, layer.boundaries.slice) for layer in report.layers if layer.boundaries.slice is not None][:1]
    title = f"A slice through layer {drawn[0][0]}" if drawn else "A slice"
    caption = (
        "A plane through the router's input of one token and its nearest points on two boundaries, in the layer with the "
        "most tokens near ties."
    )
    slices = [(None, each) for _, each in drawn]
    return slice_plot("slice", slices, 0, title, f"{caption} {cells_caption(slices)}")


def load(report: AuditReport) -> Plot:
    """Draw the load of each expert of each layer as a heat map."""
    layers = [str(layer.layer) for layer in report.layers]
    most = max(len(layer.load.percent) for layer in report.layers)
    rows, texts = [], []
    for layer in report.layers:
        row = relative_load(layer.load.percent)
        said = [f"layer {layer.layer}, expert {place}: {value:.2f} times the even load" for place, value in enumerate(row)]
        rows.append([*row, *[None] * (most - len(row))])
        texts.append([*said, *[""] * (most - len(row))])
    highest = max(value for row in rows for value in row if value is not None)
    experts = list(range(most))
    data = [_heat(experts, layers, rows, texts, zmin=0, zmax=max(2.0, highest), colorbar=_bar("load / even load"))]
    tall = max(320, min(900, 150 + 18 * len(layers)))
    layout = {"xaxis": _cells(experts, "expert"), "yaxis": axis("layer", **names_axis()), "height": tall}
    caption = (
        "The number of tokens that selected each expert, divided by the even load of its layer: 1 is even, 0 is a dead "
        "expert."
    )
    return Plot("load", "Load per expert", caption, data, layout)


def _histogram(layer: str, edges: Sequence[float], counts: Sequence[int]) -> Trace:
    """Return the bars of one layer. The outermost edges are drawn but have no value."""
    total = sum(counts) or 1
    shares = [100 * count / total for count in counts]
    centres = [(low + high) / 2 for low, high in pairwise(edges)]
    widths = [high - low for low, high in pairwise(edges)]
    values = [f"{10**edge:.2g}" for edge in edges[1:-1]]
    bins = [f"below {values[0]}", *(f"{low} to {high}" for low, high in pairwise(values)), f"above {values[-1]}"]
    texts = [f"{said}: {share:.3g}% of the tokens" for said, share in zip(bins, shares, strict=True)]
    hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    return trace(0, centres, shares, layer=layer, type="bar", width=widths, **hover)


def _heat(x: Sequence[Any], y: Sequence[Any], z: list[Any], texts: list[list[str]], **style: Any) -> Trace:
    hover = {"text": texts, "hovertemplate": "%{text}<extra></extra>", "hoverongaps": False}
    gaps = {"xgap": int(len(x) <= MOST_GAPS), "ygap": int(len(y) <= MOST_GAPS)}
    return {"type": "heatmap", "meta": {}, "x": list(x), "y": list(y), "z": z, **gaps, **hover, **style}


def _bar(title: str, **ticks: Any) -> dict[str, Any]:
    """Return a colour scale above the plot: beside it there is no room on a phone."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 1}
    style = {"thickness": 10, "outlinewidth": 0, "tickangle": 0, "title": {"text": title, "side": "top"}}
    return {**ticks, **place, **style}


def _cells(numbers: Sequence[int], title: str) -> dict[str, Any]:
    """Return an axis of whole numbers. An empty line before the title keeps it below the tick numbers."""
    return axis(f"<br>{title}", tick0=0, dtick=tick_step(len(numbers)), zeroline=False, showgrid=False)


def _logarithm(share: float) -> float:
    return max(LEAST, math.log10(share)) if share > 0 else float(DECADES[0])


SHOWN = 10  # findings; more are folded away
RISKS = {1e-5: "#7f0000", 1e-4: "#c8321e", 1e-3: "#f07f4f", 1e-2: "#fdbb84"}  # below these relative radii
SAFE = "#fee8c8"


def write_audit(report: AuditReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of an audit, given as a report, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(AuditReport, report, path, render_audit, force=force)


def render_audit(report: AuditReport) -> str:
    """Return the page as HTML."""
    findings, drawn = diagnose(report), audit_plots(report)
    return render_template(
        "audit.html",
        drawn,
        title=report.model.name,
        verdict=verdict(report, [finding.severity for finding in findings]),
        findings=findings,
        shown=SHOWN,
        table=layers_table(report),
        perturbed=perturbations_table(report),
        skipped=skipped_table(report),
        what_if=None if report.what_if is None else what_if_tables(report.what_if),
        plots=drawn,
        layers=[ALL_LAYERS, *(str(layer.layer) for layer in report.layers)],
        tokens=[token(entry) for entry in report.at_risk],
        view=view(report),
        risks=risks(),
        how=how_it_was_run(report),
    )


def verdict(report: AuditReport, severities: Sequence[str]) -> str:
    """Return the number of findings by severity as a sentence."""
    counts = Counter(severities)
    said = "No findings."
    if counts:
        few = "finding" if len(severities) == 1 else "findings"
        parts = listed([f"{count} {name}" for name, count in counts.items()])
        said = f"{len(severities)} {few}, the most harmful first: {parts}."
    if report.status == "complete":
        return said
    return f"The audit was interrupted; this page covers the finished batches. {said}"


def layers_table(report: AuditReport) -> Table:
    """Return routing metrics by layer. Layers without a certificate have dashes, and the reason in the last column."""
    dtypes = list(dict.fromkeys(name for layer in report.layers for name in layer.undecided))
    limited = any(layer.dropped for layer in report.layers)
    refused = any(layer.no_certificate for layer in report.layers)
    rows = []
    for layer in report.layers:
        radius, rounded = layer.radius, {name: layer.undecided.get(name) for name in dtypes}
        median = number(radius.median if radius else None)
        if radius and radius.median is None:
            median = f"above {radius.edges[-1]:g}"
        rows.append(
            {
                "layer": layer.layer,
                "experts": layer.experts,
                "entropy, nats": decimal(layer.entropy, 3),
                "entropy, share of maximum": percent(layer.entropy_share),
                "load unevenness (CV)": decimal(layer.load.cv, 3),
                "dead experts": len(layer.load.dead),
                **({"dropped": percent(layer.dropped["share"] if layer.dropped else None)} if limited else {}),
                **{f"near-ties ({strip.width:g})": percent(strip.share) for strip in layer.near_ties.strips},
                **{f"undecided in {name}": percent(tokens.share if tokens else None) for name, tokens in rounded.items()},
                "median relative radius": median,
                "radius below 0.001": percent(radius.low if radius else None),
                **({"why no certificate": layer.no_certificate or ""} if refused else {}),
            }
        )
    note = (
        "Near-ties (w): tokens whose last selected expert and the next differ by less than w. Undecided: rounding the "
        "router's input and weights to the dtype may flip the token. Radii: medians of certified radii, in shares of the "
        "router input's norm, and the share of tokens with a radius below 0.001."
        + (" Dropped: the share of the experts that tokens lose to a limit." if limited else "")
    )
    return Table.of("The unperturbed layers", rows, note)


def perturbations_table(report: AuditReport) -> Table:
    """Return what each perturbation changes."""
    rows = [
        {
            "perturbation": name,
            "what it does": perturbed.about,
            "flips": percent(perturbed.overall.flips),
            "first expert": percent(perturbed.overall.first_flips),
            "weights": number(perturbed.overall.weight_change),
            "output": percent(perturbed.overall.output.total),
            "output, by flips": percent(perturbed.overall.output.flip),
            "output, other": percent(perturbed.overall.output.rest),
            "predictions": percent(perturbed.overall.prediction_flips),
            "loss": signed(perturbed.overall.loss.change if perturbed.overall.loss else None, ".4f"),
        }
        for name, perturbed in report.perturbations.items()
    ]
    note = (
        "Flips, first expert, predictions: the share of tokens whose selected set, first expert or prediction changes. "
        "Weights: L1 change of gate weights. Output: the change of layers' outputs relative to their norm, in total, the "
        "part caused by flips, and the other part (norms of parts do not add up to the norm of their sum). Means over "
        "layers; the loss is in nats per token."
    )
    return Table.of("Perturbations", rows, note)


def skipped_table(report: AuditReport) -> Table:
    """Return the perturbations that were skipped, with the reason."""
    skipped = report.skipped.items()
    rows = [{"perturbation": name, "what it does": one.about, "why": one.reason} for name, one in skipped]
    return Table.of("Skipped perturbations", rows)


def what_if_tables(what_if: WhatIf) -> tuple[Table, Table]:
    """Return the changes and the cost, before and after the router was replaced."""
    columns = {
        "tokens that flip": what_if.flips,
        "output change by flips": what_if.flip_output,
        "total output change": what_if.output,
        "predictions that change": what_if.prediction_flips,
    }
    changes = [
        {"perturbation": name, **{column: _before_and_after(pairs[name], short_share) for column, pairs in columns.items()}}
        for name in what_if.flips
    ]
    cost = [
        {"cost": name.replace("_", " "), "before → after": _before_and_after(pair, partial(number, digits=4))}
        for name, pair in what_if.cost.items()
        if pair.before is not None or pair.after is not None  # without labels there is no loss
    ]
    title = f"What if: the router {what_if.router}, without training"
    note = (
        "The same audit on the same data, before → after the router was replaced. Output changes are relative to the norm "
        "of layers' outputs, means over layers. The part caused by flips can fall while the total, or the share of "
        "predictions that change, rises: compare all columns."
    )
    return Table.of(title, changes, note), Table.of("", cost)


def _before_and_after(pair: Pair, written: Callable[[float | None], str]) -> str:
    return f"{written(pair.before)} → {written(pair.after)}"


def risks() -> list[dict[str, str]]:
    """Return the legend, the smallest radii first. A token's level is an index into it."""
    named = [{"name": f"below {bound:g}", **with_text_colour(colour)} for bound, colour in RISKS.items()]
    return [*named, {"name": f"{max(RISKS):g} and more", **with_text_colour(SAFE)}]


def token(entry: AtRisk) -> dict[str, Any]:
    """Return a token at risk with the text around it; `context` has that text if the token's place in it is not known."""
    if entry.position is None:
        where = f"row {entry.place} of batch {entry.batch}"
    else:
        where = f"position {entry.position} of sequence {entry.sequence}, batch {entry.batch}"
    where = f"layer {entry.layer}, expert {entry.leaves} would be replaced by {entry.enters}; {where}"
    about = {"level": _level(entry.relative), "radius": number(entry.relative, 2), "where": where}
    text, context, before, after = entry.text, entry.context or "", entry.before or "", entry.after or ""
    if text is None:
        text, context = f"row {entry.place}" if entry.token is None else f"token {entry.token}", ""
    elif before + text + after == context:
        context = ""
    elif text and sum(context.startswith(text, place) for place in range(len(context))) == 1:
        (before, _, after), context = context.partition(text), ""  # decoded alone, a token may lose its leading space
    texts = {"text": text, "before": before, "after": after, "context": context}
    return about | {name: visible_lines(part) for name, part in texts.items()}


def view(report: AuditReport) -> dict[str, list[dict[str, Any]]]:
    """Return the tokens of a text with their levels of risk, by layer; for all layers, by each token's smallest radius."""
    if report.view is None or not report.view.layers:
        return {}
    finite = ([radius for radius in radii if radius is not None] for radii in zip(*report.view.layers.values(), strict=True))
    least = [min(radii, default=None) for radii in finite]
    shown = {ALL_LAYERS: least, **report.view.layers}
    pieces = [visible_lines(piece) for piece in report.view.pieces]
    return {
        layer: [
            {"text": piece, "level": _level(radius), "radius": "infinite" if radius is None else number(radius, 2)}
            for piece, radius in zip(pieces, radii, strict=True)
        ]
        for layer, radii in shown.items()
    }


def _level(relative: float | None) -> int:
    return sum(relative is None or relative >= bound for bound in RISKS)
