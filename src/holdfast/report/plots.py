"""The plots of a comparison, as data for plotly. The page's script adds colours, which depend on the reader's theme."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from holdfast.metrics import Difference
from holdfast.metrics.paired import EVERYTHING
from holdfast.report.comparison_tables import attack_names, intervals_cover
from holdfast.report.page_shell import listed, rise
from holdfast.report.plot_data import (
    ALL_LAYERS,
    THIN,
    Plot,
    Trace,
    axis,
    curve_of,
    dash,
    error_bars,
    escaped,
    layer_axis,
    line_at,
    line_of,
    names_axis,
    plot_height,
    range_over_layers,
    relative_load,
    symbol,
    tick_step,
    trace,
    wrapped_label,
)
from holdfast.train.results import CellResult, Layer, Results

LEVELS = 255  # budgets are shown as multiples of 1/255, the step of a pixel's value in a file
ERRORS = {"figure": ("error", ""), "top5": ("top-5 error", ", top 5")}  # key of a curve: its name, and the end of a title
MOST_PANELS, PANEL = 8, 84  # of differences over training, and the height of one in pixels
CARRIED = "What an attack found at a smaller budget counts at larger ones too (a universal perturbation as a whole)."


def plots(results: Results) -> list[Plot]:
    """Return the plots that have data."""
    every = [
        *(draw(results) for draw in (differences, clean_and_attacked, cost, every_attack)),
        *attack_curves(results),
        price(results),
        *over_training(results),
        *(draw(results) for draw in (load, entropy, near_ties, consistency)),
    ]
    return [plot for plot in every if plot.data]


def clean_and_attacked(results: Results) -> Plot:
    """Draw each router's result on clean and on attacked data."""
    measure, data = results.run.measure, []
    for place, row in enumerate(results.rows):
        name, filled, hollow = wrapped_label(row.label), symbol(place), f"{symbol(place)}-open"
        clean = row.clean_beside_attacked
        if clean is None or row.attacked is None:
            continue
        cells = results.cells_of(row)
        seeds = [cell.clean.figure if cell.attacked.clean is None else cell.attacked.clean for cell in cells]
        data.append(_single_seeds(place, seeds, name, filled))
        data.append(_single_seeds(place, [cell.attacked.figure for cell in cells], name, hollow))
        data.append(trace(place, [clean, row.attacked], [name] * 2, mode="lines", line={"width": 2}, hoverinfo="skip"))
        for text, mean, shape in (("clean", clean, filled), ("attacked", row.attacked, hollow)):
            data.append(_marks(place, [mean], [name], 12, shape, f"%{{y}}, {text}: %{{x:.{measure.digits}f}}"))
    caption = (
        f"{measure.sentence} Filled marks are clean, open marks attacked: {measure.attack}. Large marks are means over "
        "seeds, small ones single seeds."
    )
    if results.rows[0].attacks_some:
        caption += f" Both are of the {results.rows[0].examples['attacked']} attacked examples."
    if results.targets_are_attacked:
        caption += " The attack also changes the targets, so compare routers, not filled marks with open ones."
    return Plot("clean-attacked", "Clean and attacked", caption, data, _names_layout(data, measure.name))


def differences(results: Results) -> Plot:
    """Draw each router's difference to the baseline, with its interval."""
    baseline, data = results.rows[0], []
    for place, row in enumerate(results.rows):
        for text, found, shape in (
            ("clean", row.clean_difference, symbol(place)),
            ("attacked", row.attacked_difference, f"{symbol(place)}-open"),
        ):
            if found is None:
                continue
            label = wrapped_label(f"{row.label}, {text}")
            bars = error_bars((found.mean, found.low, found.high))
            data.append(_marks(place, [found.mean], [label], 10, shape, "%{y}: %{x:+.3g}", error_x=bars))
    layout = _names_layout(data, "difference") | {"shapes": [line_at("x", 0)]}
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


Curves = Callable[[CellResult], tuple[Sequence[float], Sequence[float | None]]]


def over_training(results: Results) -> Iterator[Plot]:
    """Yield what was logged in training: the routers' differences to the baseline, and the level of the baseline."""
    width = max([1, *(cell.curve.width for cell in results.cells)])
    each = f" Each point is the mean of {width} steps." if width > 1 else ""
    perplexity = " Its exponential is the perplexity." if results.run.measure.noun == "perplexity" else ""
    held_out = "on held-out data (training.validate_every)"

    def losses(cell: CellResult) -> tuple[Sequence[float], Sequence[float | None]]:
        return cell.validation.steps, cell.validation.losses

    def figures(cell: CellResult) -> tuple[Sequence[float], Sequence[float | None]]:
        return cell.validation.steps[: len(cell.validation.figures)], cell.validation.figures

    kinds: tuple[tuple[str, str, str, str, Curves], ...] = (
        ("training", "Training loss", "loss", f"in training.{each}", lambda cell: (cell.curve.steps, cell.curve.losses)),
        ("validation", "Validation loss", "loss", f"{held_out}.{perplexity}", losses),
        ("validation-figure", "Validation error", "error", f"{held_out}; lower is better.", figures),
    )
    name = results.baseline.router
    for key, title, what, where, points in kinds:
        caption = (
            f"The {what} minus that of {name} with the same seed, at the same step, {where} Below 0 is better than {name}. "
            "Lines are means over seeds, bands reach from the lowest seed to the highest."
        )
        data = _differences_over_training(results, points)
        layout = _panels(data, [row.label for row in results.rows], f"{what}, difference")
        yield Plot(key, f"{title}: difference to {name}", caption, data, layout)
        caption = f"The {what} {where} The mean over seeds; thin lines are single seeds."
        layout = {"xaxis": axis("step", rangemode="tozero"), "yaxis": axis(what)}
        yield Plot(f"{key}-level", f"{title} of {name}", caption, _levels_over_training(results, points), layout)


def _shared_curves(cells: Sequence[CellResult], points: Curves) -> tuple[list[float], dict[int, list[float]]]:
    """Return the steps at which all of these cells have a value, and their values by seed."""
    curves = {cell.seed: dict(zip(*points(cell), strict=True)) for cell in cells}
    first = next(iter(curves.values()), {})
    shared = [step for step in first if all(curve.get(step) is not None for curve in curves.values())]
    return shared, {seed: [curve[step] or 0.0 for step in shared] for seed, curve in curves.items()}


def _differences_over_training(results: Results, points: Curves) -> list[Trace]:
    """Return for each router a line of mean differences to the baseline of its setting, over a band of single seeds."""
    data: list[Trace] = []
    for place, row in enumerate(results.rows):
        same = [one for one in results.rows if results.is_baseline(one) and one.settings == row.settings]
        if row not in results.others or not same:
            continue
        mine, theirs = ({cell.seed: cell for cell in results.cells_of(one)} for one in (row, same[0]))
        seeds = sorted(mine.keys() & theirs.keys())
        steps, values = _shared_curves([mine[seed] for seed in seeds], points)
        usual_steps, usual = _shared_curves([theirs[seed] for seed in seeds], points)
        at = {step: number for number, step in enumerate(usual_steps)}
        kept = [number for number, step in enumerate(steps) if step in at]
        if not kept:
            continue
        found = [[values[seed][number] - usual[seed][at[steps[number]]] for seed in seeds] for number in kept]
        x = [steps[number] for number in kept]
        if len(seeds) > 1:
            ends = [_rounded(map(max, found)), _rounded(map(min, found))[::-1]]
            data.append(trace(place, x + x[::-1], ends[0] + ends[1], mode="none", fill="toself", hoverinfo="skip"))
        hover, means = f"{escaped(row.label)}, step %{{x}}: %{{y:+.3g}}", _rounded(map(statistics.fmean, found))
        data.append(line_of(place, x, means, hover, dash(place)))
    return data


def _panels(data: Sequence[Trace], labels: Sequence[str], title: str) -> dict[str, Any]:
    """Return the layout of a panel for each router, one below the other with common axes, and move its traces there.

    Bands of several routers in one panel would hide each other. Many routers share one, because panels would be too low.
    """
    routers = list(dict.fromkeys(one["meta"]["router"] for one in data))
    layout: dict[str, Any] = {"xaxis": axis("step", rangemode="tozero"), "yaxis": axis(title), "shapes": [line_at("y", 0)]}
    if not 1 < len(routers) <= MOST_PANELS:
        return layout
    names = {router: "y" if at == 0 else f"y{at + 1}" for at, router in enumerate(routers)}
    layout |= {"height": 60 + PANEL * len(routers), "shapes": [], "annotations": []}
    layout["xaxis"]["anchor"] = names[routers[-1]]
    for at, (router, name) in enumerate(names.items()):
        top = 1 - at / len(routers)
        own = axis(title if at == len(routers) // 2 else "", domain=[top - 0.8 / len(routers), top], nticks=4)
        layout[f"yaxis{name[1:]}"] = own | ({"matches": "y"} if at else {})
        layout["shapes"].append(line_at("y", 0) | {"yref": name})
        place = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        layout["annotations"].append({"text": escaped(labels[router]), "showarrow": False, "font": {"size": 12}, **place})
    for one in data:
        one["yaxis"] = names[one["meta"]["router"]]
    return layout


def _levels_over_training(results: Results, points: Curves) -> list[Trace]:
    """Return the mean over seeds of the baseline in each setting, and thin lines of single seeds."""
    data: list[Trace] = []
    for place, row in enumerate(results.rows):
        steps, values = _shared_curves(results.cells_of(row), points)
        if not results.is_baseline(row) or not steps:
            continue
        for curve in values.values() if len(values) > 1 else ():
            thin: dict[str, Any] = {"mode": "lines", "line": {"width": 1}, "opacity": 0.3, "hoverinfo": "skip"}
            data.append(trace(place, steps, _rounded(curve), **thin))
        means = _rounded(statistics.fmean(same) for same in zip(*values.values(), strict=True))
        data.append(line_of(place, steps, means, f"{escaped(row.label)}, step %{{x}}: %{{y:.3f}}", dash(place)))
    return data


def _rounded(values: Iterable[float]) -> list[float]:
    """Return numbers with as many digits as can be seen: they are most of the size of a page."""
    return [float(f"{value:.5g}") for value in values]


def load(results: Results) -> Plot:
    """Draw the load of experts, sorted, relative to even load."""
    data: list[Trace] = []
    most = 0
    for place, row in enumerate(results.rows):
        for layer, states in by_layer(results.cells_of(row)):
            curves = [relative_load(state.load.percent) for state in states]
            curves = [sorted(curve, reverse=True) for curve in curves if len(curve) == len(curves[0])]
            mean = [statistics.fmean(same) for same in zip(*curves, strict=True)]
            most = max(most, len(mean))
            hover = f"{escaped(row.label)}, rank %{{x}}: %{{y:.2f}} times the even load<extra></extra>"
            data.append(curve_of(place, layer, list(range(1, len(mean) + 1)), mean, hover))
    ranks = axis("experts, the busiest first", tick0=1, dtick=tick_step(most))
    layout = {"xaxis": ranks, "yaxis": axis("load / even load", rangemode="tozero"), "shapes": [line_at("y", 1)]}
    caption = (
        "The number of tokens that selected each expert, divided by the even load (1, dotted); 0 is a dead expert. Experts "
        "have no common order between runs, so they are sorted by load before the mean over seeds. Clean data."
    )
    return Plot("load", "Load per expert", caption, data, layout)


def entropy(results: Results) -> Plot:
    """Draw the entropy of the gates by layer."""

    def values(cell: CellResult) -> Values:
        return ((layer.layer, layer.entropy) for layer in cell.clean.routing.layers)

    data, layers = _over_layers(results, values, "%{y:.3f} nats")
    experts = {layer.experts for cell in results.cells for layer in cell.clean.routing.layers if layer.entropy is not None}
    lines = [line_at("y", math.log(count)) for count in sorted(experts)]
    layout = {"xaxis": layer_axis(layers), "yaxis": axis("entropy, nats", rangemode="tozero"), "shapes": lines}
    caption = (
        "Entropy of the gates, the mean over tokens and seeds; bars reach from the lowest seed to the highest. The dotted "
        "line is the logarithm of the number of experts, the entropy of a uniform router. Clean data."
    )
    return Plot("entropy", "Routing entropy per layer", caption, data, layout)


Values = Iterable[tuple[int, float | None]]  # of some layers


def _over_layers(results: Results, values: Callable[[CellResult], Values], shown: str) -> tuple[list[Trace], int]:
    """Return a curve over layers for each router, and the number of layers; `shown` is the label of a value."""
    data, layers = list[Trace](), 0
    for place, row in enumerate(results.rows):
        found: dict[int, list[float]] = {}
        for layer, value in chain.from_iterable(map(values, results.cells_of(row))):
            if value is not None:
                found.setdefault(layer, []).append(value)
        if found:
            hover = f"{escaped(row.label)}, layer %{{x:.0f}}: {shown}<extra></extra>"
            data.append(range_over_layers(place, len(results.rows), sorted(found.items()), hover))
            layers = max(layers, 1 + max(found))
    return data, layers


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
    shares_of_tokens = axis("% of the tokens", type="log", dtick=1, exponentformat="none")
    layout = {"xaxis": axis("gap to the next expert", type="log", **ticks), "yaxis": shares_of_tokens}
    caption = (
        "The share of tokens that are near-ties: the last selected expert and the next differ by less than the gap on the x "
        "axis, so that a change of this size in their scores can flip them. Both axes are logarithmic; a share of 0 has no "
        "point. Lower is more stable, except for smooth routers, whose output does not jump at a flip. Clean data."
    )
    return Plot("near-ties", "Near-ties", caption, data, layout)


def every_attack(results: Results) -> Plot:
    """Draw each router's result under every attack."""
    measure, data = results.run.measure, list[Trace]()
    for place, row in enumerate(results.rows):
        means: dict[str, float] = {}
        for name in attack_names(results):
            figures = [cell.trials[name].figure for cell in results.cells_of(row) if name in cell.trials]
            seeds = [figure for figure in figures if figure is not None]
            if not seeds:
                continue
            means[wrapped_label(name)] = statistics.fmean(seeds)
            data.append(_single_seeds(place, seeds, wrapped_label(name), symbol(place)))
        if means:
            hover = f"{escaped(row.label)}, %{{y}}: %{{x:.{measure.digits}f}}<extra></extra>"
            data.append(_marks(place, [*means.values()], [*means], 11, symbol(place), hover))
    caption = f"{measure.sentence} Large marks are means over seeds, small ones single seeds."
    return Plot("every-attack", "Every attack", caption, data, _names_layout(data, measure.name))


def cost(results: Results) -> Plot:
    """Draw the cost of the attack on untouched words, with its interval; the plot is empty if that was not measured."""
    data = list[Trace]()
    for place, row in enumerate(results.rows):
        if row.cost is None:
            continue
        low, high = (None if nats is None else rise(nats) for nats in (row.cost.low, row.cost.high))
        mean, bars = rise(row.cost.mean), error_bars((rise(row.cost.mean), low, high))
        hover, label = f"{escaped(row.label)}: %{{x:+.2f}}%<extra></extra>", wrapped_label(row.label)
        data.append(_marks(place, [mean], [label], 10, symbol(place), hover, error_x=bars))
    layout = _names_layout(data, "perplexity rise, %", rangemode="tozero") | {"shapes": [line_at("x", 0)]}
    caption = (
        "How much the attack raises the perplexity of the untouched words, which are the same in both texts, with 95% "
        "intervals. Left of 0 the perplexity falls."
    )
    if all(row.cost is None or row.cost.over != EVERYTHING for row in results.rows):
        caption += " The intervals are for these models only."
    return Plot("cost", "Cost of the attack on untouched words", caption, data, layout)


def price(results: Results) -> Plot:
    """Draw the clean result of each router against what it costs; the plot is empty if all cost the same."""
    measure, rows = results.run.measure, results.rows
    use_flops = all(row.flops is not None for row in rows)
    of = "image" if results.run.recipe.get("task") == "images" else "token"
    title = f"MFLOPs of a forward, per {of}" if use_flops else "experts per token"
    data = list[Trace]()
    for place, row in enumerate(rows):
        x = (row.flops or 0.0) / 1e6 if use_flops else row.experts_per_token
        if row.clean is None or row.apart:
            continue
        level = row.scores["clean"].level if "clean" in row.scores else None
        bars = {"visible": False} if level is None else error_bars((level.mean, level.low, level.high)) | THIN
        hover = f"{escaped(row.label)}, %{{x:.3g}}: %{{y:.{measure.digits}f}}<extra></extra>"
        data.append(_marks(place, [x], [row.clean], 12, symbol(place), hover, error_y=bars))
    if len({mark["x"][0] for mark in data}) < 2:
        data = []
    caption = f"{measure.sentence} Means over seeds, with 95% intervals{intervals_cover(results)}."
    layout = {"xaxis": axis(title), "yaxis": axis(escaped(f"clean {measure.name}"))}
    return Plot("price", "Clean result against cost", caption, data, layout)


def budget_curve(place: int, label: str, budgets: Sequence[float], errors: Sequence[Difference | None]) -> Trace:
    """Return the curve of one router or attack, with its intervals if it has any."""
    known = [(LEVELS * budget, error) for budget, error in zip(budgets, errors, strict=True) if error is not None]
    bars = error_bars(*((error.mean, error.low, error.high) for _, error in known)) | THIN
    hover = f"{escaped(label)}, budget %{{x:.3g}}/{LEVELS}: %{{y:.2f}}%<extra></extra>"
    means = [error.mean for _, error in known]
    return curve_of(place, None, [budget for budget, _ in known], means, hover, error_y=bars)


def budget_plot(name: str, title: str, caption: str, data: list[Trace], error: str) -> Plot:
    x, y = (axis(text, rangemode="tozero") for text in (f"budget (l_inf), in 1/{LEVELS}", f"{error}, %"))
    return Plot(name, title, caption, data, {"xaxis": x, "yaxis": y})


def attack_curves(results: Results) -> Iterator[Plot]:
    """Yield a plot for each attack that was run at several budgets, of the error and of the top-5 error."""
    for number, attack in enumerate(dict.fromkeys(name for row in results.rows for name in row.curves)):
        for key, (error, end) in ERRORS.items():
            data: list[Trace] = []
            images = set()
            for place, row in enumerate(results.rows):
                curve = row.curves.get(attack)
                if curve is not None and any(getattr(curve, key)):
                    data.append(budget_curve(place, row.label, curve.budgets, getattr(curve, key)))
                    images.add(curve.examples)
            if key == "top5" and not any(value for trace in data for value in trace["y"]):
                continue  # always so with five classes or fewer
            caption = (
                f"The {error} under {attack} on {', '.join(map(str, sorted(images)))} test images: means over seeds, with "
                f"95% intervals{intervals_cover(results)}. A budget of 0 is the clean {error} of these images. {CARRIED}"
            )
            title = f"{attack}, error against budget{end}"
            yield budget_plot(f"curve-{number}-{key}", title, caption, data, error)


def consistency(results: Results) -> Plot:
    """Draw the share of tokens that keep their experts under a perturbation, by layer."""

    def values(cell: CellResult) -> Values:
        return ((layer, share and 100 * share) for layer, share in enumerate(cell.consistency.layers))

    data, layers = _over_layers(results, values, "%{y:.2f}% of the tokens")
    lowest = min([100.0, *(value for curve in data for value in curve["y"])])
    room = 0.15 * (100 - lowest) or 1.0
    layout = {"xaxis": layer_axis(layers), "yaxis": axis("% of the tokens", range=[lowest - room, 100 + room / 4])}
    perturbations = list(dict.fromkeys(cell.consistency.what for cell in results.cells))
    caption = (
        f"The share of tokens that keep their experts under {listed(perturbations) if perturbations else 'noise'}: "
        "the mean over seeds, with bars from the lowest seed to the highest. Higher is more stable."
    )
    return Plot("consistency", "Consistency per layer", caption, data, layout)


def by_layer(cells: Sequence[CellResult]) -> Iterator[tuple[str, list[Layer]]]:
    """Yield the routing metrics of all seeds on clean data: first of all layers together, then of each layer."""
    found: dict[int, list[Layer]] = {}
    for layer in (layer for cell in cells for layer in cell.clean.routing.layers):
        found.setdefault(layer.layer, []).append(layer)
    if found:
        yield ALL_LAYERS, [layer for same in found.values() for layer in same]
    for place, same in sorted(found.items()):
        yield str(place), same


def _marks(place: int, x: Sequence[Any], names: Sequence[Any], size: int, shape: str, hover: str, **style: Any) -> Trace:
    marker = {"size": size, "symbol": shape, "line": {"width": 2}}
    return trace(place, x, names, mode="markers", marker=marker, hovertemplate=hover, **style)


def _single_seeds(place: int, figures: Sequence[float | None], name: str, shape: str) -> Trace:
    small = {"size": 5, "symbol": shape}
    return trace(place, figures, [name] * len(figures), mode="markers", marker=small, opacity=0.45, hoverinfo="skip")


def _names_layout(data: Sequence[Trace], title: str, **style: Any) -> dict[str, Any]:
    """Return the layout of a plot with names on its y axis."""
    return {"xaxis": axis(escaped(title), **style), "yaxis": names_axis(), "height": plot_height(data)}
