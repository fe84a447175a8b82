"""The README's picture: the output change by flips and in all, when `smooth` replaces top-k without training.

Its numbers are from one audit of the demo's trained `smoe`: results/demo/audit/audit.json of `make demo`.
"""

import math
from typing import Any

from svg_parts import EDGE, INSIDE, WIDTH, bar, origin, page, text

COMMANDS = ["holdfast compare --out results/demo", "holdfast audit results/demo/cells/smoe-seed0 --what-if smooth"]
MEASURES = ("router", "cost", "flips", "flip_output", "output", "prediction_flips")  # stored of `what_if`

TOP, ROW, BAR = 158, 68, 18  # top of the first row, heights of a row and of a bar


def stored_numbers(audit: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an audit report that the picture needs, with what is needed to reproduce it."""
    source = audit["data"]["source"]
    return {
        "commands": COMMANDS,
        "versions": audit["versions"],
        "model": {key: audit["model"][key] for key in ("architecture", "parameters", "experts", "routers")},
        "data": {"source": source["name"], "checksum": source["checksum"], "tokens": audit["data"]["tokens"]},
        "settings": {key: audit["settings"][key] for key in ("seed", "noise", "rate", "budget")},
        "what_if": {key: audit["what_if"][key] for key in MEASURES},
    }


def perturbations(stored: dict[str, Any]) -> dict[str, str]:
    """Return a readable label for each perturbation under which flips changed the model's layer outputs, by name."""
    settings = stored["settings"]
    labels = {f"noise.{level:g}": f"{level:.0%} noise on the router's input" for level in settings["noise"]}
    labels |= {f"routing.{dtype}": f"router computed in {dtype}" for dtype in ("fp16", "bf16")}
    labels |= {"model.bf16": "whole model in bf16"}
    labels |= {
        "words": f"words swapped (rate {settings['rate']:.0%})",
        "typos": f"typing errors (rate {settings['rate']:.0%})",
    }
    labels |= {"attack": f"attack on the router's input, {settings['budget']:.0%}"}
    flips = stored["what_if"]["flip_output"]
    return {name: labels.get(name, name) for name in flips if flips[name]["before"] > 0}


def picture(stored: dict[str, Any]) -> str:
    """Return the SVG: for each perturbation, the output change by flips and in total, with top-k and with smooth."""
    result = stored["what_if"]
    flips, total, cost = result["flip_output"], result["output"], result["cost"]
    labels = perturbations(stored)
    rows = sorted(labels, key=lambda name: flips[name]["after"] / flips[name]["before"])
    parts = [
        text(EDGE, 34, "What smooth changes, without training", "title"),
        text(EDGE, 60, "A flip is a token that goes to other experts."),
        text(EDGE, 82, "Grey: how much flips change a layer's output (top-k)."),
        text(EDGE, 104, "Blue: the same with smooth, as a part of the grey."),
        text(EDGE, 126, "Changes are in % of the output; total: by flips or not.", "small"),
    ]
    for number, name in enumerate(rows):
        y = TOP + ROW * number
        before, after = flips[name]["before"], flips[name]["after"]
        blue = INSIDE * min(after / before, 1.0)
        parts += [
            text(EDGE, y, labels[name]),
            text(WIDTH - EDGE, y, f"flips: {two_digits(before / after)} times less", "end"),
            bar(EDGE, y + 6, INSIDE, BAR, "grey"),
            bar(EDGE, y + 6, blue, BAR, "blue"),
            text(EDGE, y + 41, f"by flips {change(flips[name])}", "small"),
            text(WIDTH - EDGE, y + 41, f"total {change(total[name])}", "small end"),
        ]
    perplexity, used = cost["perplexity"], cost["experts_per_token"]
    ratios = [total[name]["after"] / total[name]["before"] for name in rows]
    end = TOP + ROW * len(rows)
    parts += [
        text(EDGE, end + 6, f"Price: {used['before']:.2f} → {used['after']:.2f} experts per token."),
        text(EDGE, end + 28, f"Perplexity: {perplexity['before']:.1f} → {perplexity['after']:.1f}."),
        text(EDGE, end + 50, f"Total: {min(ratios):.2f} to {max(ratios):.2f} times that of top-k, without jumps."),
        text(EDGE, end + 72, f"Changed predictions: {changed_predictions(result['prediction_flips'], rows)}."),
        text(EDGE, end + 98, origin(stored), "small"),
    ]
    label = "Output change with top-k and with smooth, for each perturbation: the part caused by flips, and the total"
    return page(end + 116, label, parts)


def two_digits(value: float) -> str:
    """Return a positive number with two significant digits, however small or large: 0.0000060, 1.8, 3,300."""
    places = 1 - math.floor(math.log10(float(f"{value:.1e}")))
    return f"{round(value, places):,.{max(places, 0)}f}"


def change(pair: dict[str, float]) -> str:
    """Return a change of the output with top-k and with smooth, in percent of the output."""
    return f"{two_digits(100 * pair['before'])}% → {two_digits(100 * pair['after'])}%"


def changed_predictions(pairs: dict[str, dict[str, float]], rows: list[str]) -> str:
    """Return under how many perturbations smooth has fewer changed predictions than top-k, and under how many more."""
    fewer = sum(pairs[name]["after"] < pairs[name]["before"] for name in rows)
    more = sum(pairs[name]["after"] > pairs[name]["before"] for name in rows)
    return f"fewer in {fewer} of {len(rows)} rows, more in {more}"
