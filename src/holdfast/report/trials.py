"""Every attack that was tried, beside the one that routers are compared by: a table and a plot."""

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.report.results import Cell, Results
from holdfast.report.traces import Plot, Trace, folded, height, label, mean_of, names_axis, symbol, trace
from holdfast.report.verdict import figure, rise


def every_attack_table(results: Results) -> Iterator[dict[str, str]]:
    """A row for each router, by column; none where nothing was tried."""
    names = _names(results)
    for row in results.rows if names else []:
        cells = results.cells_of(row.router)
        columns = {}
        for name in names:
            columns[name] = figure(mean_of(_figures(cells, name), float))
            if any(trial.cost for cell in results.cells if (trial := cell.trials.get(name))):
                nats = [trial.cost.mean for cell in cells if (trial := cell.trials.get(name)) and trial.cost]
                mean = mean_of([number for number in nats if number is not None], float)
                columns[f"{name}, cost on untouched words"] = figure(None) if mean is None else f"{rise(mean):+.2f}%"
        yield columns


def every_attack(results: Results) -> Plot:
    measure, data = results.run.measure, list[Trace]()
    for place, row in enumerate(results.rows):
        means: dict[str, float] = {}
        for name in _names(results):
            seeds = _figures(results.cells_of(row.router), name)
            mean = mean_of(seeds, float)
            if mean is None:
                continue
            means[folded(name)] = mean
            small = {"size": 5, "symbol": symbol(place)}
            where = [folded(name)] * len(seeds)
            data.append(trace(place, seeds, where, mode="markers", marker=small, opacity=0.45, hoverinfo="skip"))
        if means:
            large = {"size": 11, "symbol": symbol(place), "line": {"width": 2}}
            hover = f"{label(row.router)}, %{{y}}: %{{x:.2f}}<extra></extra>"
            data.append(trace(place, [*means.values()], [*means], mode="markers", marker=large, hovertemplate=hover))
    layout = {"xaxis": {"title": {"text": label(measure.name)}}, "yaxis": names_axis(), "height": height(data)}
    caption = f"{measure.sentence} Large marks are means over seeds, small ones single seeds."
    return Plot("every-attack", "Every attack", caption, data, layout)


def cost(results: Results) -> Plot:
    """The cost of the attack on untouched words, with its interval; nothing to show where it was not measured."""
    data = list[Trace]()
    for place, row in enumerate(results.rows):
        if row.cost is None or row.cost.mean is None:
            continue
        mean, low, high = (None if nats is None else rise(nats) for nats in (row.cost.mean, row.cost.low, row.cost.high))
        error: dict[str, Any] = {"visible": False}
        if mean is not None and low is not None and high is not None:
            error = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
        marker = {"size": 10, "symbol": symbol(place), "line": {"width": 2}}
        hover = f"{label(row.router)}: %{{x:+.2f}}%<extra></extra>"
        data.append(
            trace(place, [mean], [folded(row.router)], mode="markers", marker=marker, error_x=error, hovertemplate=hover)
        )
    layout = {
        "xaxis": {"title": {"text": "rise of the perplexity, %"}, "rangemode": "tozero"},
        "yaxis": names_axis(),
        "shapes": [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot"}}],
        "height": height(data),
    }
    caption = (
        "How much the attack raises the perplexity of the words that it left alone, which are the same in both texts, with "
        "95% intervals. Left of 0 it would help."
    )
    return Plot("cost", "Cost of the attack on untouched words", caption, data, layout)


def _names(results: Results) -> list[str]:
    """In the order in which they are first met."""
    return list(dict.fromkeys(name for cell in results.cells for name in cell.trials))


def _figures(cells: Sequence[Cell], name: str) -> list[float]:
    """Of the seeds that have one."""
    found = [cell.trials[name].figure for cell in cells if name in cell.trials]
    return [number for number in found if number is not None]
