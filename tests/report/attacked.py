"""The stored result of `holdfast attack ... --budget A B C --out`, by hand: two attacks at three budgets."""

from typing import Any

BUDGETS = [0.0, 1 / 255, 2 / 255]


def curve(*figures: float) -> dict[str, Any]:
    return {"budgets": BUDGETS, "figure": list(figures), "top5": [value / 10 for value in figures], "examples": 100}


def stored_attack() -> dict[str, Any]:
    settings = {"norm": "linf", "examples": 100, "steps": 10, "restarts": 1, "seed": 0, "options": {"step": 0.001}}
    curves = {"PGD": curve(12.0, 41.0, 73.0), "SPSA": curve(12.0, 35.0, 61.0)}
    rows = [[name, 255 * budget, *pair] for name, each in curves.items() for budget, pair in _points(each)]
    return {
        "model": "runs/vmoe",
        "data": {"name": "digits", "checksum": "f70d1419"},
        "versions": {"holdfast": "0.1.0", "torch": "2.13.7"},
        "title": "Errors under attack",
        "columns": ["attack", "budget, 1/255", "error, %", "top-5 error, %"],
        "rows": rows,
        "clean": {"figure": 12.0, "top5": 1.2, "examples": 100},
        "curves": curves,
        "summary": {"attacks": [{"attack": name, **settings} for name in curves]},
        "flags": [{"kind": "weak", "detail": "SPSA found fewer errors than PGD."}],
    }


def _points(each: dict[str, Any]) -> list[tuple[float, tuple[float, float]]]:
    pairs = zip(each["figure"], each["top5"], strict=True)
    return list(zip(each["budgets"], pairs, strict=True))
