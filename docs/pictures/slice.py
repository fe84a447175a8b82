"""A slice through one layer's token space: cells of top-k, strips of `smooth`, and the output on the way through a boundary.

Its numbers are from one geometry report of the trained `smoe` of `make demo`. Left: its own top-k. Right: `smooth` on the
same weights. Cells and strips are polygons, cut exactly from the keys of the experts in the plane.
"""

from typing import Any

from svg_parts import EDGE, WIDTH, origin, page, text

COMMANDS = [
    "holdfast compare --out results/demo",
    "holdfast geometry results/demo/cells/smoe-seed0 --out results/demo/geometry",
]
LAYER = 1  # the layer that is drawn

SIDE, TOP, HEIGHT = 204, 118, 592  # of a square, above it, of the page
LEFT = (EDGE, WIDTH - EDGE - SIDE)  # of the two squares
CURVE_TOP, CURVE_HEIGHT = 422, 84
COLOURS = 8

# Okabe and Ito's colours for the colour-blind as light or dark tints, and the same ones shaded for the strips.
LIGHT = ["#a9d4f0", "#f9cf9c", "#a5dfc8", "#f0c1dc", "#f6ea9a", "#d3d7dc", "#c9c0f0", "#f5b3a2"]
DARK = ["#1d4b6b", "#6b4218", "#14503f", "#5f3350", "#57511a", "#3f464e", "#413a70", "#6e3226"]

Polygon = list[tuple[float, float]]


def stored_numbers(report: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a geometry report that the picture needs, with what is needed to reproduce it."""
    found = report["layers"][LAYER]
    piece = next(each for each in found["pictures"]["slices"] if each["kind"] == "tokens")
    normal = found["pictures"]["normal"]
    source = report["data"]["source"]
    return {
        "commands": COMMANDS,
        "versions": report["versions"],
        "model": {key: report["model"][key] for key in ("architecture", "parameters", "experts", "routers")},
        "data": {"source": source["name"], "checksum": source["checksum"], "tokens": report["data"]["tokens"]},
        "settings": report["settings"],
        "layer": LAYER,
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
    parts = [
        text(EDGE, 34, "Where routing jumps", "title"),
        text(EDGE, 60, f"A plane through three tokens (layer {stored['layer']}). All inputs in a"),
        text(EDGE, 80, f"coloured cell use the same {stored['k']} experts."),
        text(LEFT[0], TOP - 12, "top-k: jumps at every line"),
        text(LEFT[1], TOP - 12, "smooth: fades in the strips"),
    ]
    parts += [part for panel in (0, 1) for part in _panel(stored, panel)]
    parts += _curves(stored)
    parts += [
        text(EDGE, HEIGHT - 58, "Mean jump at a token's nearest line, as a share of the"),
        text(EDGE, HEIGHT - 38, f"output: {jump['before']:.0%} with top-k, {jump['after']:.2%} with smooth."),
        text(EDGE, HEIGHT - 14, origin(stored), "small"),
    ]
    label = "Cells of a layer for top-k and smooth, and its output on the way through a boundary"
    return page(HEIGHT, label, parts, *style())


def style() -> tuple[str, str]:
    """Return the rules of this picture, and those of its dark theme."""
    light = " ".join(f".c{place} {{ fill: {colour} }}" for place, colour in enumerate(LIGHT))
    dark = " ".join(f".c{place} {{ fill: {colour} }}" for place, colour in enumerate(DARK))
    return (
        f"""\
  .axis {{ stroke: #59636e; stroke-width: 1; stroke-dasharray: 2 3 }}
  .tie {{ stroke: #1f2328; stroke-width: 1.5; stroke-linecap: round }} .soft {{ stroke-dasharray: 2 4 }}
  .point {{ fill: #ffffff; stroke: #1f2328; stroke-width: 1.5 }} .token {{ fill: #1f2328 }}
  .shade {{ filter: brightness(0.72) }} .own {{ fill: none; stroke: #0072b2; stroke-width: 2.5 }}
  .other {{ fill: none; stroke: #c44e00; stroke-width: 2.5; stroke-dasharray: 7 4 }}
  {light}""",
        f"""\
    .axis {{ stroke: #9198a1 }} .tie {{ stroke: #f0f6fc }} .point {{ fill: #0d1117; stroke: #f0f6fc }}
    .token {{ fill: #f0f6fc }} .shade {{ filter: brightness(1.55) }} .own {{ stroke: #5aaee8 }} .other {{ stroke: #ff8f4a }}
    {dark}""",
    )


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
    soft = " soft" if panel else ""
    for x0, y0, x1, y1, *_ in piece["lines"]:
        (a, b), (c, d) = at(x0, y0), at(x1, y1)
        lines.append(f'<line class="tie{soft}" x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>')
    for x, y, *_ in piece["points"]:
        lines.append('<circle class="point" cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(*at(x, y)))
    for mark in piece["tokens"]:
        x, y = at(mark["x"], mark["y"])
        lines.append(
            f'<rect class="token" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" '
            f'transform="rotate(45 {x:.1f} {y:.1f})"/>'
        )
        names.append(text(x, y - 11, f"“{mark['text']}”", "mid"))
    return lines + names


def _curves(stored: dict[str, Any]) -> list[str]:
    """Return the layer's output along the normal through the nearest boundary of the first token."""
    normal = stored["normal"]
    positions, (own, other) = normal["positions"], normal["change"]
    reach, low, high = max(positions), min(*own, *other), max(*own, *other)

    def at(position: float, change: float) -> str:
        x = EDGE + (position + reach) / (2 * reach) * (WIDTH - 2 * EDGE)
        return f"{x:.1f},{CURVE_TOP + CURVE_HEIGHT * (1 - (change - low) / (high - low)):.1f}"

    half = len(positions) // 2
    parts = [(positions[:half], own[:half], "own"), (positions[half:], own[half:], "own"), (positions, other, "other")]
    lines = [
        text(EDGE, CURVE_TOP - 60, f"The layer's output as its input moves from “{stored['token']}”"),
        text(EDGE, CURVE_TOP - 40, "across the nearest line: top-k (solid) jumps there,"),
        text(EDGE, CURVE_TOP - 20, "smooth (dashed) does not."),
        f'<line class="axis" x1="{WIDTH / 2}" y1="{CURVE_TOP - 8}" x2="{WIDTH / 2}" y2="{CURVE_TOP + CURVE_HEIGHT + 8}"/>',
    ]
    for xs, ys, kind in parts:
        points = " ".join(at(x, y) for x, y in zip(xs, ys, strict=True))
        lines.append(f'<polyline class="{kind}" points="{points}"/>')
    return lines


def _area(polygon: Polygon) -> float:
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2
