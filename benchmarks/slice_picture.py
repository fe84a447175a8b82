"""Draw docs/pictures/slice.svg, a slice through one layer's token space, from the stored numbers of one geometry report.

    python benchmarks/slice_picture.py                                        # draw from docs/pictures/slice.json
    python benchmarks/slice_picture.py results/demo/geometry/geometry.json    # store its numbers first, then draw

Left: the model's own top-k. Right: `smooth` on the same weights. Below: the layer's output on the way through a boundary.
Cells and strips are polygons, cut exactly from the keys of the experts in the plane.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STORED, DRAWN = PICTURES / "slice.json", PICTURES / "slice.svg"
COMMANDS = [
    "holdfast compare --out results/demo",
    "holdfast geometry results/demo/cells/smoe-seed0 --out results/demo/geometry",
]

WIDTH, HEIGHT, SIDE, TOP = 840, 690, 380, 84
LEFT = (20, 440)  # of the two squares
CURVE_TOP, CURVE_HEIGHT = 530, 108
COLOURS = 8

# Okabe and Ito's colours for the colour-blind as light or dark tints, and the same ones shaded for the strips.
LIGHT = ["#a9d4f0", "#f9cf9c", "#a5dfc8", "#f0c1dc", "#f6ea9a", "#d3d7dc", "#c9c0f0", "#f5b3a2"]
DARK = ["#1d4b6b", "#6b4218", "#14503f", "#5f3350", "#57511a", "#3f464e", "#413a70", "#6e3226"]

Polygon = list[tuple[float, float]]


def stored_numbers(report: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the part of a geometry report that the picture needs, with what is needed to reproduce it."""
    found = report["layers"][layer]
    piece = next(each for each in found["pictures"]["slices"] if each["kind"] == "tokens")
    normal = found["pictures"]["normal"]
    source = report["data"]["source"]
    return {
        "commands": COMMANDS,
        "versions": report["versions"],
        "model": {key: report["model"][key] for key in ("class", "parameters", "experts", "routers")},
        "data": {"source": source["name"], "checksum": source["checksum"], "tokens": report["data"]["tokens"]},
        "settings": report["settings"],
        "layer": layer,
        "k": found["k"],
        "strip": found["theory"]["slopes"]["strip"],
        "slice": {key: piece[key] for key in ("low", "high", "keys", "sets", "lines", "points", "tokens")},
        "normal": {key: normal[key] for key in ("distance", "positions", "change")},
        "token": found["pictures"]["token"]["text"],
        "jump": {"before": report["what_if"]["jump"]["before"], "after": report["what_if"]["jump"]["after"]},
    }


def clipped(polygon: Polygon, across: float, up: float, offset: float) -> Polygon:
    """Return the part of a convex polygon where across x + up y + offset >= 0."""
    values = [across * x + up * y + offset for x, y in polygon]
    found: Polygon = []
    for place, (point, value) in enumerate(zip(polygon, values, strict=True)):
        following, after = polygon[(place + 1) % len(polygon)], values[(place + 1) % len(polygon)]
        if value >= 0:
            found.append(point)
        if (value > 0 > after) or (value < 0 < after):
            share = value / (value - after)
            found.append((point[0] + share * (following[0] - point[0]), point[1] + share * (following[1] - point[1])))
    return found


def cell(stored: dict[str, Any], chosen: list[int]) -> Polygon:
    """Return the polygon in which the experts `chosen` have the largest keys."""
    (left, bottom), (right, top) = stored["slice"]["low"], stored["slice"]["high"]
    keys, polygon = stored["slice"]["keys"], [(left, bottom), (right, bottom), (right, top), (left, top)]
    for one in chosen:
        for other in range(len(keys)):
            if other not in chosen and polygon:
                polygon = clipped(polygon, *(a - b for a, b in zip(keys[one], keys[other], strict=True)))
    return polygon


def strips(stored: dict[str, Any], chosen: list[int]) -> list[Polygon]:
    """Return the parts of a cell where an expert outside is less than the strip's width below one of the chosen."""
    keys, found = stored["slice"]["keys"], []
    for one in chosen:
        for other in (other for other in range(len(keys)) if other not in chosen):
            across, up, offset = (b - a for a, b in zip(keys[one], keys[other], strict=True))
            polygon = clipped(cell(stored, chosen), across, up, offset + stored["strip"])
            if len(polygon) > 2:
                found.append(polygon)
    return found


def colours_of(stored: dict[str, Any]) -> list[int]:
    """Return a colour for each set; sets that differ by one expert are neighbours and get different ones."""
    sets, colours = stored["slice"]["sets"], list[int]()
    for place, experts in enumerate(sets):
        near = [other for other in range(place) if len(set(experts) & set(sets[other])) >= len(experts) - 1]
        taken = {colours[other] for other in near}
        colours.append(next((colour for colour in range(COLOURS) if colour not in taken), place % COLOURS))
    return colours


def picture(stored: dict[str, Any]) -> str:
    """Return the SVG."""
    jump = stored["jump"]
    lines = [
        _text(20, 30, "Where routing jumps", "title"),
        _text(
            20,
            50,
            f"A plane through three tokens, layer {stored['layer']}. Inputs in one cell use the same {stored['k']} experts.",
            "small",
        ),
        _text(LEFT[0], TOP - 10, "top-k: the output jumps at every line"),
        _text(LEFT[1], TOP - 10, "smooth, same weights: experts fade in and out in strips"),
    ]
    lines += [part for panel in (0, 1) for part in _panel(stored, panel)]
    lines += _curves(stored)
    origin = (
        f"smoe of `make demo`, {stored['data']['tokens']:,} tokens of {stored['data']['source']}. Mean jump at a token's "
        f"nearest line, of the output: top-k {jump['before']:.0%}, smooth {jump['after']:.2%}."
    )
    lines.append(_text(20, HEIGHT - 14, origin, "small"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Cells of a layer for top-k and smooth, and its output on the way through a boundary">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    frame = f'<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>'
    return "\n".join([head, f"<style>\n{style()}\n</style>", page, frame, *lines, "</svg>"]) + "\n"


def style() -> str:
    light = " ".join(f".c{place} {{ fill: {colour} }}" for place, colour in enumerate(LIGHT))
    dark = " ".join(f".c{place} {{ fill: {colour} }}" for place, colour in enumerate(DARK))
    return f"""\
  text {{ font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }}
  .title {{ font-size: 16px; font-weight: 600 }} .small {{ font-size: 12px; fill: #59636e }} .mid {{ text-anchor: middle }}
  .page {{ fill: #ffffff }} .frame {{ fill: none; stroke: #d1d9e0 }}
  .axis {{ stroke: #59636e; stroke-width: 1; stroke-dasharray: 2 3 }}
  .tie {{ stroke: #1f2328; stroke-width: 1.5; stroke-linecap: round }} .soft {{ stroke-dasharray: 2 4 }}
  .point {{ fill: #ffffff; stroke: #1f2328; stroke-width: 2 }} .token {{ fill: #1f2328 }}
  .shade {{ filter: brightness(0.72) }} .own {{ fill: none; stroke: #0072b2; stroke-width: 2.5 }}
  .other {{ fill: none; stroke: #c44e00; stroke-width: 2.5; stroke-dasharray: 7 4 }}
  {light}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #f0f6fc }} .small {{ fill: #9198a1 }} .page {{ fill: #0d1117 }} .frame {{ stroke: #3d444d }}
    .tie {{ stroke: #f0f6fc }} .point {{ fill: #0d1117; stroke: #f0f6fc }} .token {{ fill: #f0f6fc }}
    .shade {{ filter: brightness(1.55) }} .own {{ stroke: #5aaee8 }} .other {{ stroke: #ff8f4a }}
    {dark}
  }}"""


def _panel(stored: dict[str, Any], panel: int) -> list[str]:
    piece, low, high = stored["slice"], stored["slice"]["low"], stored["slice"]["high"]
    scale = SIDE / (high[0] - low[0])

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT[panel] + (x - low[0]) * scale, TOP + SIDE - (y - low[1]) * scale

    def drawn(polygon: Polygon, kind: str) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in polygon))
        return f'<polygon class="{kind}" points="{points}"/>'

    lines, names = [], []
    for chosen, colour in zip(piece["sets"], colours_of(stored), strict=True):
        polygon = cell(stored, chosen)
        if len(polygon) < 3:
            continue
        lines.append(drawn(polygon, f"c{colour}"))
        if panel == 1:
            lines += [drawn(strip, f"c{colour} shade") for strip in strips(stored, chosen)]
        if _area(polygon) > 0.02 * (high[0] - low[0]) ** 2:
            x, y = at(sum(x for x, _ in polygon) / len(polygon), sum(y for _, y in polygon) / len(polygon))
            clear = all(
                abs(x - at(mark["x"], mark["y"])[0]) > 40 or abs(y - at(mark["x"], mark["y"])[1]) > 26
                for mark in piece["tokens"]
            )
            names.append(_text(x, y + 5 if clear else y + 34, "{" + ", ".join(map(str, chosen)) + "}", "mid"))
    soft = " soft" if panel else ""
    for x0, y0, x1, y1, *_ in piece["lines"]:
        (a, b), (c, d) = at(x0, y0), at(x1, y1)
        lines.append(f'<line class="tie{soft}" x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>')
    for x, y, *_ in piece["points"]:
        lines.append('<circle class="point" cx="{:.1f}" cy="{:.1f}" r="4"/>'.format(*at(x, y)))
    for mark in piece["tokens"]:
        x, y = at(mark["x"], mark["y"])
        lines.append(
            f'<rect class="token" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" '
            f'transform="rotate(45 {x:.1f} {y:.1f})"/>'
        )
        names.append(_text(x, y - 12, f"“{mark['text']}”", "mid"))
    return lines + names


def _curves(stored: dict[str, Any]) -> list[str]:
    """Return the layer's output along the normal through the nearest boundary of the first token."""
    normal = stored["normal"]
    positions, (own, other) = normal["positions"], normal["change"]
    reach, low, high = max(positions), min(*own, *other), max(*own, *other)

    def at(position: float, change: float) -> str:
        x = 20 + (position + reach) / (2 * reach) * (WIDTH - 40)
        return f"{x:.1f},{CURVE_TOP + CURVE_HEIGHT * (1 - (change - low) / (high - low)):.1f}"

    half = len(positions) // 2
    parts = [(positions[:half], own[:half], "own"), (positions[half:], own[half:], "own"), (positions, other, "other")]
    name = f"The layer's output as the input moves from “{stored['token']}” through its nearest line: "
    lines = [
        _text(20, CURVE_TOP - 26, name + "top-k (solid) jumps, smooth (dashed) does not"),
        f'<line class="axis" x1="{WIDTH / 2}" y1="{CURVE_TOP - 12}" x2="{WIDTH / 2}" y2="{CURVE_TOP + CURVE_HEIGHT + 8}"/>',
    ]
    for xs, ys, kind in parts:
        points = " ".join(at(x, y) for x, y in zip(xs, ys, strict=True))
        lines.append(f'<polyline class="{kind}" points="{points}"/>')
    return lines


def _area(polygon: Polygon) -> float:
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name}>{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, help="a geometry.json to take the numbers from")
    parser.add_argument("--layer", type=int, default=1, help="the layer to draw")
    given = parser.parse_args()
    if given.report is not None:
        STORED.write_text(json.dumps(stored_numbers(json.loads(given.report.read_text()), given.layer)) + "\n")
    DRAWN.write_text(picture(json.loads(STORED.read_text())))


if __name__ == "__main__":
    main()
