"""Draw margin_training.svg from margin_training.json: what margin training certifies and costs, by its strength.

`python benchmarks/margin.py --out results/margin` makes the numbers, and `python docs/site/figures.py margin_training
results/margin/margin.json` stores them.
"""

from statistics import fmean
from typing import Any

from charts import EDGE, WIDTH, Plot, chart, heading
from svg_parts import text

BALANCES = (0.01, 0.1)  # of the balance loss; a curve each


def stored_numbers(report: dict[str, Any]) -> dict[str, Any]:
    return report


def picture(numbers: dict[str, Any]) -> str:
    plot = Plot((0, 1), (0.8, 1.05), top=106, height=250, right=WIDTH - 2 * EDGE)
    parts = heading("Margin training", f"Perplexity over that without it, means of {len(numbers['rows'][0]['share'])} seeds")
    parts.append(text(EDGE, 76, "At each point: strength of the loss, and experts in effect of 8", "small"))
    shares = [(each / 5, f"{each / 5:.0%}") for each in range(6)]
    levels = [(level, f"{level:.2f}") for level in (0.8, 0.85, 0.9, 0.95, 1.0, 1.05)]
    below = f"tokens certified against changes of {numbers['radius']:.1%} of their length"
    parts += plot.axes(shares, levels, below)
    for kind, balance in enumerate(BALANCES):
        rows = sorted((row for row in numbers["rows"] if row["balance"] == balance), key=lambda row: row["margin"])
        points = [(fmean(row["share"]), fmean(row["ratio"])) for row in rows]
        parts += [plot.curve(points, kind), *plot.dots(points, kind)]
        for row, point in zip(rows, points, strict=True):
            x, y = plot.at(*point)
            label = f"{row['margin']:g}: {fmean(row['used']):.1f}"
            parts.append(text(x, y - 12, label, "small mid") if kind == 0 else text(x - 8, y + 24, label, "small end"))
        x, y = plot.at(*points[-1])
        parts.append(text(x, y + (28, -14)[kind], f"balance {balance:g}", "end"))
    return chart(422, "Certified share of tokens and perplexity, by the strength of the margin loss", parts)
