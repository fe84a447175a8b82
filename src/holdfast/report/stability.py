"""How steady the choice of experts is: while the router learns, and when its input is disturbed."""

import statistics

from holdfast.report.results import Cell, Results
from holdfast.report.traces import ALL_LAYERS, Plot, Trace, curve_of, label, layer_axis, range_over_layers
from holdfast.report.verdict import listed


def fluctuation(results: Results) -> Plot:
    data: list[Trace] = []
    for place, row in enumerate(results.rows):
        for layer, changes in _changes(results.cells_of(row.router)).items():
            steps = sorted(changes)
            means = [statistics.fmean(changes[step]) for step in steps]
            hover = f"{label(row.router)}, up to step %{{x}}: %{{y:.2f}}% of the tokens<extra></extra>"
            data.append(curve_of(place, layer, steps, means, hover))
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
    }
    caption = (
        "Routing fluctuation: the share of tokens that go to other experts than they did at the snapshot before, the mean "
        "over seeds. Lower is steadier."
    )
    return Plot("fluctuation", "Fluctuation while training", caption, data, layout)


def consistency(results: Results) -> Plot:
    data: list[Trace] = []
    layers = 0
    for place, row in enumerate(results.rows):
        found: dict[int, list[float]] = {}
        for cell in results.cells_of(row.router):
            for layer, share in enumerate(cell.consistency.layers if cell.consistency else []):
                if share is not None:
                    found.setdefault(layer, []).append(100 * share)
        if found:
            hover = f"{label(row.router)}, layer %{{x:.0f}}: %{{y:.2f}}% of the tokens<extra></extra>"
            data.append(range_over_layers(place, len(results.rows), sorted(found.items()), hover))
            layers = max(layers, max(found) + 1)
    layout = {"xaxis": layer_axis(layers), "yaxis": {"title": {"text": "% of the tokens"}}}
    disturbed = list(dict.fromkeys(cell.consistency.what for cell in results.cells if cell.consistency))
    caption = (
        f"The share of tokens that keep their experts under {listed(disturbed) if disturbed else 'noise'}: the mean over "
        "seeds, with bars from the lowest seed to the highest. Higher is steadier."
    )
    return Plot("consistency", "Consistency per layer", caption, data, layout)


def _changes(cells: list[Cell]) -> dict[str, dict[int, list[float]]]:
    """Percent of the tokens that changed experts, by layer and by the step at which the later snapshot was taken."""
    found: dict[str, dict[int, list[float]]] = {ALL_LAYERS: {}}
    for snapshots in (cell.snapshots for cell in cells if cell.snapshots):
        for layer in snapshots.layers:
            for step, share in zip(snapshots.steps[1:], layer.fluctuation, strict=True):
                if share is not None:
                    for name in (ALL_LAYERS, str(layer.layer)):
                        found.setdefault(name, {}).setdefault(step, []).append(100 * share)
    return {name: changes for name, changes in found.items() if changes}
