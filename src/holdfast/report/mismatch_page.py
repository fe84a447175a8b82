"""The HTML page of a mismatch report, and its tables for page and terminal: remedies side by side, layers and tails.

Plots are data for plotly, as in `holdfast.report.plots`; a remedy has the colour and the mark of its place in REMEDIES.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from holdfast.mismatch import MismatchReport
from holdfast.mismatch.report import Estimate, LayerSets, Row
from holdfast.report.page_shell import how_it_was_run, number, percent, render_template, signed, write_report_page
from holdfast.report.plot_data import (
    DASHES,
    LEGEND,
    LOGARITHMIC,
    THIN,
    Plot,
    Trace,
    axis,
    beside,
    curve_of,
    error_bars,
    escaped,
    layer_axis,
    names_axis,
    plot_height,
    shares_axis,
    symbol,
    trace,
    wrapped_label,
)
from holdfast.report.tables import Table

REMEDIES = {
    "live": "the model's own router in both runs.",
    "replay": "training uses the experts of the rollout, with live weights. Only the trainer changes.",
    "smooth": "this router in both runs, put in without training and calibrated. Its sets differ where weights are near 0.",
    "float32": "scores in float32 in both runs, from router weights that are not rounded. Other activations still are.",
}


def write_mismatch(report: MismatchReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a report, given as such, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(MismatchReport, report, path, render_mismatch, force=force)


def render_mismatch(report: MismatchReport) -> str:
    """Return the page as HTML."""
    plots = {kind: [plot for plot in rollout_plots(report, kind) if plot.data] for kind in report.rollouts}
    parts = [(kind, remedies_table(report, kind), changes_table(report, kind), drawn) for kind, drawn in plots.items()]
    how = how_it_was_run(report)
    del how["Settings"]["tail"]
    return render_template(
        "mismatch.html",
        chain(*plots.values()),
        title=report.model.name,
        verdict=verdict(report),
        parts_=parts,
        about=REMEDIES,
        skipped=Table.of(
            "What was skipped",
            [{"remedy": f"{row.remedy}, {row.rollout} rollout", "why": row.reason} for row in report.skipped],
        ),
        no_logprobs=report.data.logprobs is False,
        how=how,
    )


def rows_of(report: MismatchReport, kind: str) -> list[Row]:
    return [row for row in report.rows if row.rollout == kind]


def rollout_name(report: MismatchReport, kind: str) -> str:
    """Return a heading for one kind of rollout."""
    if kind == "recorded":
        return f"Recorded rollout: {report.data.engine}"
    chosen = report.settings
    way = ", token by token" if chosen.rollout_decode else ""
    return f"Simulated rollout: {chosen.rollout_dtype}, batches of {chosen.rollout_batch}{way}"


def verdict(report: MismatchReport) -> str:
    """Return the main numbers as one paragraph."""
    parts = [] if report.status == "complete" else ["Interrupted: this page covers the finished rows."]
    if not report.rows:
        return " ".join([*parts, "No row could be measured; the reasons are below."])
    return " ".join([*parts, *summary(report)])


def summary(report: MismatchReport) -> list[str]:
    """Return the main numbers as sentences, of the first kind of rollout: the page and the terminal have the same ones."""
    parts: list[str] = []
    kind = report.rollouts[0] if report.rollouts else ""
    low, high = report.settings.clip
    rows = {row.remedy: row for row in rows_of(report, kind)}
    live, replay = rows.get("live"), rows.get("replay")
    if live is not None:
        parts.append(
            f"In training, {percent(live.sets.routers_differ.value)} of the routing decisions (one token in one layer) have "
            f"different experts than in the {kind} rollout, and {percent(live.sets.tokens_differ.value)} of the tokens have "
            "different experts in at least one layer."
        )
    if live is not None and live.logprobs is not None:
        parts.append(
            f"The log-probability of a token differs by {number(live.logprobs.mean.value)} on average and by "
            f"{number(live.logprobs.largest)} at most; {percent(live.logprobs.outside.value)} of the tokens have a ratio of "
            f"probabilities outside {low:g} to {high:g}."
        )
        if replay is not None and replay.logprobs is not None and replay.logprobs.change is not None:
            parts.append(
                f"With replay by {number(replay.logprobs.mean.value)} and {number(replay.logprobs.largest)}, and "
                f"{percent(replay.logprobs.outside.value)} are outside; {change_words(replay.logprobs.change.mean)}."
            )
    simulated = {row.remedy: row for row in rows_of(report, "simulated")}
    if "live" in simulated and "smooth" in simulated:
        before, after = simulated["live"], simulated["smooth"]
        parts.append(
            f"{after.label} changes the model: its loss is {number(after.loss, 4)} (live {number(before.loss, 4)}), with "
            f"{number(after.experts_per_token)} experts per token (live {number(before.experts_per_token)})."
        )
    return parts


def change_words(found: Estimate) -> str:
    """Return a change from live as text, with its interval."""
    if found.value is None or found.low is None or found.high is None:
        return "from one sequence there is no interval, so nothing can be concluded"
    interval = f"95% interval {found.low:+.3g} to {found.high:+.3g}"
    if found.low <= 0 <= found.high:
        return f"the mean gap does not clearly differ from live ({interval})"
    return f"the mean gap changes by {found.value:+.3g} ({interval})"


def with_interval(found: Estimate, shown: Callable[[float | None], str]) -> str:
    """Return a number with its interval as text."""
    if found.low is None or found.high is None:
        return shown(found.value)
    return f"{shown(found.value)} ({shown(found.low)} to {shown(found.high)})"


def remedies_table(report: MismatchReport, kind: str) -> Table:
    """Return the numbers of each remedy against one kind of rollout."""
    rows = []
    for row in rows_of(report, kind):
        cells = {
            "remedy": row.label,
            "routing decisions that differ": with_interval(row.sets.routers_differ, percent),
            "tokens that differ": with_interval(row.sets.tokens_differ, percent),
        }
        gaps = row.logprobs
        if gaps is not None:
            cells |= {"mean gap": with_interval(gaps.mean, number), "std of the gap": number(gaps.std)}
            cells |= {f"{name}% of gaps below": with_interval(one, number) for name, one in gaps.quantiles.items()}
            cells |= {
                "largest gap": number(gaps.largest),
                "mean ratio": with_interval(gaps.ratio, lambda value: number(value, 5)),
                "outside the clip range": with_interval(gaps.outside, percent),
            }
        cells |= {"loss": number(row.loss, 4), "experts per token": number(row.experts_per_token)}
        rows.append(cells)
    low, high = report.settings.clip
    note = (
        "Gap: |log p(training) - log p(rollout)| of a token. A routing decision is one token in one layer. Routing "
        "decisions that differ: the share with a different set of experts than in the rollout. Tokens that differ: the "
        "share of tokens with a different set in at least one layer. Mean ratio: of p(training) / p(rollout); outside the "
        f"clip range: the share of tokens whose ratio is outside {low:g} to {high:g}. Loss and experts per token are those "
        "of the training forward. In brackets: 95% intervals."
    )
    return Table.of(rollout_name(report, kind), rows, note)


def changes_table(report: MismatchReport, kind: str) -> Table:
    """Return what each remedy changes in comparison with live, paired by token."""
    rows = [
        {
            "remedy": row.label,
            "mean gap, minus live": with_interval(row.logprobs.change.mean, signed),
            "share outside the clip range, minus live": with_interval(
                row.logprobs.change.outside, partial(signed, form=".2%")
            ),
            "verdict": change_words(row.logprobs.change.mean),
        }
        for row in rows_of(report, kind)
        if row.logprobs and row.logprobs.change
    ]
    return Table.of("", rows, "The same tokens with each remedy and with the live router. The intervals are paired.")


def place_of(row: Row) -> int:
    """Return the place of a row's remedy among all remedies."""
    return [*REMEDIES].index(row.remedy) if row.remedy in REMEDIES else len(REMEDIES)


def rollout_plots(report: MismatchReport, kind: str) -> list[Plot]:
    """Draw the gaps of log-probabilities and the differences of sets against one kind of rollout."""
    decisions = "The share of tokens whose set of experts in this layer is not that of the rollout."
    tokens = "The share of tokens with a different set of experts in this layer or an earlier one."
    one, many = "Routing decisions with different experts, by layer", "Tokens with different experts, up to each layer"
    return [
        gaps(report, kind),
        tail(report, kind),
        by_layer(report, kind, f"layers-{kind}", one, decisions, lambda layer: layer.routers_differ),
        by_layer(report, kind, f"tokens-{kind}", many, tokens, lambda layer: layer.tokens_differ_so_far),
    ]


def gaps(report: MismatchReport, kind: str) -> Plot:
    """Draw the mean gap of each remedy with its interval."""
    data: list[Trace] = []
    for row in rows_of(report, kind):
        if row.logprobs is None or row.logprobs.mean.value is None:
            continue
        place, found = place_of(row), row.logprobs.mean
        style = {"marker": {"size": 10, "symbol": symbol(place)}, "error_x": _bars([found])}
        hover = f"{escaped(row.label)}: %{{x:.3g}}<extra></extra>"
        data.append(trace(place, [found.value], [wrapped_label(row.label)], mode="markers", hovertemplate=hover, **style))
    x = axis("mean of |log ratio|", rangemode="tozero")
    layout = {"xaxis": x, "yaxis": names_axis(), "height": plot_height(data)}
    caption = (
        "The gap of a token is |log p(training) - log p(rollout)|. Bars: 95% intervals, by drawing sequences. Whether two "
        "remedies differ is in the table of changes, which is paired."
    )
    return Plot(f"gaps-{kind}", "Mean gap of log-probabilities", caption, data, layout)


def tail(report: MismatchReport, kind: str) -> Plot:
    """Draw the share of tokens with a larger gap, for each size of the gap."""
    data: list[Trace] = []
    for row in rows_of(report, kind):
        if row.logprobs is None:
            continue
        y = [100 * value if value > 0 else None for value in row.logprobs.tail]  # a log axis has no 0
        hover = f"{escaped(row.label)}: %{{y:.3g}}% of the tokens above %{{x:.3g}}<extra></extra>"
        line = {"width": 2, "dash": DASHES[place_of(row) % len(DASHES)]}
        style = {"line": line, "name": escaped(row.label), "hovertemplate": hover}
        data.append(trace(place_of(row), report.settings.tail, y, mode="lines", **style))
    x, y_axis = axis("|log ratio|", **LOGARITHMIC), axis("% of the tokens above", **LOGARITHMIC)
    layout = {"xaxis": x, "yaxis": y_axis, "legend": LEGEND}
    caption = (
        "The tail: how many tokens have a gap larger than the value on the x axis. A curve that ends further left has a "
        "shorter tail. Both axes are logarithmic; where no token is left, a curve ends."
    )
    return Plot(f"tail-{kind}", "Tail of the gap", caption, data, layout)


def by_layer(
    report: MismatchReport, kind: str, name: str, title: str, caption: str, read: Callable[[LayerSets], Estimate]
) -> Plot:
    """Draw a share of tokens by layer, a curve for each remedy."""
    data, rows = [], rows_of(report, kind)
    for index, row in enumerate(rows):
        found = [read(layer) for layer in row.sets.layers]
        hover = f"{escaped(row.label)}, layer %{{x:.0f}}: %{{y:.3g}}%<extra></extra>"
        x = beside((layer.layer for layer in row.sets.layers), index, len(rows))
        y = [None if each.value is None else 100 * each.value for each in found]
        style = {"name": escaped(row.label), "error_y": _bars(found, 100)}
        data.append(curve_of(place_of(row), None, x, y, hover, **style))
    layers = max(len(row.sets.layers) for row in rows)
    layout = {"xaxis": layer_axis(layers), "yaxis": shares_axis(), "legend": LEGEND}
    return Plot(name, title, f"{caption} Bars: 95% intervals.", data, layout)


def _bars(found: list[Estimate], scale: float = 1.0) -> dict[str, Any]:
    points = ((each.value, each.low, each.high) for each in found)
    return error_bars(*(tuple(None if end is None else scale * end for end in point) for point in points)) | THIN
