"""The HTML page of an audit, and its tables for page and terminal: verdict, tables, tokens at risk and plots.

Plots are data for plotly, as in `holdfast.report.plots`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.auditing import AuditReport, Finding, diagnose
from holdfast.auditing.findings import CONSEQUENCES, RANKS, unchanged
from holdfast.auditing.reports import AtRisk, Pair
from holdfast.report.explorer import WORDS, audit_explorer
from holdfast.report.export import Page
from holdfast.report.first_screen import first_screen, price
from holdfast.report.page_shell import (
    RISKS,
    before_and_after,
    decimal,
    how_it_was_run,
    listed,
    number,
    percent,
    risks,
    short_share,
    signed,
    visible_lines,
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
from holdfast.report.tables import BEFORE_AND_AFTER, Cell, Table

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
    names, shares, texts, percents, without = [], [], [], [], []
    for name, perturbed in report.perturbations.items():
        known = {entry.layer: entry.flips for entry in perturbed.layers}
        if not any(known.values()):
            without.append(name)
            continue
        names.append(wrapped_label(name))
        said = {layer: f"{100 * share:.3g}%" for layer, share in known.items()}
        powers = {layer: max(LEAST, math.log10(share)) if share > 0 else DECADES[0] for layer, share in known.items()}
        shares.append([powers.get(layer) for layer in layers])
        percents.append([100 * known[layer] if layer in known else None for layer in layers])
        texts.append([f"{escaped(name)}, layer {layer}: {said.get(layer, 'nothing to compare')}" for layer in layers])
    ticks = list(range(DECADES[0], DECADES[1] + 1))
    bar = _bar("% of the tokens", tickvals=ticks, ticktext=["0", *(f"{100 * 10.0**decade:g}" for decade in ticks[1:])])
    scale = {"zmin": DECADES[0], "zmax": DECADES[1], "colorbar": bar}
    data = [_heat(layers, names, shares, texts, customdata=percents, **scale)] if names else []
    layout = {"xaxis": _cells(layers, "layer"), "yaxis": names_axis(), "height": 90 + plot_height(data)}
    caption = (
        "The share of tokens that flip, by perturbation and layer, on a logarithmic scale. A perturbation that does not "
        "change the token itself should flip none; a gap is a layer without tokens to compare."
        + (f" No token flips under {escaped(listed(without))}." if without else "")
    )
    return Plot("flips", "Flips by layer", caption, data, layout)


def radii(report: AuditReport) -> Plot:
    """Draw a histogram of the logarithms of the radii. Radii below and above all edges have bins of their own."""
    known = {str(layer.layer): layer.radius for layer in report.layers if layer.radius is not None}
    if not known:
        return Plot("radii", "", "", [], {})
    edges = [math.log10(edge) for edge in next(iter(known.values())).edges]
    edges = [2 * edges[0] - edges[1], *edges, 2 * edges[-1] - edges[-2]]
    together = [sum(same) for same in zip(*(found.counts for found in known.values()), strict=True)]
    counts = {ALL_LAYERS: together, **{layer: found.counts for layer, found in known.items()}}
    data = [_histogram(layer, edges, of_layer) for layer, of_layer in counts.items()]
    decades = range(math.ceil(edges[1] - 1e-9), math.floor(edges[-2] + 1e-9) + 1)
    ticks = {"tickvals": list(decades), "ticktext": [f"10<sup>{decade}</sup>" for decade in decades]}
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


SHOWN = 10  # findings; more are folded away


def write_audit(report: AuditReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of an audit, given as a report, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(AuditReport, report, path, force=force)


def audit_page(report: AuditReport) -> Page:
    """Return the page as data, to be rendered or exported."""
    findings = diagnose(report)
    screen, summary = first_screen(report, findings), severities(report, findings)
    return Page(
        "audit.html",
        audit_plots(report),
        {"explorer": audit_explorer(report)},
        brief=perturbations_table(report).without("what it does", "output, other"),
        sentences=[screen.sentence, screen.more],
        title=report.model.name,
        first=screen,
        summary=summary,
        findings=by_consequence(findings),
        shown=SHOWN,
        table=layers_table(report),
        perturbed=perturbations_table(report),
        skipped=skipped_table(report),
        triggers=triggers_table(report),
        what_if=what_if_tables(report),
        layers=[ALL_LAYERS, *(str(layer.layer) for layer in report.layers)],
        tokens=[token(entry) for entry in report.at_risk],
        explored=report.view is not None,
        explorer_caption=f"The first examples of the data. {WORDS}",
        how=how_it_was_run(report),
        exported=(screen, findings_table(findings, summary), at_risk_table(report)),
    )


def severities(report: AuditReport, findings: Sequence[Finding]) -> str:
    """Return the number of findings by severity, and which consequences no finding has, as text."""
    counts = Counter(finding.severity for finding in findings)
    said = listed([f"{counts[name]} {name}" for name in RANKS if counts[name]]) if counts else "none"
    changes = [one.overall for one in report.perturbations.values()]
    measured = {
        "predictions": any(one.prediction_flips is not None for one in changes),
        "the loss": any(one.loss is not None for one in changes),
    }
    found = {finding.consequence for finding in findings}
    spared = [name for name, known in measured.items() if known and name.removeprefix("the ") not in found]
    return f"{said}; none about {' or '.join(spared)}" if findings and spared else said


def by_consequence(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    """Return the findings below the headings of what they are about; the page and the terminal have the same ones."""
    groups = {heading: [one for one in findings if one.consequence == name] for name, heading in CONSEQUENCES.items()}
    return [(heading, some) for heading, some in groups.items() if some]


def layers_table(report: AuditReport) -> Table:
    """Return routing metrics by layer. Layers without a certificate have dashes, and the reason in the last column."""
    dtypes = list(dict.fromkeys(name for layer in report.layers for name in layer.undecided))
    limited = any(layer.dropped for layer in report.layers)
    refused = any(layer.no_certificate for layer in report.layers)
    rows = []
    for layer in report.layers:
        radius, rounded = layer.radius, {name: layer.undecided.get(name) for name in dtypes}
        median: Cell | str = number(radius.median if radius else None)
        if radius and radius.median is None:
            median = Cell(f"above {radius.edges[-1]:g}")
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
    """Return what each perturbation changes, the most changed predictions first; those that change nothing are in a note."""
    folded = unchanged(report)
    shown = [(name, one, one.overall) for name, one in report.perturbations.items() if name not in folded]
    shown.sort(key=lambda each: (-(each[2].prediction_flips or 0), -abs(each[2].loss_change or 0), -each[2].flips))
    rows = [
        {
            "perturbation": name,
            "what it does": perturbed.about,
            "predictions": short_share(changes.prediction_flips),
            "loss": signed(changes.loss_change, ".4f"),
            "output": short_share(changes.output.total),
            "output, by flips": short_share(changes.output.flip),
            "output, other": short_share(changes.output.rest),
            "flips": short_share(changes.flips),
            "first expert": short_share(changes.first_flips),
            "weights": number(changes.weight_change, 2),
        }
        for name, perturbed, changes in shown
    ]
    note = (
        "Predictions, flips, first expert: the share of tokens whose prediction, selected set or first expert changes. The "
        "change of the loss is in nats per token. Output: the change of layers' outputs relative to their norm, in total, "
        "the part caused by flips, and the other part (norms of parts do not add up to the norm of their sum). Weights: L1 "
        f"change of gate weights. Means over layers.{nothing_changes(folded)}"
    )
    return Table.of("Perturbations", rows, note)


def findings_table(findings: Sequence[Finding], summary: str) -> Table:
    """Return the findings, the most harmful first, and how many of each severity there are."""
    rows = (
        {
            "finding": f"{finding.text}.",
            "severity": finding.severity,
            "why": f"{finding.why}.",
            "number": number(finding.number),
            "threshold": number(finding.threshold),
        }
        for finding in findings
    )
    return Table.of("Findings", rows, summary)


def at_risk_table(report: AuditReport) -> Table:
    """Return the tokens with the smallest radii, with the text around each."""
    tokens = [(token(entry), entry) for entry in report.at_risk]
    rows = (
        {
            "token": shown["text"],
            "relative radius": Cell(shown["radius"], entry.relative),
            "context": shown["context"] or shown["before"] + shown["text"] + shown["after"],
            "where": shown["where"],
        }
        for shown, entry in tokens
    )
    return Table.of("Tokens most at risk", rows, f"Colours: {', '.join(risk['name'] for risk in risks())}.")


def nothing_changes(folded: Sequence[str]) -> str:
    """Return the perturbations that are left out of a table."""
    return f" Nothing changes under {listed(folded)}." if folded else ""


def skipped_table(report: AuditReport) -> Table:
    """Return the perturbations that were skipped, with the reason."""
    skipped = report.skipped.items()
    rows = [{"perturbation": name, "what it does": one.about, "why": one.reason} for name, one in skipped]
    return Table.of("Skipped perturbations", rows)


def triggers_table(report: AuditReport) -> Table:
    """Return the strongest trigger of each layer; empty if none was searched for."""
    found = report.triggers
    if found is None:
        return Table.of("Triggers", [])
    if found.skipped is not None:
        return Table.of("Triggers", [{"triggers": "none", "why": found.skipped}])
    rows = (
        {
            "layer": one.layer,
            "expert": one.expert,
            "trigger": repr(one.text) if one.text is not None else " ".join(map(str, one.tokens)),
            "tokens to it": percent(one.share),
            "without": percent(one.without),
            "random, mean": percent(one.random),
            "random, most": percent(one.random_most),
            "texts forced": percent(one.texts),
            "flags": " ".join(one.flags),
        }
        for one in found.found
    )
    note = (
        f"The {found.tokens} tokens that, put before texts, were found to send most of their tokens to one expert of a "
        f"layer. Searched for on {found.searched} texts and measured on {found.held_out} others: the share of tokens that "
        f"select the expert after the trigger, without it, and after {found.random} random sequences of the same length, on "
        "average and at most; and the share of texts of which at least 90% of the tokens select it."
    )
    return Table.of("Triggers", rows, note)


def what_if_tables(report: AuditReport) -> tuple[Table, Table] | None:
    """Return the changes and the cost, before and after the router was replaced; None if it was not."""
    what_if, folded = report.what_if, unchanged(report)
    if what_if is None:
        return None
    changes = {name: one.overall.loss_change for name, one in report.perturbations.items()}
    losses = {name: Pair(change, what_if.overall.loss_change.get(name)) for name, change in changes.items()}
    shown = [name for name in what_if.flips if name not in folded]
    shown.sort(key=lambda name: -(what_if.prediction_flips[name].before or 0))

    def cells(name: str) -> Iterator[tuple[str, str]]:
        yield "perturbation", name
        yield "predictions that change", before_and_after(what_if.prediction_flips[name], short_share)
        if any(pair.before is not None for pair in losses.values()):
            yield "change of the loss", before_and_after(losses[name], partial(signed, form=".4f"))
        yield "total output change", before_and_after(what_if.output[name], short_share)
        yield "output change by flips", before_and_after(what_if.flip_output[name], short_share)
        yield "tokens that flip", before_and_after(what_if.flips[name], short_share)

    cost = [{"cost": tile.name, BEFORE_AND_AFTER: tile.value} for tile in price(what_if.cost)]
    title = f"What if: the router {what_if.router}, without training"
    note = (
        "The same audit on the same data, before → after the router was replaced. Output changes are relative to the norm "
        "of layers' outputs, means over layers. The part caused by flips can fall while the total, or the share of "
        f"predictions that change, rises: compare all columns.{nothing_changes(folded)}"
    )
    return Table.of(title, (dict(cells(name)) for name in shown), note), Table.of("", cost)


def token(entry: AtRisk) -> dict[str, Any]:
    """Return a token at risk with the text around it; `context` has that text if the token's place in it is not known."""
    if entry.position is None:
        where = f"row {entry.place} of batch {entry.batch}"
    else:
        where = f"position {entry.position} of sequence {entry.sequence}, batch {entry.batch}"
    where = f"layer {entry.layer}, expert {entry.leaves} would be replaced by {entry.enters}; {where}"
    about = {
        "level": sum(entry.relative is None or entry.relative >= bound for bound in RISKS),
        "radius": number(entry.relative, 2),
        "where": where,
    }
    text, context, before, after = entry.text, entry.context or "", entry.before or "", entry.after or ""
    if text is None:
        text, context = f"row {entry.place}" if entry.token is None else f"token {entry.token}", ""
    elif before + text + after == context:
        context = ""
    elif text and sum(context.startswith(text, place) for place in range(len(context))) == 1:
        (before, _, after), context = context.partition(text), ""  # decoded alone, a token may lose its leading space
    texts = {"text": text, "before": before, "after": after, "context": context}
    return about | {name: visible_lines(part) for name, part in texts.items()}
