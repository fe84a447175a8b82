"""Small comparisons as `holdfast compare` stores them, made by hand: of texts and of images."""

import base64
import copy
import math
from collections.abc import Sequence
from typing import Any

from report.routes import stored_routes

from holdfast.checked import from_mapping
from holdfast.report.tables import Table
from holdfast.stored import SCHEMA, without_nan
from holdfast.train.results import Results

STEPS, LAYERS, EXPERTS = 12, 2, 4
SNAPSHOTS = (4, 8, 12)
PIECES = ["Return", " the", " small", "est", " of", " its", " arg", "uments"]


def parse(content: dict[str, Any]) -> Results:
    """Return stored results as they are read."""
    results: Results = from_mapping(Results, without_nan(content))
    return results


def by_column(table: Table) -> list[dict[str, str]]:
    """Return the rows of a table as cells by column."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def stored(routers: Sequence[str] = ("smoe", "smooth", "ac"), seeds: int = 3) -> dict[str, Any]:
    """The second router is better, the third no different; with fewer than three seeds nothing is claimed."""
    rows = [_row(place, name, seeds) for place, name in enumerate(routers)]
    cells = [_cell(place, name, seed) for seed in range(seeds) for place, name in enumerate(routers)]
    return {
        "schema": SCHEMA,
        "run": {
            "holdfast": "0.1.0",
            "recipe": {
                "about": "a small model",
                "training": {"steps": STEPS, "learning_rate": 0.0031},
                "attack": {"rate": 0.025},
            },
            "data": {"name": "python-docs", "checksum": "744f2cda"},
            "measure": {"name": "perplexity", "long": "perplexity per token", "attack": "a swap of 1.5% of its words"},
            "attack": {"attack": "word swap", "changed": 439, "checksum": "a334100e", "flags": []},
        },
        "versions": {"holdfast": "0.1.0", "torch": "2.13.7", "transformers": "5.22.9", "Python": "3.11.7"},
        "rows": rows,
        "cells": cells,
    }


def difference(mean: float, reach: float, seeds: int = 3) -> dict[str, Any]:
    """A difference of so many seeds, with an interval that reaches so far from the mean."""
    over = "seeds and examples" if seeds > 2 else "these models only"
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "seeds": seeds, "over": over}


def stored_costs(routers: Sequence[str] = ("smoe", "smooth", "ac", "smoe, top 3"), seeds: int = 3) -> dict[str, Any]:
    """With the cost of the attack, and the baseline of equal compute that the second router is held against."""
    content = stored(routers, seeds)
    for place, row in enumerate(content["rows"]):
        row["cost"] = difference(math.log1p(0.02 + 0.001 * place), 0.005, seeds)
        if place:
            row["cost_difference"] = difference(0.001, 0.002, seeds)
    if seeds > 1 and len(routers) > 1:
        content["rows"][1]["equal_compute"] = {"router": "smoe, top 3", "difference": difference(-0.5, 1.5, seeds)}
    return content


def stored_images(routers: Sequence[str] = ("smoe", "smooth", "ac"), seeds: int = 3) -> dict[str, Any]:
    """The same of images, where the attack leaves the labels alone."""
    content = stored(routers, seeds)
    content["run"]["measure"] = {
        "name": "error, %",
        "long": "share of test images that are classified wrongly, in percent",
        "attack": "PGD, l_inf 8/255, 20 steps",
    }
    for row in content["rows"]:
        del row["clean_kept"], row["attacked_kept"]
    for cell in content["cells"]:
        cell["trials"] = {"PGD": {"figure": 40.0}, "FGSM": {"figure": 30.0}}
        shown = [{"picture": _picture("3", "3", 0)}, {"picture": _picture("8", "5", 1)}]
        routes = stored_routes(12, LAYERS, routers.index(cell["router"]))
        del routes["perturbed"]["words"]
        cell["view"] = {"examples": shown, "routes": routes}
    return content


def repeated(content: dict[str, Any], settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a comparison that has the rows and cells of `content` in each of the settings."""

    def each(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**copy.deepcopy(one), "settings": setting} for setting in settings for one in given]

    return {**content, "rows": each(content["rows"]), "cells": each(content["cells"])}


def _row(place: int, name: str, seeds: int) -> dict[str, Any]:
    mean = -3.125 if place == 1 else 0.25
    row: dict[str, Any] = {
        "router": name,
        "seeds": list(range(seeds)),
        "parameters": 46240 + place,
        "experts_per_token": 2.4 if place == 1 else 2.0,
        "clean": 184.5 + (mean if place else 0),
        "attacked": 191.25 + (mean if place else 0),
        "clean_kept": 183.375,
        "attacked_kept": 187.625,
    }
    if place:
        row.update(clean_difference=difference(mean, 1.5, seeds), attacked_difference=difference(mean, 1.5, seeds))
    return row


def _cell(place: int, name: str, seed: int) -> dict[str, Any]:
    losses = [5.3 * math.exp(-step / 9) + 0.05 * place + 0.02 * seed for step in range(STEPS)]
    return {
        "router": name,
        "seed": seed,
        "first_batch": f"first{seed}",
        "last_batch": f"last{seed}",
        "curve": {"steps": [step + 1 for step in range(STEPS)], "losses": losses, "width": 1},
        "validation": {"steps": list(SNAPSHOTS), "losses": [losses[step - 1] + 0.5 for step in SNAPSHOTS], "figures": []},
        "clean": {"figure": 184.5 + seed - place, "routing": _routing(place, seed)},
        "attacked": {"figure": 191.25 + seed - place},
        "trials": {
            "words": {"figure": 191.25 + seed - place},
            "typos": {"figure": 210.5 + 2 * seed - place},
        },
        "snapshots": {
            "steps": list(SNAPSHOTS),
            "graph": "learned" if place == 1 else "co-selection",
            "layers": [_snapshots(layer, place, seed) for layer in range(LAYERS)],
        },
        "consistency": {
            "what": "noise of 5% of each embedding's length",
            "layers": [0.9 - 0.1 * layer - 0.02 * place + 0.01 * seed**2 for layer in range(LAYERS)],
        },
        "view": {
            "examples": [{"pieces": PIECES[:4]}, {"pieces": PIECES[4:]}],
            "routes": stored_routes(len(PIECES), LAYERS, place + seed),
        },
    }


def _snapshots(layer: int, place: int, seed: int) -> dict[str, Any]:
    """The graph of a snapshot has its number in the first corner, and 0.25 elsewhere."""
    graphs = [[[0.25] * EXPERTS for _ in range(EXPERTS)] for _ in SNAPSHOTS]
    for at, graph in enumerate(graphs):
        graph[0][0] = 0.1 * at + 0.3 * layer + 0.01 * place + 0.00049
    return {
        "layer": layer,
        "fluctuation": [0.4 - 0.1 * layer + 0.01 * seed, 0.2 - 0.1 * layer + 0.01 * seed],
        "graphs": graphs,
        "states": [_state(layer, place, seed, at) for at in range(len(SNAPSHOTS))],
    }


def _state(layer: int, place: int, seed: int, at: int) -> dict[str, Any]:
    """The state of a snapshot: the second router is smooth, and its strip widens."""
    strips = [{"width": width, "share": width * (4 - place + at), "experts": 2 * width} for width in (0.001, 0.01, 0.1)]
    return {
        **_routing(place, seed)["layers"][layer],
        "near_ties": {"strips": strips},
        "experts_per_token": {"mean": 2.0 + 0.1 * at * (place == 1)},
        "sparsity": 0.5 - 0.1 * at,
        "width": 0.02 * (at + 1) + 0.01 * seed if place == 1 else None,
    }


def _picture(label: str, said: str, shift: int) -> dict[str, Any]:
    """4 x 6 pixels, black but for a white corner, in 2 x 3 patches."""
    pixels = bytearray(4 * 6)
    pixels[shift] = 255
    return {"label": label, "said": said, "width": 6, "pixels": base64.b64encode(pixels).decode(), "grid": [2, 3]}


def _routing(place: int, seed: int) -> dict[str, Any]:
    layers = [
        {
            "layer": layer,
            "experts": EXPERTS,
            "entropy": 1.3 - 0.05 * place - 0.1 * layer - 0.01 * seed,
            "load": {"percent": [80.0 - 10 * place, 60.0, 40.0, 20.0 + 10 * place], "cv": 0.447, "dead": []},
            "near_ties": {"strips": [{"width": width, "share": width * (4 - place)} for width in (0.001, 0.01, 0.1)]},
            "instability": None if layer == 0 else 0.25,
        }
        for layer in range(LAYERS)
    ]
    return {"layers": layers}
