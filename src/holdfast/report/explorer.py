"""The Explorer of a page, as data for its script: the routes of a few tokens by one router or several.

sets      the examples; routers that read the same ones share a set, and only these can be compared side by side
routers   of each router its layers, with the route of each token, and what each perturbation changes
what_if   whether the second router replaces the first one in the same model, as in an audit
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from holdfast.auditing import AuditReport
from holdfast.metrics.token_routes import ChangedRoutes, Example, LayerRoutes, PerturbedRoutes, Routes
from holdfast.train.results import Results

MOST_BYTES = 2_000_000  # of the routes of a page, which is to stay below 8 MB: many routers have fewer tokens each
WORDS = (
    "A row is a layer, and a cell has the number and the colour of a token's expert with the largest weight. Margin: by how "
    "much the last selected expert is ahead of the next one, in what the router ranks by. Radius: how far, in shares of its "
    "norm, the router's input can be perturbed before the token could flip. A token flips if its selected set changes; "
    "cells that flip are outlined. A question mark is a token that is not compared, because it was changed itself."
)


@final
@dataclass(frozen=True)
class ShownRouter:
    """The routes of one router; `loads` are by layer, in percent of all data, and None if they are not known."""

    name: str
    examples: Sequence[Example]
    routes: Routes
    experts: Sequence[int]
    loads: Sequence[Sequence[float] | None]


def comparison_explorer(results: Results) -> dict[str, Any]:
    """Return the routes of the first seed of each router."""
    shown = []
    for row in results.rows:
        cell = results.first_cell(row)
        layers = cell.clean.routing.layers
        counts, loads = [layer.experts for layer in layers], [layer.load.percent for layer in layers]
        shown.append(ShownRouter(row.label, cell.view.examples, cell.view.routes, counts, loads))
    return explorer(shown)


def comparison_caption(results: Results) -> str:
    """Return what the Explorer of a comparison shows, and of which seeds."""
    seeds = sorted({results.first_cell(row).seed for row in results.rows})
    return (
        f"Test examples and the models of seed {', '.join(map(str, seeds))}. {WORDS} Routers number their experts in their "
        "own ways: side by side, experts that share the most tokens are paired and have one colour, and routes that still "
        "differ are outlined."
    )


def audit_explorer(report: AuditReport) -> dict[str, Any] | None:
    """Return the routes of the audited model, and of the what-if; None if the audit has none."""
    view = report.view
    if view is None:
        return None
    counts, loads = [layer.experts for layer in report.layers], [layer.load.percent for layer in report.layers]
    shown = [ShownRouter(report.model.name, view.examples, view.routes, counts, loads)]
    if report.what_if is not None and report.what_if.routes is not None:
        shown.append(ShownRouter(report.what_if.router, view.examples, report.what_if.routes, counts, [None] * len(counts)))
    return explorer(shown, what_if=len(shown) > 1)


def explorer(routers: Sequence[ShownRouter], *, what_if: bool = False) -> dict[str, Any]:
    """Return the data of the script."""
    size = sum(len(json.dumps(router_data(router), separators=(",", ":"))) for router in routers)
    if size > MOST_BYTES:
        most = max(sum(example.tokens for example in router.examples) for router in routers)
        routers = [cut(router, most * MOST_BYTES // size) for router in routers]
    sets: list[list[dict[str, Any]]] = []
    found = []
    for router in routers:
        examples = [example_data(example) for example in router.examples]
        said = [example.picture.said if example.picture else "" for example in router.examples]
        if examples not in sets:
            sets.append(examples)
        found.append({"name": router.name, "set": sets.index(examples), "said": said, **router_data(router)})
    return {"sets": sets, "routers": found, "what_if": what_if}


def example_data(example: Example) -> dict[str, Any]:
    """Return a text or a picture without what a router predicts for it, so that all routers share it."""
    if example.picture is None:
        return {"pieces": example.pieces, "tokens": example.tokens}
    picture = example.picture
    size = {"width": picture.width, "height": picture.size // picture.width}
    about = {"label": picture.label, "pixels": picture.pixels, "grid": picture.grid, **size}
    return {"picture": about, "tokens": example.tokens}


def router_data(router: ShownRouter) -> dict[str, Any]:
    layers = []
    for layer, experts, load in zip(router.routes.layers, router.experts, router.loads, strict=True):
        if any(expert >= experts for selected in layer.experts for expert in selected):
            raise ValueError(f"a token has an expert beyond the {experts} of its layer")
        about = {"experts": experts, "load": None if load is None else [round(share, 1) for share in load]}
        routes = {"routes": layer.experts, "weights": layer.weights, "margins": layer.margins, "radii": layer.radii}
        layers.append({**about, **routes, "core": layer.core})
    perturbed = {
        name: {"about": one.about, "compared": one.compared, "layers": [vars(changed) for changed in one.layers]}
        for name, one in router.routes.perturbed.items()
    }
    return {"layers": layers, "perturbed": perturbed}


def cut(router: ShownRouter, most: int) -> ShownRouter:
    """Return the routes of whole examples with at most so many tokens in all; the first text is cut if it has more."""
    examples, tokens = list[Example](), 0
    for example in router.examples:
        if not examples and example.picture is None:
            example = replace(example, pieces=example.pieces[:most])
        if examples and tokens + example.tokens > most:
            break
        examples.append(example)
        tokens += example.tokens
    if tokens == sum(example.tokens for example in router.examples):
        return router
    perturbed = {name: _first_changes(one, tokens) for name, one in router.routes.perturbed.items()}
    return replace(
        router, examples=examples, routes=Routes([_first(layer, tokens) for layer in router.routes.layers], perturbed)
    )


def _first(layer: LayerRoutes, tokens: int) -> LayerRoutes:
    radii = None if layer.radii is None else layer.radii[:tokens]
    return LayerRoutes(layer.experts[:tokens], layer.weights[:tokens], layer.margins[:tokens], radii, layer.core)


def _first_changes(changes: PerturbedRoutes, tokens: int) -> PerturbedRoutes:
    compared = [[start, min(end, tokens)] for start, end in changes.compared if start < tokens]
    counts = [sum(token < tokens for token in layer.tokens) for layer in changes.layers]
    kept = zip(changes.layers, counts, strict=True)
    layers = [ChangedRoutes(each.tokens[:count], each.experts[:count], each.weights[:count]) for each, count in kept]
    return PerturbedRoutes(changes.about, compared, layers)
