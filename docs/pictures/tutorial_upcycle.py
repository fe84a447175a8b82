"""Draw tutorial_upcycle.svg from tutorial_upcycle.json: the loss on held-out text during fine-tuning, dense and upcycled.

`python docs/site/tutorials.py upcycle-and-fine-tune` makes the numbers.
"""

import math
from typing import Any

from charts import Plot, chart, heading
from svg_parts import text


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers from what the tutorial has defined."""
    return {"parameters": names["sizes"], "losses": {name: list(curve.items()) for name, curve in names["curves"].items()}}


def picture(numbers: dict[str, Any]) -> str:
    losses = numbers["losses"]
    values = [loss for curve in losses.values() for _, loss in curve]
    low, high = math.floor(5 * min(values)) / 5, math.ceil(5 * max(values)) / 5
    steps = [step for step, _ in losses["dense"]]
    plot = Plot((0, max(steps)), (low, high), top=84, height=250)
    levels = [low + (high - low) * place / 4 for place in range(5)]
    parts = heading("Fine-tuning from the same weights", "Loss on held-out text, nats per token (lower is better)")
    parts += plot.axes([(step, str(step)) for step in steps], [(level, f"{level:.2f}") for level in levels], "step")
    places = [plot.at(*curve[-1])[1] for curve in losses.values()]
    apart = abs(places[0] - places[1])
    for kind, (name, curve) in enumerate(losses.items()):
        x, y = plot.at(*curve[-1])
        above = y <= min(places)
        label = f"{name}, {numbers['parameters'][name]:,} parameters"
        shift = (-30 if above else 24) if apart < 60 else -12
        parts += [plot.curve(curve, kind), *plot.dots(curve, kind), text(x, y + shift, label, "end")]
    return chart(396, "Loss on held-out text during fine-tuning, dense and upcycled", parts)
