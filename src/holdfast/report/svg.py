"""Plots of named rows, such as the differences to a baseline with their intervals, as SVG files for papers and slides.

Plotly would need a browser for this. A row has one name and any number of marks, bars and lines on a linear axis: what
`plot_data` makes with `names_axis`, or the dots and bars of a first screen. Other plots have no SVG.
"""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.report.first_screen import Bar, DotPlot, Dots, FirstScreen
from holdfast.report.page_shell import THEMES
from holdfast.report.plot_data import Plot, Trace

WIDTH, EDGE, LINE, LETTER = 720, 16, 18, 7.8  # pixels: of the picture, its margin, a line of text and a letter
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
TICKS = 5  # about
LIGHT = THEMES["light"]


def _turned(*corners: tuple[float, float]) -> list[tuple[float, float]]:
    """Return these corners four times, each time turned by a right angle."""
    return [((x, y), (-y, x), (-x, -y), (y, -x))[quarter] for quarter in range(4) for x, y in corners]


# Corners of marks of size 2, around the origin; a circle is drawn as one.
CORNERS = {
    "diamond": _turned((0, -1.2)),
    "square": _turned((-1, -1)),
    "triangle-up": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    "triangle-down": [(0, 1.2), (1.1, -0.9), (-1.1, -0.9)],
    "cross": _turned((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4)),
    "x": _turned((0, -0.4), (0.8, -1.2), (1.2, -0.8)),
    "star": [
        (radius * math.sin(point * math.pi / 5), -radius * math.cos(point * math.pi / 5))
        for point, radius in enumerate((1.3, 0.55) * 5)
    ],
}
PERCENT = (0.0, 100.0)  # the scale of a first screen
Place = Callable[[float], float]  # from a number to pixels from the left
Draw = Callable[[Place, Sequence[float]], Iterator[str]]  # the shapes, from this and the middle of each row


def has_svg(plot: Plot) -> bool:
    """Whether a plot has rows with names, on a linear axis."""
    axes = plot.layout.get("xaxis", {}), plot.layout.get("yaxis", {})
    kinds = {trace["type"] for trace in plot.data}
    is_named = axes[1].get("type") == "category" and axes[0].get("type") != "log"
    return bool(plot.data) and is_named and kinds <= {"scatter", "bar"}


def plot_svg(plot: Plot) -> str:
    """Return the plot as SVG, in the light theme, without a background."""
    axis, shapes = plot.layout.get("xaxis", {}), plot.layout.get("shapes", ())
    names = list(dict.fromkeys(name for trace in plot.data for name in trace["y"]))
    numbers = [number for trace in plot.data for _, *ends in _points(trace) for number in ends]
    lines = [shape["x0"] for shape in shapes if "x0" in shape and shape["x0"] == shape.get("x1")]
    if axis.get("rangemode") == "tozero" or any(trace["type"] == "bar" for trace in plot.data):
        numbers.append(0.0)
    ticks = nice_ticks(min([*numbers, *lines]), max([*numbers, *lines]))

    def draw(place: Place, middles: Sequence[float]) -> Iterator[str]:
        for trace in plot.data:
            yield from _drawn(trace, place, dict(zip(names, middles, strict=True)))

    rows = [([html.unescape(part) for part in name.split("<br>")], "") for name in names]
    title = html.unescape(axis.get("title", {}).get("text", "").replace("<br>", " "))
    shown, span = [(tick, f"{tick:.6g}") for tick in ticks], (ticks[0], ticks[-1])
    return _picture(plot.title, rows, shown, span, draw, lines=lines, axis=title, caption=plot.caption)


def first_screen_svgs(exported: Any) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of the dots and bars of a first screen, wherever they are in what a page exports."""
    if isinstance(exported, DotPlot):
        rows = [([row.label], f"{row.text} {row.mark}".strip()) for row in exported.rows]
        yield exported.title, _picture(exported.title, rows, exported.ticks, PERCENT, partial(_dots, exported.rows))
    elif isinstance(exported, FirstScreen):
        yield from first_screen_svgs(exported.plots)
    elif isinstance(exported, Mapping):
        for title, shown in exported.items():
            bars = [bar for bar in shown or () if isinstance(bar, Bar)]
            rows = [([bar.label], f"{bar.text} {bar.verdict}".strip()) for bar in bars]
            if rows:
                yield title, _picture(title, rows, [], PERCENT, partial(_bars, bars))
    elif isinstance(exported, list | tuple):
        for one in exported:
            yield from first_screen_svgs(one)


def _picture(
    title: str,
    rows: Sequence[tuple[Sequence[str], str]],
    ticks: Sequence[tuple[float, str]],
    span: tuple[float, float],
    draw: Draw,
    *,
    lines: Sequence[float] = (),
    axis: str = "",
    caption: str = "",
) -> str:
    """Return rows as SVG: the lines of the name, then shapes on a scale over `span`, then a text."""
    left = EDGE + 12 + LETTER * max(len(part) for name, _ in rows for part in name)
    widest = max(len(text) for _, text in rows)
    right = WIDTH - EDGE - (12 + LETTER * widest if widest else 0)
    top = bottom = EDGE + 2 * LINE
    labels, middles = list[str](), list[float]()
    for name, text in rows:
        middles.append(bottom + LINE * len(name) / 2)
        labels += [_text(left - 12, bottom + LINE * (at + 0.75), part, "end") for at, part in enumerate(name)]
        labels += [_text(WIDTH - EDGE, middles[-1] + LINE / 4, text, "end")] if text else []
        bottom += LINE * len(name) + 12

    def place(x: float) -> float:
        return left + (x - span[0]) / (span[1] - span[0]) * (right - left)

    parts = [_text(EDGE, EDGE + 4, title, "title")]
    for tick, text in ticks:
        parts.append(f'<path d="M{place(tick):.1f} {top}V{bottom}" stroke="{LIGHT["line"]}"/>')
        parts.append(_text(place(tick), bottom + LINE, text, "mid"))
    for line in lines:
        parts.append(f'<path d="M{place(line):.1f} {top}V{bottom}" stroke="{LIGHT["muted"]}" stroke-dasharray="2 3"/>')
    parts += [*labels, *draw(place, middles)]
    parts += [_text((left + right) / 2, bottom + 2.2 * LINE, axis, "mid")] if axis else []
    height = bottom + (3 if axis else 2) * LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'role="img" aria-label="{html.escape(title)}">'
    )
    style = (
        f"<style>text {{ font: 13px {FONT}; fill: {LIGHT['ink']} }} .title {{ font-weight: 600 }} "
        ".mid { text-anchor: middle } .end { text-anchor: end } path, polyline { fill: none }</style>"
    )
    about = [f"<desc>{html.escape(caption)}</desc>"] if caption else []
    return "\n".join([head, *about, style, *parts, "</svg>"]) + "\n"


def _dots(rows: Sequence[Dots], place: Place, middles: Sequence[float]) -> Iterator[str]:
    for row, y in zip(rows, middles, strict=True):
        colour = {"fewer": LIGHT["routers"][0], "more": LIGHT["routers"][1]}.get(row.direction, LIGHT["muted"])
        places = [place(percent) for percent in row.places]
        yield f'<path d="M{min(places):.1f} {y:.1f}H{max(places):.1f}" stroke="{colour}" stroke-width="2"/>'
        for x, fill, stroke in zip(places, ("#ffffff", colour), (LIGHT["muted"], colour), strict=False):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def _bars(bars: Sequence[Bar], place: Place, middles: Sequence[float]) -> Iterator[str]:
    for bar, y in zip(bars, middles, strict=True):
        yield _rectangle(place(0), place(bar.width), y, LIGHT["routers"][bar.place % len(LIGHT["routers"])])
        if bar.interval is not None:
            low, high = map(place, bar.interval)
            yield _interval(low, high, y, LIGHT["ink"])


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(words)}</text>'


def _rectangle(start: float, end: float, y: float, colour: str) -> str:
    return f'<rect x="{min(start, end):.1f}" y="{y - 7:.1f}" width="{abs(end - start):.1f}" height="14" fill="{colour}"/>'


def _interval(low: float, high: float, y: float, colour: str) -> str:
    return f'<path d="M{low:.1f} {y - 4:.1f}v8m0 -4H{high:.1f}m0 -4v8" stroke="{colour}" stroke-width="1.5"/>'


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about TICKS round numbers that enclose the range."""
    if low == high:
        low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(size for size in (1, 2, 5, 10) if size * power >= raw)
    return [step * at for at in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _points(trace: Trace) -> Iterator[tuple[str, float, float, float]]:
    """Yield the row of each point, and its low end, mean and high end, which are the same without an interval."""
    known = [(name, x) for x, name in zip(trace["x"], trace["y"], strict=True) if x is not None]
    bars = trace.get("error_x", {})
    above = bars.get("array", [0.0] * len(known))
    for (name, x), low, high in zip(known, bars.get("arrayminus", above), above, strict=True):
        yield name, x - low, x, x + high


def _drawn(trace: Trace, place: Place, middles: Mapping[str, float]) -> Iterator[str]:
    colour = LIGHT["routers"][trace["meta"].get("router", 0) % len(LIGHT["routers"])]
    points = [(*map(place, ends), middles[name]) for name, *ends in _points(trace)]
    if trace["type"] == "bar":
        yield from (_rectangle(place(0.0), x, y, colour) for _, x, _, y in points)
    if "lines" in trace.get("mode", ""):
        path = " ".join(f"{x:.1f},{y:.1f}" for _, x, _, y in points)
        yield f'<polyline points="{path}" stroke="{colour}" stroke-width="2"/>'
    if "array" in trace.get("error_x", {}):
        yield from (_interval(low, high, y, colour) for low, _, high, y in points)
    if "markers" in trace.get("mode", ""):
        marker = trace.get("marker", {})
        symbol, size = str(marker.get("symbol", "circle")), marker.get("size", 8) / 2
        shape = symbol.removesuffix("-open")
        look = f'fill="{"#ffffff" if symbol.endswith("-open") else colour}" stroke="{colour}" stroke-width="1.5" '
        look += f'opacity="{trace.get("opacity", 1):g}"'
        for _, x, _, y in points:
            if shape in CORNERS:
                corners = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in CORNERS[shape])
                yield f'<polygon points="{corners}" {look}/>'
            else:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {look}/>'
