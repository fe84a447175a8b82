"""A stored geometry report by hand: one layer of four experts that is measured, one that is refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from report import audited

from holdfast.auditing import GeometryReport
from holdfast.checked import from_mapping

WIDTHS = [0.001, 0.01, 0.1]


def stored_geometry() -> dict[str, Any]:
    return copy.deepcopy(STORED)


def piece(kind: str, **changed: Any) -> dict[str, Any]:
    """A slice of 4 x 4 grid points with three cells that meet in one point."""
    return {
        "kind": kind,
        "unit": 8.0,
        "low": [-0.1, -0.1],
        "high": [0.1, 0.1],
        "sets": [[0, 1], [0, 2], [1, 2]],
        "cells": [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 2, 2], [2, 2, 2, 2]],
        "lines": [[0.0, -0.1, 0.0, 0.0, 1, 2], [-0.1, 0.0, 0.0, 0.0, 0, 2], [0.0, 0.0, 0.1, 0.0, 0, 1]],
        "points": [[0.0, 0.0, 0, 1, 2]],
        "disagree": 0,
        "keys": [[0.0, 0.0, 0.0]] * 4,
        "extra": [None, [[0, 1, 1, 0], [1, 2, 2, 1], [1, 3, 1, 1], [0, 0, 0, 0]]],
        "tokens": [{"token": 3, "x": -0.05, "y": -0.05, "text": "night"}],
        **changed,
    }


def jump(size: float, text: str | None = "night", **changed: Any) -> dict[str, Any]:
    where = {"batch": 0, "place": 7, "sequence": 0, "position": 7, "token": 26}
    around = {"before": "in the", "after": "of", "context": "in the night of"} if text else {}
    about = {"distance": 0.0321, "leaves": 3, "enters": 1, "size_with_what_if": 0.0005}
    return {**where, "text": text, **around, "size": size, **about, **changed}


def measured(number: int = 0, **changed: Any) -> dict[str, Any]:
    orders = [
        {"order": order, "shares": shares, "median": 0.02 * order, "law": law, "asymptotic": law}
        for order, shares, law in ((1, [0.02, 0.14, 0.9], [0.01, 0.1, 0.95]), (2, [0.0, 0.0123, 0.6], [1e-9, 0.01, 0.7]))
    ]
    curve = [0.001 * place for place in range(4)]
    return {
        "layer": number,
        "name": f"model.layers.{number}.mlp",
        "router": "Linear TopK",
        "width": 16,
        "experts": 4,
        "k": 2,
        "tokens": 400,
        "norm": {"mean": 8.0, "std": 0.5},
        "ties": {"widths": WIDTHS, "exact": True, "orders": orders},
        "hitting": {
            "times": [0.1, 1.0, 10.0],
            "lower": [0.01, 0.04, 0.2],
            "upper": [0.02, 0.06, 0.3],
            "simulated": [0.015, 0.0523, 0.25],
            "tokens": 100,
            "walks": 400,
            "exits_of_order_1": 1.0,
        },
        "jumps": {
            "routers": [
                {"mean": 0.4567, "median": 0.4, "largest": 1.5},
                {"mean": 0.0004, "median": 0.0, "largest": 0.01},
            ],
            "largest": [jump(1.5), jump(1.25, None)],
        },
        "pictures": {
            "token": {"batch": 0, "place": 7, "text": "night", "before": "in the", "after": "of"},
            "slices": [piece("tokens"), piece("boundaries")],
            "normal": {
                "token": 3,
                "distance": 0.02,
                "leaves": 3,
                "enters": 1,
                "positions": [-0.03, -0.01, 0.01, 0.03],
                "change": [[0.0, 0.0, 0.5, 0.5], curve],
                "steps": [0.1, 0.01, 0.001],
                "largest": [[0.5, 0.5, 0.5], [0.5, 0.1, 0.01]],
            },
        },
        "theory": {
            "co_selection": {
                "half_width": 0.042,
                "alpha": 0.05,
                "noise": [0.01, 0.1],
                "mean": [0.001, 0.0058],
                "largest": [0.01, 0.0315],
                "beyond": [0.0, 0.0077],
                "joint": [0.001, 0.004],
                "joint_bound": [0.012, 0.15],
                "regularity": 0.08,
            },
            "entropy": {"own": 1.93, "informed": 1.99, "bound": 4.74, "mixing": 2.8},
            "skipped": {"clusters": "there is no previous MoE layer."},
            "slopes": {
                "strip": 0.1,
                "softmax": {"at_token": 0.2, "jump": 0.0, "largest": 0.231},
                "top_k": {"at_token": 0.3, "jump": 0.546, "largest": None},
                "smooth": {"at_token": 0.3, "jump": 0.0, "largest": 70.6},
            },
            "tsne": {"x": [0.1, 0.2, -0.3], "y": [1.0, 0.5, -0.5], "experts": [0, 2, 2]},
        },
        "what_if": {"extra": [0.2131, 0.02, 0.001], "extra_law": [0.3, 0.03, 0.003]},
        **changed,
    }


STORED: dict[str, Any] = {
    "schema": 1,
    "status": "complete",
    "model": copy.deepcopy(audited.STORED["model"]),
    "data": {"kind": "texts", "checksum": "f70d1419", "batches": 2, "sequences": 8, "tokens": 400},
    "settings": {"noise": 0.05, "seed": 7, "what_if": "smooth"},
    "versions": {"holdfast": "0.1.0", "torch": "2.13.7"},
    "seconds": 5.83,
    "layers": [
        measured(0),
        measured(2, pictures=None, theory=None),
    ],
    "refused": [{"layer": 1, "name": "model.layers.1.mlp", "router": "Linear ReLU", "reason": "its ties are not flats."}],
    "what_if": {
        "router": "smooth",
        "cost": {
            "loss": {"before": 2.0, "after": 2.125},
            "experts_per_token": {"before": 2.0, "after": 2.345},
        },
        "jump": {"before": 0.4567, "after": 0.0004},
    },
}


# As it is read from its file.
report_of: Callable[[dict[str, Any]], GeometryReport] = partial(from_mapping, GeometryReport)
