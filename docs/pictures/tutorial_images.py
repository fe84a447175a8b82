"""Draw tutorial_images.svg from tutorial_images.json: the error under PGD by its budget, for each router.

`python docs/site/tutorials.py attack-an-image-classifier` makes the numbers.
"""

import math
from dataclasses import asdict
from typing import Any

from charts import Plot, chart, heading, segment
from svg_parts import text

APART = 3  # units between the intervals of two routers at the same budget


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers from what the tutorial has defined."""
    rows = names["results"].rows
    curves = {row.router: row.curves["PGD"] for row in rows}
    return {
        "seeds": len(rows[0].seeds),
        "examples": curves[rows[0].router].examples,
        "budgets": curves[rows[0].router].budgets,
        "errors": {router: [asdict(point) for point in curve.figure] for router, curve in curves.items()},
    }


def picture(numbers: dict[str, Any]) -> str:
    budgets, errors = numbers["budgets"], numbers["errors"]
    highest = max(point["high"] for points in errors.values() for point in points)
    plot = Plot((0, 1.05 * max(budgets)), (0, min(100, 20 * math.ceil(highest / 20))), top=84, height=270)
    parts = heading(
        "The error under PGD grows with its budget",
        f"Error of {numbers['examples']} test images: mean of {numbers['seeds']} seeds and 95% interval",
    )
    levels = [(float(level), f"{level}%") for level in range(0, int(plot.y[1]) + 1, 20)]
    parts += plot.axes([(budget, f"{budget:g}") for budget in budgets], levels, "largest change of a pixel, from 0 to 1")
    for kind, (router, points) in enumerate(errors.items()):
        means = [(budget, point["mean"]) for budget, point in zip(budgets, points, strict=True)]
        parts += [plot.curve(means, kind), *plot.dots(means, kind)]
        for budget, point in zip(budgets, points, strict=True):
            x, low = plot.at(budget, max(point["low"], 0))
            high = plot.at(budget, min(point["high"], plot.y[1]))[1]
            x += APART * (2 * kind - 1)
            parts.append(segment(x, low, x, high, f"line{kind}"))
        y = plot.top + 20 + 22 * kind
        parts += [segment(plot.left + 16, y - 5, plot.left + 56, y - 5, f"line{kind}"), text(plot.left + 64, y, router)]
    return chart(416, "Error under PGD by its budget for two routers, with 95% intervals over seeds", parts)
