"""Expert graphs as they evolved (Symphony's paper, figure 4): the data of one heat map for each snapshot.

A learned graph is Symphony's A, where a_jk is how much the score of expert k counts for expert j. Other routers have none;
theirs is how often the tokens chose two experts together, each row as shares of its sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.report.results import Cell, Results, Snapshots

Graph = list[list[float | None]]

SHOWN = 12  # snapshots at most; more heat maps nobody reads, and they make the page large
MEANING = {
    "learned": "the graph that {router} learnt: how much the score of a column's expert counts for the expert of the row",
    "co-selection": "which experts {router} chose together: of all that tokens of a row's expert chose, the share "
    "of the column's",
}


@dataclass(frozen=True)
class Evolution:
    router: int  # its place among the rows
    caption: str
    steps: list[int]
    low: float  # ends of the colour scale, which all layers and snapshots share
    high: float
    layers: dict[str, list[Graph]]


def evolutions(results: Results) -> list[Evolution]:
    """Of the first seed of each router that has graphs."""
    found = []
    for place, row in enumerate(results.rows):
        cell = results.first_seed_of(row.router, _has_graphs)
        if cell and cell.snapshots:
            found.append(_evolution(place, cell, cell.snapshots))
    return found


def _evolution(place: int, cell: Cell, snapshots: Snapshots) -> Evolution:
    chosen = spread(len(snapshots.steps), SHOWN)
    layers = {str(layer.layer): [_rounded(layer.graphs[at]) for at in chosen] for layer in snapshots.layers if layer.graphs}
    entries = [
        entry for graphs in layers.values() for graph in graphs for row in graph for entry in row if entry is not None
    ]
    meaning = MEANING[snapshots.graph].format(router=cell.router)
    of_them = f"{len(chosen)} of {len(snapshots.steps)} snapshots" if len(chosen) < len(snapshots.steps) else "all snapshots"
    return Evolution(
        router=place,
        caption=f"Seed {cell.seed}, {meaning}. Rows and columns are experts; {of_them} and all layers share one scale.",
        steps=[snapshots.steps[at] for at in chosen],
        low=min([0.0, *entries]),
        high=max([0.0, *entries]) or 1.0,
        layers=layers,
    )


def spread(count: int, most: int) -> list[int]:
    """Places among `count`, the first and the last always, and `most` at most."""
    return list(range(count)) if count <= most else [round(at * (count - 1) / (most - 1)) for at in range(most)]


def _rounded(graph: Sequence[Sequence[float | None]]) -> Graph:
    return [[None if entry is None else round(entry, 3) for entry in row] for row in graph]


def _has_graphs(cell: Cell) -> bool:
    return cell.snapshots is not None and any(layer.graphs for layer in cell.snapshots.layers)
