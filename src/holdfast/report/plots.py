"""The plots of a comparison, as data for plotly. The page's script adds colours, which depend on the reader's theme."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from holdfast.report.attack_curves import attack_curves
from holdfast.report.page_shell import listed
from holdfast.report.plot_data import (
    ALL_LAYERS,
    Plot,
    Trace,
    by_layer,
    consistency,
    cost,
    curve_of,
    dash,
    escaped,
    every_attack,
    fluctuation,
    layer_axis,
    names_axis,
    plot_height,
    range_over_layers,
    symbol,
    tick_step,
    trace,
    wrapped_label,
)
from holdfast.report.stored_comparison import Difference, Layer, Results

POINTS = 200  # points of a training curve at most; longer curves are averaged


def plots(results: Results) -> list[Plot]:
    """Return the plots that have data."""
    made = [
        clean_and_attacked,
        cost,
        differences,
        every_attack,
        training,
        load,
        entropy,
        near_ties,
        fluctuation,
        consistency,
    ]
    found = [plot for plot in (make(results) for make in made) if plot.data]
    place = 1 + next((number for number, plot in enumerate(found) if plot.name == "every-attack"), len(found) - 1)
    return [*found[:place], *attack_curves(results), *found[place:]]


def clean_and_attacked(results: Results) -> Plot:
    """Draw each router's result on clean and on attacked data."""
    measure, data = results.run.measure, []
    for place, row in enumerate(results.rows):
        name, filled, hollow = wrapped_label(row.label), symbol(place), f"{symbol(place)}-open"
        clean = row.clean_beside_attacked
        if clean is None or row.attacked is None:
            continue
        cells = results.cells_of(row)
        for seeds, shape in (
            ([cell.clean.figure if cell.attacked.clean is None else cell.attacked.clean for cell in cells], filled),
            ([cell.attacked.figure for cell in cells], hollow),
        ):
            small = {"size": 5, "symbol": shape}
            data.append(
                trace(place, seeds, [name] * len(seeds), mode="markers", marker=small, opacity=0.45, hoverinfo="skip")
            )
        data.append(trace(place, [clean, row.attacked], [name] * 2, mode="lines", line={"width": 2}, hoverinfo="skip"))
        for text, mean, shape in (("clean", clean, filled), ("attacked", row.attacked, hollow)):
            marker = {"size": 12, "symbol": shape, "line": {"width": 2}}
            hover = f"%{{y}}, {text}: %{{x:.{measure.digits}f}}"
            data.append(trace(place, [mean], [name], hovertemplate=hover, mode="markers", marker=marker))
    layout = {"xaxis": {"title": {"text": escaped(measure.name)}}, "yaxis": names_axis(), "height": plot_height(data)}
    caption = (
        f"{measure.sentence} Filled marks are clean, open marks attacked: {measure.attack}. Large marks are means over "
        "seeds, small ones single seeds."
    )
    if results.rows[0].attacks_some:
        caption += f" Both are of the {results.rows[0].examples['attacked']} attacked examples."
    if results.targets_are_attacked:
        caption += " The attack also changes the targets, so compare routers, not filled marks with open ones."
    return Plot("clean-attacked", "Clean and attacked", caption, data, layout)


def differences(results: Results) -> Plot:
    """Draw each router's difference to the baseline, with its interval."""
    baseline, data = results.rows[0], []
    for place, row in enumerate(results.rows):
        for text, found, shape in (
            ("clean", row.clean_difference, symbol(place)),
            ("attacked", row.attacked_difference, f"{symbol(place)}-open"),
        ):
            if found is None or found.mean is None:
                continue
            data.append(
                trace(
                    place,
                    [found.mean],
                    [wrapped_label(f"{row.label}, {text}")],
                    error_x=_error(found),
                    hovertemplate="%{y}: %{x:+.3g}",
                    mode="markers",
                    marker={"size": 10, "symbol": shape, "line": {"width": 2}},
                )
            )
    layout = {
        "xaxis": {"title": {"text": "difference"}},
        "yaxis": names_axis(),
        "shapes": [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot"}}],
        "height": plot_height(data),
    }
    known = [one for row in results.rows for one in (row.clean_difference, row.attacked_difference) if one is not None]
    claims = sum(one.kind != "unknown" for one in known)
    side = "left" if results.run.measure.better == "lower" else "right"
    caption = (
        f"In {results.run.measure.name}, paired by seed and by test example: {side} of 0 is better than {baseline.router}"
        f"{' in the same setting' if results.swept else ''}. "
    )
    if claims:
        caption += (
            "An interval that contains 0 is no difference. Intervals are not corrected for their number: without any "
            f"difference, about {0.05 * claims:.2g} of {claims} would miss 0 by chance."
        )
    else:
        overs = dict.fromkeys(one.over for one in known if one.over)
        caption += f"The 95% intervals are for {listed([str(one) for one in overs])}: nothing is claimed." if overs else ""
    return Plot("differences", "Difference to the baseline", caption, data, layout)


def training(results: Results) -> Plot:
    """Draw the training loss."""
    data: list[Trace] = []
    longest = 0
    for place, row in enumerate(results.rows):
        logs = [cell.log for cell in results.cells_of(row)]
        curves = [{entry.step: entry.loss for entry in log if entry.loss is not None} for log in logs]
        shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not shared:
            continue
        longest = max(longest, len(shared))
        for curve in curves if len(curves) > 1 else []:
            steps, losses = _thinned(shared, [curve[step] for step in shared])
            data.append(trace(place, steps, losses, mode="lines", line={"width": 1}, opacity=0.3, hoverinfo="skip"))
        steps, losses = _thinned(shared, [statistics.fmean(curve[step] for curve in curves) for step in shared])
        style = {"width": 2, "dash": dash(place)}
        hover = f"{escaped(row.label)}, step %{{x}}: %{{y:.3f}}<extra></extra>"
        data.append(trace(place, steps, losses, mode="lines", line=style, hovertemplate=hover))
    width = math.ceil(longest / POINTS)
    caption = "Training loss: the mean over seeds; thin lines are single seeds." + (
        f" Each point is the mean of {width} steps." if width > 1 else ""
    )
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "loss"}}}
    return Plot("training", "Training curves", caption, data, layout)


def load(results: Results) -> Plot:
    """Draw the load of experts, sorted, relative to even load."""
    data: list[Trace] = []
    most = 0
    for place, row in enumerate(results.rows):
        for layer, states in by_layer(results.cells_of(row)):
            curves = [_relative_load(state) for state in states]
            curves = [curve for curve in curves if len(curve) == len(curves[0])]
            mean = [statistics.fmean(same) for same in zip(*curves, strict=True)]
            most = max(most, len(mean))
            hover = f"{escaped(row.label)}, rank %{{x}}: %{{y:.2f}} times the even load<extra></extra>"
            data.append(curve_of(place, layer, list(range(1, len(mean) + 1)), mean, hover))
    layout = {
        "xaxis": {"title": {"text": "experts, the busiest first"}, "tick0": 1, "dtick": tick_step(most)},
        "yaxis": {"title": {"text": "load / even load"}, "rangemode": "tozero"},
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dot"}}],
    }
    caption = (
        "The number of tokens that selected each expert, divided by the even load (1, dotted); 0 is a dead expert. Experts "
        "have no common order between runs, so they are sorted by load before the mean over seeds. Clean data."
    )
    return Plot("load", "Load per expert", caption, data, layout)


def entropy(results: Results) -> Plot:
    """Draw the entropy of the gates by layer."""
    data: list[Trace] = []
    most, layers = set(), 0
    for place, row in enumerate(results.rows):
        found = []
        for layer, states in by_layer(results.cells_of(row)):
            values = [state.entropy for state in states if state.entropy is not None]
            if layer == ALL_LAYERS or not values:
                continue
            found.append((states[0].layer, values))
            most.add(math.log(states[0].experts))
            layers = max(layers, states[0].layer + 1)
        if found:
            hover = f"{escaped(row.label)}, layer %{{x:.0f}}: %{{y:.3f}} nats<extra></extra>"
            data.append(range_over_layers(place, len(results.rows), found, hover))
    ceiling = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level, "line": {"dash": "dot"}}
        for level in sorted(most)
    ]
    layout = {
        "xaxis": layer_axis(layers),
        "yaxis": {"title": {"text": "entropy, nats"}},
        "shapes": ceiling,
    }
    caption = (
        "Entropy of the gates, the mean over tokens and seeds; bars reach from the lowest seed to the highest. The dotted "
        "line is the logarithm of the number of experts, the entropy of a uniform router. Clean data."
    )
    return Plot("entropy", "Routing entropy per layer", caption, data, layout)


def near_ties(results: Results) -> Plot:
    """Draw the share of near-ties by the width of the gap."""
    data: list[Trace] = []
    for place, row in enumerate(results.rows):
        for layer, states in by_layer(results.cells_of(row)):
            shares: dict[float, list[float]] = {}
            for strip in (strip for state in states for strip in state.near_ties.strips):
                if strip.share is not None:
                    shares.setdefault(strip.width, []).append(100 * strip.share)
            means = [statistics.fmean(values) or None for _, values in sorted(shares.items())]  # a log axis has no 0
            hover = f"{escaped(row.label)}, closer than %{{x}}: %{{y:.3g}}% of the tokens<extra></extra>"
            data.append(curve_of(place, layer, sorted(shares), means, hover))
    widths = sorted({x for curve in data for x in curve["x"]})
    ticks = {"tickmode": "array", "tickvals": widths, "ticktext": [f"{width:g}" for width in widths]}
    layout = {
        "xaxis": {"title": {"text": "gap to the next expert"}, "type": "log", **ticks},
        "yaxis": {"title": {"text": "% of the tokens"}, "type": "log", "dtick": 1, "exponentformat": "none"},
    }
    caption = (
        "The share of tokens that are near-ties: the last selected expert and the next differ by less than the gap on the x "
        "axis, so that a change of this size in their scores can flip them. Both axes are logarithmic; a share of 0 has no "
        "point. Lower is more stable, except for smooth routers, whose output does not jump at a flip. Clean data."
    )
    return Plot("near-ties", "Near-ties", caption, data, layout)


def _relative_load(layer: Layer) -> list[float]:
    even = statistics.fmean(layer.load.percent) if layer.load.percent else 0.0
    return sorted((percent / even if even else 0.0 for percent in layer.load.percent), reverse=True)


def _thinned(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return means over neighbouring steps, so that at most POINTS points are left."""
    width = math.ceil(len(steps) / POINTS)
    parts = range(0, len(steps), width)
    return (
        [statistics.fmean(steps[start : start + width]) for start in parts],
        [statistics.fmean(losses[start : start + width]) for start in parts],
    )


def _error(found: Difference) -> dict[str, Any]:
    if found.mean is None or found.low is None or found.high is None:
        return {"visible": False}
    return {"type": "data", "symmetric": False, "array": [found.high - found.mean], "arrayminus": [found.mean - found.low]}
