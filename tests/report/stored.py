"""A small comparison as `holdfast compare` stores it, made by hand."""

import math
from collections.abc import Sequence
from typing import Any

STEPS, LAYERS, EXPERTS = 12, 2, 4


def stored(routers: Sequence[str] = ("smoe", "smooth", "ac"), seeds: int = 3) -> dict[str, Any]:
    """The second router is better, the third no different; with one seed there are no intervals."""
    rows = [_row(place, name, seeds) for place, name in enumerate(routers)]
    cells = [_cell(place, name, seed) for seed in range(seeds) for place, name in enumerate(routers)]
    return {
        "run": {
            "holdfast": "0.1.0",
            "recipe": {
                "about": "a small model",
                "training": {"steps": STEPS, "learning_rate": 0.0031},
                "attack": {"rate": 0.025},
            },
            "text": {"name": "python-docs", "checksum": "744f2cda"},
            "attack": {"attack": "word swap", "changed": 439, "checksum": "a334100e", "flags": []},
        },
        "versions": {"holdfast": "0.1.0", "torch": "2.13.7", "transformers": "5.22.9", "Python": "3.11.7"},
        "rows": rows,
        "cells": cells,
    }


def _row(place: int, name: str, seeds: int) -> dict[str, Any]:
    mean = -3.125 if place == 1 else 0.25
    row: dict[str, Any] = {
        "router": name,
        "seeds": list(range(seeds)),
        "parameters": 46240 + place,
        "experts_per_token": 2.4 if place == 1 else 2.0,
        "clean": 184.5 + (mean if place else 0),
        "attacked": 191.25 + (mean if place else 0),
    }
    if place:
        low, high = (None, None) if seeds == 1 else (mean - 1.5, mean + 1.5)
        words = f"{mean:+.4g}" if place == 1 else "no difference"
        found = {"mean": mean, "low": low, "high": high, "seeds": seeds, "words": f"{words}, {seeds} seeds"}
        row.update({"clean, difference": found, "attacked, difference": found})
    return row


def _cell(place: int, name: str, seed: int) -> dict[str, Any]:
    log = [{"step": step + 1, "loss": 5.3 * math.exp(-step / 9) + 0.05 * place + 0.02 * seed} for step in range(STEPS)]
    return {
        "router": name,
        "seed": seed,
        "first_batch": f"first{seed}",
        "last_batch": f"last{seed}",
        "log": log,
        "clean": _score(184.5, place, seed),
        "attacked": {**_score(191.25, place, seed), "perplexity_of_clean_targets": 187.625},
    }


def _score(perplexity: float, place: int, seed: int) -> dict[str, Any]:
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
    return {"perplexity": perplexity + seed - place, "bits_per_byte": 1.7, "routing": {"layers": layers}}
