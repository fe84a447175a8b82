"""The HTML page of a mismatch report, and its tables for page and terminal: remedies side by side, layers and tails.

Plots are data for plotly, as in `holdfast.report.plots`; a remedy has the colour and the mark of its place in REMEDIES.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

from holdfast.mismatch import MismatchReport
from holdfast.mismatch.report import Estimate, LayerSets, Row
from holdfast.report.export import Page
from holdfast.report.first_screen import Bar, figure
from holdfast.report.page_shell import THEMES, how_it_was_run, listed, number, percent, signed, write_report_page
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
    line_of,
    shares_axis,
)
from holdfast.report.tables import Cell, Table

NO_INTERVAL, NOT_CLEAR = "no interval", "no clear difference"
REMEDIES = {
    "live": "the model's own router in both runs.",
    "replay": "training uses the experts of the rollout, with live weights. Only the trainer changes.",
    "smooth": "this router in both runs, put in without training and calibrated. Its sets differ where weights are near 0.",
    "float32": "scores in float32 in both runs, from router weights that are not rounded. Other activations still are.",
}


def write_mismatch(report: MismatchReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a report, given as such, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(MismatchReport, report, path, force=force)


def mismatch_page(report: MismatchReport) -> Page:
    """Return the page as data, to be rendered or exported."""
    plots = {kind: [plot for plot in rollout_plots(report, kind) if plot.data] for kind in report.rollouts}
    parts = [(kind, remedies_table(report, kind), changes_table(report, kind), drawn) for kind, drawn in plots.items()]
    bars = {f"Mean gap and price. {rollout_name(report, kind)}": remedy_bars(report, kind) for kind in report.rollouts}
    how = how_it_was_run(report)
    del how["Settings"]["tail"]
    return Page(
        "mismatch.html",
        chain(*plots.values()),
        brief=parts[0][1] if parts else Table("", ["remedy"], []),
        sentences=[verdict(report)],
        title=report.model.name,
        summary=" ".join(summary(report)),
        bars={name: shown for name, shown in bars.items() if shown},
        parts_=parts,
        about=REMEDIES,
        skipped=Table.of(
            "What was skipped",
            [{"remedy": f"{row.remedy}, {row.rollout} rollout", "why": row.reason} for row in report.skipped],
        ),
        no_logprobs=report.data.logprobs is False,
        how=how,
        exported=(bars, summary(report)),
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
    """Return which remedies clearly lower the mean gap, against the first kind of rollout."""
    if not report.rows:
        said = "No row could be measured; the reasons are below."
    else:
        rows = rows_of(report, report.rollouts[0])
        known = {row.label: row.logprobs.change.mean for row in rows if row.logprobs and row.logprobs.change}
        lower = [label for label, change in known.items() if change.high is not None and change.high < 0]
        gap = f"the gap between training and the {report.rollouts[0]} rollout"
        if lower:
            of = f"Of {len(known)} {'remedy' if len(known) == 1 else 'remedies'}"
            said = f"{of}, {listed(lower)} clearly {'lowers' if len(lower) == 1 else 'lower'} {gap}."
        elif any(change.high is not None for change in known.values()):
            said = f"No remedy clearly lowers {gap}."
        else:
            said = f"Nothing can be concluded about {gap}: {'there is one sequence' if known else 'there are no remedies'}."
    return said if report.status == "complete" else f"Interrupted: this page covers the finished rows. {said}"


def remedy_bars(report: MismatchReport, kind: str) -> list[Bar]:
    """Return a bar for each remedy: its mean gap with the interval, whether it is lower than that of live, and its price."""
    rows = [
        (row, row.logprobs.mean) for row in rows_of(report, kind) if row.logprobs and row.logprobs.mean.value is not None
    ]
    longest = max((found.high or found.value or 0 for _, found in rows), default=0) or 1
    bars = []

    def place(value: float) -> float:
        return round(100 * value / longest, 2)

    for row, found in rows:
        change = row.logprobs.change if row.logprobs else None
        costs = [f"loss {figure(row.loss)}"] if row.loss is not None else []
        costs += [f"{number(row.experts_per_token)} experts per token"] if row.experts_per_token is not None else []
        interval = None if found.low is None or found.high is None else (place(found.low), place(found.high))
        colour, width = place_of(row) % len(THEMES["light"]["routers"]), place(found.value or 0)
        said = "" if change is None else lower_or_higher(change.mean)
        bars.append(Bar(row.label, colour, width, interval, f"{found.value:#.3g}", said, ", ".join(costs)))
    return bars


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
    said = lower_or_higher(found)
    if said == NO_INTERVAL:
        return "from one sequence there is no interval, so nothing can be concluded"
    words = "does not clearly differ from live" if said == NOT_CLEAR else f"is {said}"
    return f"the mean gap {words} (95% interval of the change {found.low:+.3g} to {found.high:+.3g})"


def lower_or_higher(found: Estimate) -> str:
    """Return a change from live in a few words."""
    if found.value is None or found.low is None or found.high is None:
        return NO_INTERVAL
    if found.low <= 0 <= found.high:
        return NOT_CLEAR
    return f"{'lower' if found.value < 0 else 'higher'} by {abs(found.value):#.3g}"


def with_interval(found: Estimate, shown: Callable[[float | None], Cell]) -> Cell:
    """Return a number with its interval as text."""
    if found.low is None or found.high is None:
        return shown(found.value)
    value, low, high = map(shown, (found.value, found.low, found.high))
    return Cell(f"{value} ({low} to {high})", value.value, low.value, high.value)


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
    """Draw the tails of the gaps of log-probabilities and the differences of sets against one kind of rollout."""
    decisions = "The share of tokens whose set of experts in this layer is not that of the rollout."
    tokens = "The share of tokens with a different set of experts in this layer or an earlier one."
    one, many = "Routing decisions with different experts, by layer", "Tokens with different experts, up to each layer"
    return [
        tail(report, kind),
        by_layer(report, kind, f"layers-{kind}", one, decisions, lambda layer: layer.routers_differ),
        by_layer(report, kind, f"tokens-{kind}", many, tokens, lambda layer: layer.tokens_differ_so_far),
    ]


def tail(report: MismatchReport, kind: str) -> Plot:
    """Draw the share of tokens with a larger gap, for each size of the gap."""
    data: list[Trace] = []
    for row in rows_of(report, kind):
        if row.logprobs is None:
            continue
        y = [100 * value if value > 0 else None for value in row.logprobs.tail]  # a log axis has no 0
        place, name = place_of(row), escaped(row.label)
        hover = f"{name}: %{{y:.3g}}% of the tokens above %{{x:.3g}}"
        data.append(line_of(place, report.settings.tail, y, hover, DASHES[place % len(DASHES)], name=name))
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
        bars = error_bars(*((each.value, each.low, each.high) for each in found), scale=100) | THIN
        data.append(curve_of(place_of(row), None, x, y, hover, name=escaped(row.label), error_y=bars))
    layers = max(len(row.sets.layers) for row in rows)
    layout = {"xaxis": layer_axis(layers), "yaxis": shares_axis(), "legend": LEGEND}
    return Plot(name, title, f"{caption} Bars: 95% intervals.", data, layout)
