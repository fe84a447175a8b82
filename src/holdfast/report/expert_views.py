"""Two views of experts, as data for the page: the expert graph over training, and tokens coloured by expert.

The expert graph (Symphony's paper, figure 4) has one heat map for each snapshot. A learned graph is Symphony's A, where a_jk
is the weight of the score of expert k in that of expert j. For other routers it is how often tokens select two experts
together, each row as shares of its sum.

Tokens by expert (ACMoE's paper, figure 1) are words or image patches in the colours of their first expert. The page's
script builds them, and inserts strings only as text, never as markup.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.auditing.geometry_run import spread
from holdfast.report.page_shell import BORDERS, COLOURS
from holdfast.train.results import Results, ShownImage

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
    """Return the expert graphs of the first seed of each router."""
    found = []
    for place, cell in enumerate(map(results.first_cell, results.rows)):
        steps, layers = cell.snapshots.steps, {}
        chosen, entries = spread(len(steps), SHOWN), [0.0]
        for layer in cell.snapshots.layers:
            graphs = [layer.graphs[at] for at in chosen]
            layers[str(layer.layer)] = [[[entry and round(entry, 3) for entry in row] for row in graph] for graph in graphs]
            entries += [entry for graph in layers[str(layer.layer)] for row in graph for entry in row if entry is not None]
        meaning = MEANING[cell.snapshots.graph].format(router=cell.router)
        of_them = f"{len(chosen)} of {len(steps)} snapshots" if len(chosen) < len(steps) else "all snapshots"
        caption = f"Seed {cell.seed}, {meaning}. Rows and columns are experts; {of_them} and all layers share one scale."
        scale = min(entries), max(entries) or 1.0
        found.append(Evolution(place, caption, [steps[at] for at in chosen], *scale, layers))
    return found


Pixels = tuple[int, int, str]  # width, height, and base64 of a byte for each pixel, row by row


@dataclass(frozen=True)
class Views:
    shown: list[dict[str, Any]]  # one for each router that has one
    pixels: list[Pixels]  # all routers show the same images, so each is stored once
    experts: list[int]  # all that occur, for the legend
    caption: str


def views(results: Results) -> Views:
    """Return the views of the first seed of each router."""
    cells = [results.first_cell(row) for row in results.rows]
    pixels = {pixels_of(image): None for cell in cells for image in cell.view.images}
    places = {found: place for place, found in enumerate(pixels)}
    shown: list[dict[str, Any]] = []
    for router, view in enumerate(cell.view for cell in cells):
        if view.kind == "text":
            shown.append({"router": router, "pieces": view.pieces, "experts": view.experts})
        else:
            images = [{**vars(image), "pixels": places[pixels_of(image)]} for image in view.images]
            shown.append({"router": router, "images": images})
    layers = [layer for cell in cells for layer in cell.view.experts]
    layers += [layer for cell in cells for image in cell.view.images for layer in image.experts]
    parts = {"piece of a test text" if cell.view.kind == "text" else "patch of test images" for cell in cells}
    seeds = sorted({cell.seed for cell in cells})
    caption = (
        f"The first expert of every {' and every '.join(sorted(parts))}, as of seed {', '.join(map(str, seeds))}. Experts "
        "have no common order: one colour is one expert within a router and a layer, and means nothing in another."
    )
    return Views(shown, list(pixels), sorted({expert for layer in layers for expert in layer}), caption)


def css_classes(expert: int) -> str:
    """Return the CSS classes of an expert's colour and border; views.js computes the same names."""
    return f"expert-{expert % len(COLOURS)} border-{expert // len(COLOURS) % len(BORDERS)}"


def pixels_of(image: ShownImage) -> Pixels:
    return image.width, image.size // image.width, image.pixels
