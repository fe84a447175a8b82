"""The HTML page of an audit, rendered from the stored JSON alone: its verdict, tables, tokens at risk and plots.

Plots are data for plotly, as in `holdfast.report.plots`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.report.boundary_plots import boundary_slice, near_ties
from holdfast.report.page_shell import (
    decimal,
    flattened,
    listed,
    render_template,
    short_share,
    with_text_colour,
    write_report_page,
)
from holdfast.report.plot_data import (
    ALL_LAYERS,
    Plot,
    Trace,
    curve_of,
    escaped,
    layer_axis,
    names_axis,
    plot_height,
    tick_step,
    trace,
    wrapped_label,
)
from holdfast.report.stored_audit import (
    AtRisk,
    Audit,
    Radii,
    Skipped,
    WhatIf,
    findings,
)
from holdfast.report.stored_reports import Pair

DECADES = (-5, 0)  # powers of ten of the shares that flip; the lowest stands for 0
LEAST = -4.5  # the smallest shares above 0 are drawn at this power of ten
MOST_GAPS = 32  # rows of more cells have no gaps, which would fill a phone's screen
LOW = 1e-3  # a perturbation of this relative size is too small to notice


def audit_plots(audit: Audit) -> list[Plot]:
    """Return the plots that have data."""
    return [
        plot for plot in (make(audit) for make in (flips, radii, undecided, load, near_ties, boundary_slice)) if plot.data
    ]


def flips(audit: Audit) -> Plot:
    """Draw the share of flips by perturbation and layer as a heat map."""
    layers = [layer.layer for layer in audit.layers]
    names, shares, texts = [], [], []
    for name, (one, _) in audit.ran.items():
        found = {layer.layer: layer.flips for layer in one.layers}
        names.append(wrapped_label(name))
        shares.append([_logarithm(found.get(layer)) for layer in layers])
        texts.append([f"{escaped(name)}, layer {layer}: {_percent(found.get(layer))}" for layer in layers])
    ticks = list(range(DECADES[0], DECADES[1] + 1))
    bar = {
        "tickvals": ticks,
        "ticktext": ["0", *(f"{100 * 10.0**decade:g}" for decade in ticks[1:])],
        **_bar("% of the tokens"),
    }
    data = [_heat(layers, names, shares, texts, zmin=DECADES[0], zmax=DECADES[1], colorbar=bar)] if names else []
    layout = {"xaxis": _cells(layers, "layer"), "yaxis": names_axis(), "height": 90 + plot_height(data)}
    caption = (
        "The share of tokens that flip, by perturbation and layer, on a logarithmic scale. A perturbation that does not "
        "change the token itself should flip none; a gap is a layer without tokens to compare."
    )
    return Plot("flips", "Flips by layer", caption, data, layout)


def radii(audit: Audit) -> Plot:
    """Draw a histogram of the logarithms of the radii. Radii below and above all edges have bins of their own."""
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
        "The relative radius: no perturbation of the router's input up to this share of its norm can flip the token "
        f"({escaped(kinds)} certificates). Left of the dotted line, at {LOW:g}, a change too small to notice may flip it. "
        "The outermost bars contain all smaller and all larger radii."
    )
    return Plot("radii", "Certified radii", caption, data, layout)


def undecided(audit: Audit) -> Plot:
    """Draw the share of undecided tokens by layer, a curve for each dtype."""
    found: dict[str, list[tuple[int, float]]] = {}
    for layer in audit.layers:
        if not isinstance(layer.undecided, Skipped):
            for name, one in layer.undecided.items():
                found.setdefault(name, []).append((layer.layer, 100 * one.share))
    data = []
    for place, (name, shares) in enumerate(found.items()):
        hover = f"{escaped(name)}, layer %{{x}}: %{{y:.3g}}% of the tokens<extra></extra>"
        x, y = [layer for layer, _ in shares], [share for _, share in shares]
        data.append(curve_of(place, None, x, y, hover, name=escaped(name)))
    layout = {
        "xaxis": layer_axis(1 + max(layer.layer for layer in audit.layers)),
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = "The share of tokens that may flip if the router's input and weights are rounded to a dtype."
    return Plot("undecided", "Undecided tokens", caption, data, layout)


def load(audit: Audit) -> Plot:
    """Draw the load of each expert of each layer as a heat map."""
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
        "The number of tokens that selected each expert, divided by the even load of its layer: 1 is even, 0 is a dead "
        "expert."
    )
    return Plot("load", "Load per expert", caption, data, layout)


def _histogram(layer: str, edges: Sequence[float], counts: Sequence[int]) -> Trace:
    """Return the bars of one layer."""
    total = sum(counts) or 1
    shares = [100 * count / total for count in counts]
    centres = [(low + high) / 2 for low, high in pairwise(edges)]
    widths = [high - low for low, high in pairwise(edges)]
    texts = [f"{said}: {share:.3g}% of the tokens" for said, share in zip(_bins(edges), shares, strict=True)]
    hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    return trace(0, centres, shares, layer=layer, type="bar", width=widths, **hover)


def _bins(edges: Sequence[float]) -> Iterator[str]:
    """Yield each bin as text. The outermost edges are drawn but have no value."""
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
    """Return a colour scale above the plot: beside it there is no room on a phone."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 1}
    return {**place, "thickness": 10, "outlinewidth": 0, "tickangle": 0, "title": {"text": title, "side": "top"}}


def _cells(numbers: Sequence[int], title: str) -> dict[str, Any]:
    """Return an axis of whole numbers. An empty line before the title keeps it below the tick numbers."""
    ticks = {"tick0": 0, "dtick": tick_step(len(numbers))}
    return {"title": {"text": f"<br>{title}"}, **ticks, "zeroline": False, "showgrid": False}


def _logarithm(share: float | None) -> float | None:
    if share is None:
        return None
    return max(LEAST, math.log10(share)) if share > 0 else float(DECADES[0])


def _percent(share: float | None) -> str:
    return "nothing to compare" if share is None else f"{100 * share:.3g}%"


SHOWN = 10  # findings; more are folded away
RISKS = {1e-5: "#7f0000", 1e-4: "#c8321e", 1e-3: "#f07f4f", 1e-2: "#fdbb84"}  # below these relative radii
SAFE = "#fee8c8"


@dataclass(frozen=True)
class Table:
    """A table: the name of each row, and its cells by column."""

    names: list[str]
    rows: list[dict[str, str]]


@dataclass(frozen=True)
class Token:
    """A token with the text around it; `context` has the whole text if the token's place in it is not known."""

    text: str
    level: int
    radius: str
    where: str
    before: str = ""
    after: str = ""
    context: str | None = None


def write_audit(stored: Mapping[str, Any] | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a stored audit, given as data, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(Audit, stored, path, render_audit, force=force)


def render_audit(stored: Mapping[str, Any]) -> str:
    """Return the page as HTML. Raise ValueError with a one-line error if the stored audit is not valid."""
    audit = Audit.parse(stored)
    found = findings(stored)
    drawn = audit_plots(audit)
    return render_template(
        "audit.html",
        {"plots": {plot.name: asdict(plot) for plot in drawn}},
        title=audit.title,
        verdict=verdict(audit, [finding.severity for finding in found]),
        findings=found,
        shown=SHOWN,
        table=layers_table(audit),
        perturbed=perturbations_table(audit),
        skipped=skipped_table(audit),
        what_if=None if audit.what_if is None else what_if_tables(audit.what_if),
        plots=drawn,
        layers=[ALL_LAYERS, *(str(layer.layer) for layer in audit.layers)],
        tokens=[token(entry) for entry in audit.at_risk],
        view=view(audit),
        risks=risks(),
        how=how(audit),
    )


def verdict(audit: Audit, severities: Sequence[str]) -> str:
    """Return the number of findings by severity as a sentence."""
    counts = Counter(severities)
    said = listed([f"{count} {name}" for name, count in counts.items()]) if counts else ""
    few = "finding" if len(severities) == 1 else "findings"
    found = f"{len(severities)} {few}, the most harmful first: {said}." if said else "No findings."
    return (
        found if audit.status == "complete" else f"The audit was interrupted; this page covers the finished batches. {found}"
    )


def layers_table(audit: Audit) -> Table:
    """Return routing metrics by layer. Layers without a certificate have dashes, and the reason in the last column."""
    widths = list(dict.fromkeys(strip.width for layer in audit.layers for strip in layer.near_ties.strips))
    undecided = [{} if isinstance(layer.undecided, Skipped) else layer.undecided for layer in audit.layers]
    dtypes = list(dict.fromkeys(name for one in undecided for name in one))
    reasons = [layer.radius.skipped if isinstance(layer.radius, Skipped) else "" for layer in audit.layers]
    limited = any(layer.dropped for layer in audit.layers)
    rows = []
    for layer, dtype, reason in zip(audit.layers, undecided, reasons, strict=True):
        ties = {strip.width: strip.share for strip in layer.near_ties.strips}
        rows.append(
            {
                "experts": str(layer.experts),
                "entropy, nats": decimal(layer.entropy, 3),
                "entropy, share of maximum": share(layer.entropy_share),
                "load unevenness (CV)": decimal(layer.load.cv, 3),
                "dead experts": str(len(layer.load.dead)),
                **({"dropped": share(layer.dropped.share if layer.dropped else None)} if limited else {}),
                **{f"near-ties ({width:g})": share(ties.get(width)) for width in widths},
                **{f"undecided in {name}": share(dtype[name].share if name in dtype else None) for name in dtypes},
                "median relative radius": _median(layer.radius),
                **({"why no certificate": reason} if any(reasons) else {}),
            }
        )
    return Table([str(layer.layer) for layer in audit.layers], rows)


def perturbations_table(audit: Audit) -> Table:
    """Return what each perturbation changes."""
    rows = [
        {
            "what it does": one.about,
            "flips": share(found.flips),
            "first expert": share(found.first_flips),
            "output": share(found.output.total),
            "output, by flips": share(found.output.flip),
            "output, other": share(found.output.rest),
            "predictions": share(found.prediction_flips),
            "loss": signed(None if found.loss is None else found.loss.change),
        }
        for one, found in audit.ran.values()
    ]
    return Table(list(audit.ran), rows)


def skipped_table(audit: Audit) -> Table:
    """Return the perturbations that were skipped, with the reason."""
    skipped = {name: one for name, one in audit.perturbations.items() if one.skipped is not None}
    rows = [{"what it does": one.about, "why": one.skipped or ""} for one in skipped.values()]
    return Table(list(skipped), rows)


def what_if_tables(found: WhatIf) -> dict[str, Any]:
    """Return the cost and the changes before and after the router was replaced."""
    cost = {name: pair for name, pair in found.cost.items() if pair.before is not None or pair.after is not None}
    columns = {
        "tokens that flip": found.flips,
        "output change by flips": found.flip_output,
        "total output change": found.output,
        "predictions that change": found.prediction_flips,
    }
    missing = Pair(before=None, after=None)
    rows = [
        {column: before_and_after(pairs.get(name, missing), short_share) for column, pairs in columns.items()}
        for name in found.flips
    ]
    return {
        "router": found.router,
        "cost": Table(
            [name.replace("_", " ") for name in cost],
            [{"before → after": before_and_after(pair, partial(number, digits=4))} for pair in cost.values()],
        ),
        "changes": Table(list(found.flips), rows),
    }


def before_and_after(pair: Pair, written: Callable[[float | None], str]) -> str:
    return f"{written(pair.before)} → {written(pair.after)}"


def risks() -> list[dict[str, str]]:
    """Return the legend, the smallest radii first. A token's level is an index into it."""
    named = [{"name": f"below {bound:g}", **with_text_colour(colour)} for bound, colour in RISKS.items()]
    return [*named, {"name": f"{max(RISKS):g} and more", **with_text_colour(SAFE)}]


def token(entry: AtRisk) -> Token:
    """Return a token at risk with the text around it."""
    level = _level(entry.relative)
    if entry.position is None:
        where = f"row {entry.place} of batch {entry.batch}"
    else:
        where = f"position {entry.position} of sequence {entry.sequence}, batch {entry.batch}"
    where = f"layer {entry.layer}, expert {entry.leaves} would be replaced by {entry.enters}; {where}"
    radius = number(entry.relative, 2)
    if entry.text is None:
        return Token(f"row {entry.place}" if entry.token is None else f"token {entry.token}", level, radius, where)
    text, context, before, after = entry.text, entry.context or "", entry.before, entry.after
    if before is not None and after is not None and before + text + after == context:
        return Token(_lines(text), level, radius, where, _lines(before), _lines(after))
    if text and _times(text, context) == 1:  # decoded alone, a token may lose its leading space
        before, _, after = context.partition(text)
        return Token(_lines(text), level, radius, where, _lines(before), _lines(after))
    return Token(_lines(text), level, radius, where, context=_lines(context) if context else None)


def view(audit: Audit) -> dict[str, list[dict[str, Any]]]:
    """Return the tokens of a text with their levels of risk, by layer; for all layers, by each token's smallest radius."""
    if audit.view is None or not audit.view.layers:
        return {}
    least = [_least(radii) for radii in zip(*audit.view.layers.values(), strict=True)]
    shown = {ALL_LAYERS: least, **audit.view.layers}
    pieces = [_lines(piece) for piece in audit.view.pieces]
    return {
        layer: [
            {"text": piece, "level": _level(radius), "radius": "infinite" if radius is None else number(radius, 2)}
            for piece, radius in zip(pieces, radii, strict=True)
        ]
        for layer, radii in shown.items()
    }


def _least(radii: Sequence[float | None]) -> float | None:
    return min((radius for radius in radii if radius is not None), default=None)


def _level(relative: float | None) -> int:
    return sum(relative is None or relative >= bound for bound in RISKS)


def how(audit: Audit) -> dict[str, dict[str, str]]:
    """Return how the audit was run: model, data, settings, versions."""
    groups: dict[str, Mapping[str, Any]] = {
        "Model": audit.model,
        "Data": audit.data,
        "Settings": audit.settings,
        "Versions": audit.versions,
        "Run": {"status": audit.status, "seconds": decimal(audit.seconds, 1)},
    }
    return {title: dict(flattened(group)) for title, group in groups.items() if group}


def share(value: float | None) -> str:
    return decimal(value) if value is None else f"{100 * value:.2f}%"


def number(value: float | None, digits: int = 3) -> str:
    return decimal(value) if value is None else f"{value:.{digits}g}"


def signed(value: float | None) -> str:
    return decimal(value) if value is None else f"{value:+.4f}"


def _median(found: Radii | Skipped) -> str:
    if isinstance(found, Skipped):
        return number(None)
    return f"above {found.edges[-1]:g}" if found.median is None else number(found.median)


def _times(text: str, within: str) -> int:
    """Return how often `text` occurs, overlaps counted."""
    return sum(within.startswith(text, place) for place in range(len(within)))


def _lines(text: str) -> str:
    """Mark ends of lines, since a token may consist of nothing else."""
    return "↵".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
