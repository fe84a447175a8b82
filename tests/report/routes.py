"""Stored routes by hand: numbers that can be followed, and a text that looks like one."""

import random
from collections.abc import Sequence
from typing import Any

EXPERTS = 4
ABOUT = "noise of 5% of each embedding's length"


def stored_routes(tokens: int, layers: int = 2, shift: int = 0, flips: Sequence[int] = (1,)) -> dict[str, Any]:
    """Token t of layer l has the experts t + l + shift and the next; under noise, those of `flips` move on by two."""

    def selected(token: int, layer: int, moved: int = 0) -> list[int]:
        return [(token + layer + shift + moved + slot) % EXPERTS for slot in (0, 1)]

    return {
        "layers": [
            {
                "experts": [selected(token, layer) for token in range(tokens)],
                "weights": [[700 - layer, 300 + layer]] * tokens,
                "margins": [round(0.01 * (token + 1), 3) for token in range(tokens - 1)] + [None],
                "radii": [[1e-06, 5e-05, 0.0005, 0.005, 0.5][token % 5] for token in range(tokens - 1)] + [None],
                "core": 2,
            }
            for layer in range(layers)
        ],
        "perturbed": {
            "noise": {
                "about": ABOUT,
                "compared": [[0, tokens - 1]],
                "layers": [
                    {
                        "tokens": list(flips),
                        "experts": [selected(token, layer, 2) for token in flips],
                        "weights": [[510, 490]] * len(flips),
                    }
                    for layer in range(layers)
                ],
            },
            "words": {
                "about": "words",
                "compared": [[0, 2]],
                "layers": [{"tokens": [], "experts": [], "weights": []}] * layers,
            },
        },
    }


WORDS = ["the", "of", "a", "routing", "expert", "token", "return", "smallest", "arguments", "module", "iterator", "mapping"]


def large_routes(
    tokens: int, layers: int, experts: int = 64, k: int = 2, share: float = 0.15, seed: int = 0
) -> dict[str, Any]:
    """Return routes of the size of a real model: a share of the tokens flips under each of six perturbations."""
    draw = random.Random(seed)

    def some(count: int) -> list[list[int]]:
        return [draw.sample(range(experts), k) for _ in range(count)]

    def weights(count: int) -> list[list[int]]:
        return [[first, 1000 - first, *[0] * (k - 2)] for first in (draw.randint(500, 999) for _ in range(count))]

    def numbers() -> list[float]:
        return [float(f"{10 ** draw.uniform(-6, 0):.3g}") for _ in range(tokens)]

    def changed() -> dict[str, Any]:
        flips = sorted(draw.sample(range(tokens), int(share * tokens)))
        return {"tokens": flips, "experts": some(len(flips)), "weights": weights(len(flips))}

    named = ("noise.0.01", "noise.0.05", "routing.bf16", "model.bf16", "words", "attack")
    return {
        "layers": [
            {"experts": some(tokens), "weights": weights(tokens), "margins": numbers(), "radii": numbers(), "core": None}
            for _ in range(layers)
        ],
        "perturbed": {
            name: {"about": name, "compared": [[0, tokens]], "layers": [changed() for _ in range(layers)]} for name in named
        },
    }


def large_examples(tokens: int, texts: int = 1) -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [{"pieces": [f" {draw.choice(WORDS)}" for _ in range(tokens // texts)]} for _ in range(texts)]
