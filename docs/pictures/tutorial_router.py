"""Draw tutorial_router.svg from tutorial_router.json: the share of tokens that an attack flips, by its budget.

`python docs/site/tutorials.py write-a-router` makes the numbers.
"""

from typing import Any

from charts import Plot, chart, heading, segment
from svg_parts import text


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers from what the tutorial has defined."""
    return {"kind": names["found"].kind, "tokens": names["found"].radius.numel(), "flipped": list(names["flipped"].items())}


def picture(numbers: dict[str, Any]) -> str:
    points = numbers["flipped"]
    plot = Plot((0.4, 2.1), (0, 1), top=84, height=230)
    parts = heading(
        "The certificate, attacked", f"Share of {numbers['tokens']} tokens that the attack flips to other experts"
    )
    levels = [(level, f"{level:.0%}") for level in (0, 0.25, 0.5, 0.75, 1)]
    parts += plot.axes(
        [(times, f"{times:g}") for times in (0.5, 1.0, 1.5, 2.0)],
        levels,
        "length of the perturbation, in multiples of the certified radius",
    )
    x = plot.at(1, 0)[0]
    parts += [
        segment(x, plot.top, x, plot.top + plot.height, "axis"),
        text(x - 8, plot.top + 110, "certified", "end"),
        text(x + 12, plot.top + 110, "beyond the radius"),
        plot.curve(points, 1),
        *plot.dots(points, 1),
    ]
    return chart(376, "Share of tokens flipped by an attack, below and above the certified radius", parts)
