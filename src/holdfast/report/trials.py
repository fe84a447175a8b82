"""Every attack that was tried, beside the one that routers are compared by: a table and a plot."""

from collections.abc import Iterator, Sequence

from holdfast.report.results import Cell, Results
from holdfast.report.traces import Plot, Trace, folded, height, label, mean_of, names_axis, symbol, trace
from holdfast.report.verdict import figure


def every_attack_table(results: Results) -> Iterator[dict[str, str]]:
    """A row for each router, by column; none where nothing was tried."""
    names = _names(results)
    for row in results.rows if names else []:
        cells = results.cells_of(row.router)
        yield {name: figure(mean_of(_figures(cells, name), float)) for name in names}


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


def _names(results: Results) -> list[str]:
    """In the order in which they are first met."""
    return list(dict.fromkeys(name for cell in results.cells for name in cell.trials))


def _figures(cells: Sequence[Cell], name: str) -> list[float]:
    """Of the seeds that have one."""
    found = [cell.trials[name].figure for cell in cells if name in cell.trials]
    return [number for number in found if number is not None]
