"""Draw tutorial_audit.svg from tutorial_audit.json: what remains of the output change by flips, for each width of `smooth`.

`python docs/site/tutorials.py audit-and-mend` makes the numbers.
"""

from typing import Any

from charts import EDGE, WIDTH, chart, heading, segment
from svg_parts import bar, text

START, SPAN, BAR, GAP, TOP = 226, 290, 17, 26, 118


def stored_numbers(names: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers from what the tutorial has defined."""
    trials, shown = names["trials"], names["shown"]
    return {
        "perturbations": shown,
        "top_k": {name: names["numbers"][f"output.{name}.flip"] for name in shown},
        "smooth": {
            str(eps): {
                "experts_per_token": trial.cost["experts_per_token"].after,
                "perplexity": trial.cost["perplexity"].after,
                "by_flips": {name: trial.flip_output[name].after for name in shown},
            }
            for eps, trial in trials.items()
        },
        "perplexity": names["numbers"]["perplexity"],
    }


def picture(numbers: dict[str, Any]) -> str:
    widths = list(numbers["smooth"].items())
    parts = heading(
        "What remains of the output change that flips cause",
        "smooth without training, relative to top-k = 100%, by the strip:",
    )
    for place, (eps, found) in enumerate(widths):
        x = EDGE + 190 * place
        parts += [
            bar(x, 70, 14, 14, f"shade{place}"),
            text(x + 20, 82, f"{eps} ({found['experts_per_token']:.2f} experts)", "small"),
        ]
    group = BAR * len(widths) + GAP
    for share in (0.0, 0.5, 1.0):
        across = START + share * SPAN
        parts += [
            segment(across, TOP - 8, across, TOP + group * len(numbers["perturbations"]) - GAP + 6, "grid"),
            text(across, TOP - 14, f"{share:.0%}", "small mid"),
        ]
    for number, (name, label) in enumerate(numbers["perturbations"].items()):
        y = TOP + number * group
        parts += [
            text(EDGE, y + 22, label),
            text(EDGE, y + 42, f"top-k: {numbers['top_k'][name]:.2%} of the output", "small"),
        ]
        for place, (_, found) in enumerate(widths):
            remains = found["by_flips"][name] / numbers["top_k"][name]
            parts += [
                bar(START, y + place * BAR, SPAN * min(remains, 1.0), BAR - 2, f"shade{place}"),
                text(START + SPAN * min(remains, 1.0) + 6, y + place * BAR + 12, f"{remains:.1%}", "small"),
            ]
    height = TOP + group * len(numbers["perturbations"]) + 16
    assert START + SPAN + 60 < WIDTH
    return chart(height, "Share of the output change by flips that remains with smooth, for three strips", parts)
