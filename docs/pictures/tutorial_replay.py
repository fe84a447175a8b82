"""Draw tutorial_replay.svg from tutorial_replay.json: how many tokens have a log ratio above each size, live and replayed.

`python docs/site/tutorials.py replay-routes` makes the numbers.
"""

from typing import Any

from charts import LOGARITHMIC, Plot, chart, heading
from svg_parts import text

SIZES = [place / 50 for place in range(101)]


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the share of tokens above each size, from what the tutorial has defined."""
    import torch

    found = {}
    for name, ratios in names["ratios"].items():
        sizes = torch.stack(ratios).abs().flatten()
        found[name] = [float((sizes > size).double().mean()) for size in SIZES]
    tokens = sum(part.numel() for part in names["ratios"]["live"])
    return {"tokens": tokens, "sizes": SIZES, "shares": found}


def picture(numbers: dict[str, Any]) -> str:
    least = 1 / numbers["tokens"]
    ends = [
        max(s for s, share in zip(numbers["sizes"], shares, strict=True) if share) for shares in numbers["shares"].values()
    ]
    reach = min(numbers["sizes"][-1], max(ends) + 0.1)
    plot = Plot((0, reach), (least / 1.5, 1), top=84, height=270, scale=LOGARITHMIC)
    levels = [
        (level, words)
        for level, words in ((1, "100%"), (0.1, "10%"), (0.01, "1%"), (1e-3, "0.1%"), (1e-4, "0.01%"))
        if level >= least / 1.5
    ]
    step = 0.1 if reach < 1 else 0.2
    ticks = [(place * step, f"{place * step:.1f}") for place in range(int(reach / step + 1e-9) + 1)]
    parts = heading(
        "Replay shortens the tail", f"Share of {numbers['tokens']:,} generated tokens whose absolute log ratio is above x"
    )
    parts += plot.axes(ticks, levels, "x: absolute difference of log-probabilities, training and rollout")
    for kind, (name, shares) in enumerate(numbers["shares"].items()):
        points = [(size, share) for size, share in zip(numbers["sizes"], shares, strict=True) if share and size <= reach]
        x, y = plot.at(*points[-1])
        parts += [plot.curve(points, kind), *plot.dots(points[-1:], kind), text(x + 10, y - 6, name)]
    return chart(416, "Share of tokens above each absolute log ratio, live and replayed, on a logarithmic scale", parts)
