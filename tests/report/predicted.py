"""A stored report of certified predictions by hand: two routers, one with two seeds, and a model that was skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.checked import from_mapping
from holdfast.train.prediction_report import PredictionReport

RADII = [0.1, 0.2]


def example(
    number: int, *, right: bool = True, radius: float = 0.0, stays: tuple[bool, bool, bool] | None = None
) -> dict[str, Any]:
    """Return an example with votes at the two radii and, if it is certified, at its own."""
    at = [*RADII, radius][: 3 if radius else 2]
    votes = [
        {"radius": one, "hits": 700 if kept else 300, "stays": kept} for one, kept in zip(at, stays or (), strict=False)
    ]
    return {"number": number, "label": 1, "chosen": 1 if right else 0, "hits": 93, "radius": radius, "attacked": votes}


def model(router: str, seed: int, examples: list[dict[str, Any]]) -> dict[str, Any]:
    path = f"comparison/cells/{router}-seed{seed}"
    return {"path": path, "router": router, "seed": seed, "settings": {}, "examples": examples}


def stored_predictions() -> dict[str, Any]:
    return {
        "schema": 1,
        "settings": {
            "sigma": 0.2,
            "samples": 100,
            "selection": 10,
            "alpha": 0.01,
            "examples": 4,
            "seed": 7,
            "radii": RADII,
            "steps": 5,
            "draws": 8,
            "votes": 1000,
        },
        "unit": "pixels between 0 and 1",
        "data": {"name": "digits", "checksum": "f70d1419"},
        "models": [
            model(
                "smoe",
                0,
                [
                    example(0, radius=0.25, stays=(True, True, True)),
                    example(3, radius=0.15, stays=(True, False, True)),
                    example(6, stays=(False, False, True)),
                    example(9, right=False),
                ],
            ),
            model(
                "smoe",
                1,
                [
                    example(0, radius=0.3, stays=(True, True, True)),
                    example(3, radius=0.12, stays=(True, True, True)),
                    example(6, right=False, radius=0.05, stays=(False, False, True)),
                    example(9, right=False),
                ],
            ),
            model("smooth", 0, [example(number, radius=0.35, stays=(True, True, True)) for number in (0, 3, 6, 9)]),
        ],
        "skipped": {"comparison/cells/capacity-seed0": "capacity routes the copies of a batch together."},
        "versions": {"torch": "2.13.7"},
    }


# As it is read from its file.
report_of: Callable[[dict[str, Any]], PredictionReport] = partial(from_mapping, PredictionReport)
