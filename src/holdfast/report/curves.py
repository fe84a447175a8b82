"""Routing over training, as data for the page: a measure at every snapshot, a panel for each layer; and expert graphs.

The reader chooses the measure; the page's script (`curves.js`) arranges the panels, which share their axes.

`evolutions` has the expert graph over training (Symphony's paper, figure 4): one heat map for each snapshot. A learned graph
is Symphony's A, where a_jk is the weight of the score of expert k in that of expert j. For other routers it is how often
tokens select two experts together, each row as shares of its sum.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.auditing.geometry_run import spread
from holdfast.metrics.selection import WIDTHS
from holdfast.train.results import LayerSnapshots, LayerState, Results

MARKS_PER_CURVE = 20  # at most: more hide the lines

Points = dict[int, float]  # from the step of a snapshot to the mean over seeds


# What each measure is, in a sentence.
ABOUT = {
    "experts per token": "The mean number of experts that a token uses in evaluation.",
    "strip width": "The width of the strip below the k-th expert in which a smooth router adds experts, in training.",
    **{
        f"near-ties, gap below {width:g}": "The share of tokens whose last selected expert and the next differ by less than "
        f"{width:g}."
        for width in WIDTHS
    },
    **{
        f"experts within {width:g} of the boundary": "The mean number of experts beyond the k best of a token that are "
        f"closer than {width:g} to the last of these."
        for width in WIDTHS
    },
    "load unevenness": "The standard deviation of the load of experts over its mean; 0 is even.",
    "dead experts": "Experts that no token selects.",
    "dropped experts": "The share of the experts that tokens lose because experts are limited.",
    "entropy": "The entropy of the gates, the mean over tokens.",
    "graph sparsity": "The share of the pairs of two experts that have no edge in the expert graph below.",
    "gradient interference": "The mean cosine between the gradients of two experts on the first training batch: below 0 "
    "they learn against each other.",
    "fluctuation": "The share of tokens that flip between a snapshot and the one before; lower is more stable.",
}
SHOWN = 12  # snapshots at most: more heat maps are hard to read
MOST_ENTRIES = 170_000  # of all graphs together, about 1 MB of the page: with more, fewer snapshots are shown
MEANING = {
    "learned": "the graph that {router} learned: the weight of the column's expert in the score of the row's expert",
    "co-selection": "how often {router} selects two experts together: of all selected by tokens of the row's expert, "
    "the share of the column's expert",
}


@dataclass(frozen=True)
class CurveMeasure:
    name: str
    axis: str
    of: Callable[[LayerState], float | None]
    form: str = ".3f"  # of a number in the label of a point
    from_zero: bool = True  # whether its axis begins at 0


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _strip(width: float, key: str, factor: float = 1.0) -> Callable[[LayerState], float | None]:
    def of(state: LayerState) -> float | None:
        value = next((getattr(strip, key) for strip in state.near_ties.strips if strip.width == width), None)
        return None if value is None else factor * value

    return of


ENTROPY = CurveMeasure("entropy", "nats", lambda state: state.entropy, from_zero=False)
FLUCTUATION = CurveMeasure("fluctuation", "% of the tokens", lambda state: None, ".2f")
MEASURES = (
    CurveMeasure("experts per token", "experts", lambda state: state.experts_per_token.mean),
    CurveMeasure("strip width", "eps", lambda state: state.width, ".4f"),
    *(
        CurveMeasure(f"near-ties, gap below {width:g}", "% of the tokens", _strip(width, "share", 100), ".3g")
        for width in WIDTHS
    ),
    *(
        CurveMeasure(f"experts within {width:g} of the boundary", "experts per token", _strip(width, "experts"), ".3g")
        for width in WIDTHS
    ),
    CurveMeasure("load unevenness", "std / mean", lambda state: state.load.cv),
    CurveMeasure("dead experts", "experts", lambda state: float(len(state.load.dead)), ".3g"),
    CurveMeasure(
        "dropped experts", "% of the experts", lambda state: _percent(getattr(state.dropped, "share", None)), ".3g"
    ),
    ENTROPY,
    CurveMeasure("graph sparsity", "% of the pairs", lambda state: _percent(state.sparsity), ".3g"),
    CurveMeasure("gradient interference", "cosine", lambda state: state.interference, from_zero=False),
)


def curves(results: Results) -> list[dict[str, Any]]:
    """Return the measures that have data.

    name, axis, caption, from_zero    as text, and whether the axis begins at 0
    form                              of a number in the label of a point
    panels                            for each layer its title, and the steps and values of each router
    """
    found = [_drawn(measure, results, partial(by_step, results, values=_of_states(measure))) for measure in MEASURES]
    baseline = results.baseline.router
    ratio = CurveMeasure(f"entropy relative to {baseline}", "ratio", ENTROPY.of, from_zero=False)
    about = f"The entropy of the gates over that of {baseline} in the same layer, at the same step."
    found.insert(1 + MEASURES.index(ENTROPY), _drawn(ratio, results, partial(_ratios, results), about))
    shares = partial(by_step, results, values=lambda layer: [None, *map(_percent, layer.fluctuation)])
    found.append(_drawn(FLUCTUATION, results, shares))
    return [drawn for drawn in found if drawn["panels"]]


def _drawn(
    measure: CurveMeasure, results: Results, points: Callable[[int], dict[int, Points]], about: str | None = None
) -> dict[str, Any]:
    panels: dict[int, list[dict[str, Any]]] = {}
    for place in range(len(results.rows)):
        for layer, known in points(place).items():
            steps = sorted(known)
            values = [float(f"{known[step]:.5g}") for step in steps]
            panels.setdefault(layer, []).append({"router": place, "x": steps, "y": values})
    shown = [{"title": f"layer {layer}", "data": data} for layer, data in sorted(panels.items())]
    caption = f"{about or ABOUT[measure.name]} Means over seeds; routing is measured on a few fixed test examples."
    kept = {name: getattr(measure, name) for name in ("name", "axis", "from_zero", "form")}
    return {**kept, "caption": caption, "marks": MARKS_PER_CURVE, "panels": shown}


def by_step(results: Results, row: int, values: Callable[[LayerSnapshots], Iterable[float | None]]) -> dict[int, Points]:
    """Return the mean over seeds of the values at each snapshot, by layer; layers without values are left out."""
    found: dict[int, dict[int, list[float]]] = {}
    for cell in results.cells_of(results.rows[row]):
        for layer in cell.snapshots.layers:
            for step, value in zip(cell.snapshots.steps, values(layer), strict=True):
                if value is not None:
                    found.setdefault(layer.layer, {}).setdefault(step, []).append(value)
    return {layer: {step: statistics.fmean(same) for step, same in known.items()} for layer, known in found.items()}


def _of_states(measure: CurveMeasure) -> Callable[[LayerSnapshots], Iterable[float | None]]:
    return lambda layer: map(measure.of, layer.states)


def _ratios(results: Results, row: int) -> dict[int, Points]:
    """Return the entropy over that of the baseline in the same setting; nothing for the baseline itself."""
    own = results.rows[row]
    same = [place for place, one in enumerate(results.rows) if results.is_baseline(one) and one.settings == own.settings]
    if not same or results.is_baseline(own):
        return {}
    usual, mine = (by_step(results, place, _of_states(ENTROPY)) for place in (same[0], row))
    ratios = {
        layer: {step: value / usual[layer][step] for step, value in known.items() if usual.get(layer, {}).get(step)}
        for layer, known in mine.items()
    }
    return {layer: known for layer, known in ratios.items() if known}


def evolutions(results: Results) -> list[dict[str, Any]]:
    """Return the expert graphs of the first seed of each router.

    router      its index among the rows
    low, high   ends of the colour scale, which all layers and snapshots share
    layers      by layer, the graph of each step
    """
    found, cells = [], [results.first_cell(row) for row in results.rows]
    sizes = [len(layer.graphs[0]) ** 2 for cell in cells for layer in cell.snapshots.layers if layer.graphs]
    most = max(1, min(SHOWN, MOST_ENTRIES // max(1, sum(sizes))))
    for place, cell in enumerate(cells):
        steps, layers = cell.snapshots.steps, {}
        chosen, entries = spread(len(steps), most), [0.0]
        for layer in cell.snapshots.layers:
            graphs = [layer.graphs[at] for at in chosen]
            layers[str(layer.layer)] = [[[entry and round(entry, 3) for entry in row] for row in graph] for graph in graphs]
            entries += [entry for graph in layers[str(layer.layer)] for row in graph for entry in row if entry is not None]
        meaning = MEANING[cell.snapshots.graph].format(router=cell.router)
        of_them = f"{len(chosen)} of {len(steps)} snapshots" if len(chosen) < len(steps) else "all snapshots"
        caption = f"Seed {cell.seed}, {meaning}. Rows and columns are experts; {of_them} and all layers share one scale."
        scale = {"low": min(entries), "high": max(entries) or 1.0}
        about = {"router": place, "caption": caption, "steps": [steps[at] for at in chosen]}
        found.append({**about, **scale, "layers": layers})
    return found
