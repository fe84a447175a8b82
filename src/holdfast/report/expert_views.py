"""Two views of experts, as data for the page: the expert graph over training, and tokens coloured by expert.

The expert graph (Symphony's paper, figure 4) has one heat map for each snapshot. A learned graph is Symphony's A, where a_jk
is the weight of the score of expert k in that of expert j. For other routers it is how often tokens select two experts
together, each row as shares of its sum.

Tokens by expert (ACMoE's paper, figure 1) are words or image patches in the colours of their first expert. The page's
script builds them, and inserts strings only as text, never as markup.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.report.stored_comparison import Cell, Results, ShownImage, Snapshots, TextView

Graph = list[list[float | None]]

SHOWN = 12  # snapshots at most: more heat maps make the page large and hard to read
MEANING = {
    "learned": "the graph that {router} learned: the weight of the column's expert in the score of the row's expert",
    "co-selection": "how often {router} selects two experts together: of all selected by tokens of the row's expert, "
    "the share of the column's expert",
}


@dataclass(frozen=True)
class Evolution:
    router: int  # its index among the rows
    caption: str
    steps: list[int]
    low: float  # ends of the colour scale, which all layers and snapshots share
    high: float
    layers: dict[str, list[Graph]]


def evolutions(results: Results) -> list[Evolution]:
    """Return the expert graphs of the first seed of each router that has some."""
    found = []
    for place, row in enumerate(results.rows):
        cell = results.first_seed_of(row, _has_graphs)
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
    """Return at most `most` evenly spaced indices below `count`, with the first and the last."""
    return list(range(count)) if count <= most else [round(at * (count - 1) / (most - 1)) for at in range(most)]


def _rounded(graph: Sequence[Sequence[float | None]]) -> Graph:
    return [[None if entry is None else round(entry, 3) for entry in row] for row in graph]


def _has_graphs(cell: Cell) -> bool:
    return cell.snapshots is not None and any(layer.graphs for layer in cell.snapshots.layers)


# Far from each other, and from grey, the colour of the images below them.
COLOURS = (
    "#e6194b", "#3cb44b", "#ffd500", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6",
    "#bfef45", "#f5a3bd", "#2f8f86", "#c9a6f7", "#9a6324", "#8c1c1c", "#8ff0b0", "#808000",
)  # fmt: skip
BORDERS = ("none", "dashed", "dotted", "double")  # these distinguish experts of the same colour

Pixels = tuple[int, int, str]  # width, height, and base64 of a byte for each pixel, row by row


@dataclass(frozen=True)
class Views:
    shown: list[dict[str, Any]]  # one for each router that has one
    pixels: list[Pixels]  # all routers show the same images, so each is stored once
    experts: list[int]  # all that occur, for the legend
    caption: str


def views(results: Results) -> Views:
    """Return the views of the first seed of each router that has one."""
    cells = [results.first_seed_of(row, _has_a_view) for row in results.rows]
    pixels = {pixels_of(image): None for cell in cells if cell for image in _images(cell)}
    places = {found: place for place, found in enumerate(pixels)}
    shown: list[dict[str, Any]] = []
    for router, cell in enumerate(cells):
        if cell and isinstance(cell.view, TextView):
            shown.append({"router": router, "pieces": cell.view.pieces, "experts": cell.view.experts})
        elif cell:
            images = [
                {**image.model_dump(exclude={"pixels"}), "pixels": places[pixels_of(image)]} for image in _images(cell)
            ]
            shown.append({"router": router, "images": images})
    experts = {expert for cell in cells if cell for expert in _experts(cell)}
    return Views(shown, list(pixels), sorted(experts), _caption([cell for cell in cells if cell]))


def css_classes(expert: int) -> str:
    """Return the CSS classes of an expert's colour and border; views.js computes the same names."""
    return f"expert-{expert % len(COLOURS)} border-{expert // len(COLOURS) % len(BORDERS)}"


def text_colour_on(colour: str) -> str:
    """Return black or white, whichever has more contrast: one of them always has a contrast above 4.5."""
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2.1 defines it, from 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def pixels_of(image: ShownImage) -> Pixels:
    grey = bytes(round(255 * min(1.0, max(0.0, value))) for row in image.pixels for value in row)
    return len(image.pixels[0]), len(image.pixels), base64.b64encode(grey).decode()


def _caption(cells: list[Cell]) -> str:
    parts = {"piece of a test text" if isinstance(cell.view, TextView) else "patch of test images" for cell in cells}
    seeds = sorted({cell.seed for cell in cells})
    return (
        f"The first expert of every {' and every '.join(sorted(parts))}, as of seed {', '.join(map(str, seeds))}. Experts "
        "have no common order: one colour is one expert within a router and a layer, and means nothing in another."
    )


def _has_a_view(cell: Cell) -> bool:
    return cell.view is not None


def _images(cell: Cell) -> list[ShownImage]:
    return [] if cell.view is None or isinstance(cell.view, TextView) else cell.view.images


def _experts(cell: Cell) -> Iterator[int]:
    layered = [cell.view] if isinstance(cell.view, TextView) else _images(cell)
    for layer in (layer for each in layered for layer in each.experts):
        yield from layer
