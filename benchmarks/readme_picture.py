"""Draw the README's picture, docs/pictures/what_if.svg, from the stored numbers of one audit.

    python benchmarks/readme_picture.py                                # draw from docs/pictures/what_if.json
    python benchmarks/readme_picture.py results/demo/audit/audit.json  # store the numbers of this audit first, then draw

`make demo` writes such an audit: a trained `smoe` before and after its top-k is replaced by `smooth`, without training.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STORED = PICTURES / "what_if.json"
DRAWN = PICTURES / "what_if.svg"

COMMANDS = ["holdfast compare --out results/demo", "holdfast audit results/demo/cells/smoe-seed0 --what-if smooth"]
MEASURES = ("router", "cost", "flips", "flip_output", "output", "prediction_flips")  # stored of `what_if`

WIDTH, TOP, ROW, BAR = 840, 92, 34, 14
LABEL, START, SPAN = 20, 262, 250  # left edge of the names and of the bars, length of a bar of 100%
BY_FLIPS, IN_ALL = 640, 815  # right edges of the two columns of numbers

STYLE = """\
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
  .title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #59636e } .end { text-anchor: end }
  .page { fill: #ffffff } .before { fill: #d1d9e0 } .after { fill: #0969da } .frame { fill: none; stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 }
    .page { fill: #0d1117 } .before { fill: #3d444d } .after { fill: #4493f8 } .frame { stroke: #3d444d }
  }"""


def stored_numbers(audit: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an audit report that the picture needs, with what is needed to reproduce it."""
    source = audit["data"]["source"]
    return {
        "commands": COMMANDS,
        "versions": audit["versions"],
        "model": {key: audit["model"][key] for key in ("class", "parameters", "experts", "routers")},
        "data": {"source": source["name"], "checksum": source["checksum"], "tokens": audit["data"]["tokens"]},
        "settings": {key: audit["settings"][key] for key in ("seed", "noise", "rate", "budget")},
        "what_if": {key: audit["what_if"][key] for key in MEASURES},
    }


def perturbations(stored: dict[str, Any]) -> dict[str, str]:
    """Return a readable label for each perturbation under which flips changed the model's layer outputs, by name."""
    settings = stored["settings"]
    labels = {f"noise.{level:g}": f"{level:.0%} noise on router inputs" for level in settings["noise"]}
    labels |= {f"routing.{dtype}": f"router computed in {dtype}" for dtype in ("fp16", "bf16")}
    labels |= {"model.bf16": "whole model in bf16"}
    labels |= {
        "words": f"words swapped (rate {settings['rate']:.0%})",
        "typos": f"words misspelt (rate {settings['rate']:.0%})",
    }
    labels |= {"attack": f"attack on router inputs, within {settings['budget']:.0%}"}
    flips = stored["what_if"]["flip_output"]
    return {name: labels.get(name, name) for name in flips if flips[name]["before"] > 0}


def picture(stored: dict[str, Any]) -> str:
    """Return the SVG: for each perturbation, how much of the output change caused by flips remains with `smooth`."""
    result = stored["what_if"]
    flips, total, cost = result["flip_output"], result["output"], result["cost"]
    labels = perturbations(stored)
    remaining = {name: flips[name]["after"] / flips[name]["before"] for name in labels}
    names = sorted(remaining, key=remaining.__getitem__)
    height = TOP + ROW * len(names) + 62
    legend = "Bar: output change caused by flips that remains after replacing top-k by smooth (top-k = 100%)"
    lines = [
        _text(LABEL, 30, "What smooth changes without training", "title"),
        _text(LABEL, 52, legend, "small"),
        _text(BY_FLIPS, 78, "caused by flips", "small end"),
        _text(IN_ALL, 78, "total output change", "small end"),
    ]
    for number, name in enumerate(names):
        y = TOP + ROW * number
        lines += [
            _text(LABEL, y + 12, labels[name]),
            _bar(START, y, SPAN, "before"),
            _bar(START, y, SPAN * min(remaining[name], 1.0), "after"),
            _text(START, y + 26, f"{_percent(remaining[name])} remains", "small"),
            _text(BY_FLIPS, y + 12, _change(flips[name]), "end"),
            _text(IN_ALL, y + 12, _change(total[name]), "end"),
        ]
    perplexity, used = cost["perplexity"], cost["experts_per_token"]
    ratios = [total[name]["after"] / total[name]["before"] for name in names]
    price = (
        f"Cost: {used['before']:.2f} → {used['after']:.2f} experts per token. Perplexity: {perplexity['before']:.1f} → "
        f"{perplexity['after']:.1f}. Total output change: {min(ratios):.2f} to {max(ratios):.2f} times that of top-k."
    )
    origin = (
        f"smoe of `make demo`, {stored['data']['tokens']:,} tokens of {stored['data']['source']}; changes are means over "
        "layers of |change| / |output|."
    )
    lines += [_text(LABEL, height - 34, price), _text(LABEL, height - 14, origin, "small")]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="Share of the output change caused by flips that remains with smooth, for each perturbation">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>'
    frame = f'<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", page, frame, *lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{name}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="2"/>'


def _change(pair: dict[str, float]) -> str:
    return f"{_percent(pair['before'])} → {_percent(pair['after'])}"


def _percent(share: float) -> str:
    """Return a share in percent with two significant digits."""
    return "<0.001%" if share < 1e-5 else f"{100 * share:#.2g}".rstrip(".") + "%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("audit", nargs="?", type=Path, help="an audit.json to take the numbers from")
    given = parser.parse_args().audit
    if given is not None:
        STORED.write_text(json.dumps(stored_numbers(json.loads(given.read_text())), indent=2) + "\n")
    DRAWN.write_text(picture(json.loads(STORED.read_text())))


if __name__ == "__main__":
    main()
