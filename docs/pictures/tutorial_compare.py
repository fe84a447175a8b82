"""Draw tutorial_compare.svg from tutorial_compare.json: differences of the perplexity to the baseline, with 95% intervals.

`python docs/site/tutorials.py compare-routers` makes the numbers.
"""

import math
from typing import Any

from charts import EDGE, WIDTH, chart, heading, segment
from svg_parts import text

LEFT, RIGHT, TOP, ROW = 190, WIDTH - 24, 96, 46


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers from what the tutorial has defined."""
    rows = names["more"].rows
    return {
        "seeds": len(rows[0].seeds),
        "title": f"Difference of the perplexity to {rows[0].router} ({rows[0].clean:.1f})",
        "rows": [
            {
                "router": row.router,
                "experts_per_token": row.experts_per_token,
                **{key: getattr(row.clean_difference, key) for key in ("mean", "low", "high")},
            }
            for row in rows[1:]
        ],
    }


def picture(numbers: dict[str, Any]) -> str:
    rows = numbers["rows"]
    reach = max(abs(row[key]) for row in rows for key in ("low", "high")) or 1.0
    step = 10 ** math.floor(math.log10(reach))
    step *= next(times for times in (0.5, 1, 2, 5) if reach / (step * times) <= 4)
    reach = 1.08 * reach

    def at(value: float) -> float:
        return LEFT + (value + reach) / (2 * reach) * (RIGHT - LEFT)

    bottom = TOP + ROW * len(rows)
    better = "right" if numbers.get("better") == "higher" else "left"
    parts = heading(
        numbers["title"],
        f"Mean of {numbers['seeds']} seeds and 95% interval; {better} of 0 is better",
    )
    for place in range(-4, 5):
        if abs(place * step) <= reach:
            x = at(place * step)
            label = f"{place * step:+g}" if place else "0"
            parts += [segment(x, TOP - 12, x, bottom, "grid" if place else "axis"), text(x, bottom + 20, label, "small mid")]
    for place, row in enumerate(rows):
        y, kind = TOP + ROW * place + 12, int(row["low"] <= 0 <= row["high"])
        parts += [
            text(EDGE, y, row["router"]),
            text(EDGE, y + 18, f"{row['experts_per_token']:.2f} experts per token", "small"),
            segment(at(row["low"]), y, at(row["high"]), y, f"line{kind}"),
            f'<circle class="fill{kind}" cx="{at(row["mean"]):.1f}" cy="{y:.1f}" r="5.5"/>',
        ]
    parts.append(text(EDGE, bottom + 46, "Solid: the interval contains 0, no difference. Dashed: it does not.", "small"))
    return chart(bottom + 62, numbers["title"] + ", with 95% intervals", parts)
