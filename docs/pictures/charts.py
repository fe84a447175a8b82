"""What the pictures of the tutorials share, beside svg_parts: their width, colours, and a plot with axes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from svg_parts import page, text

WIDTH, EDGE = 600, 16

STYLE = """\
  text { font-size: 15px }
  .grid { stroke: #d1d9e0; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1 }
  .line0, .line1 { fill: none; stroke-width: 2.5 }
  .line0 { stroke: #c44e00; stroke-dasharray: 7 4 } .line1 { stroke: #0072b2 }
  .fill0 { fill: #c44e00 } .fill1 { fill: #0072b2 } .shade0 { fill: #9fc8e6 } .shade1 { fill: #5aa0d0 }
  .shade2 { fill: #0072b2 } .shade3 { fill: #00466e }"""
DARK = """\
    .grid { stroke: #3d444d } .axis { stroke: #9198a1 } .line0 { stroke: #ff8f4a } .line1 { stroke: #5aaee8 }
    .fill0 { fill: #ff8f4a } .fill1 { fill: #5aaee8 } .shade0 { fill: #cfe6f7 } .shade1 { fill: #8fc5ec }
    .shade2 { fill: #4a9bd6 } .shade3 { fill: #2a6ea3 }"""


def chart(height: int, about: str, parts: Sequence[str]) -> str:
    """Return a whole picture; `about` is for readers who do not see it."""
    return page(height, about, parts, STYLE, DARK, WIDTH)


def segment(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def heading(title: str, below: str) -> list[str]:
    return [text(EDGE, 32, title, "title"), text(EDGE, 54, below, "small")]


@final
@dataclass(frozen=True)
class Plot:
    """A plot with two axes. `scale` is applied to y before it is placed: math.log10 for a logarithmic axis."""

    x: tuple[float, float]
    y: tuple[float, float]
    top: float
    height: float
    left: float = 70
    right: float = WIDTH - EDGE
    scale: Callable[[float], float] = float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        low, high = self.scale(self.y[0]), self.scale(self.y[1])
        up = (self.scale(y) - low) / (high - low)
        return self.left + across * (self.right - self.left), self.top + self.height * (1 - up)

    def axes(self, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], below: str) -> list[str]:
        """Return the lines and numbers of both axes, and what x is."""
        parts = []
        for value, words in ys:
            y = self.at(self.x[0], value)[1]
            parts += [segment(self.left, y, self.right, y, "grid"), text(self.left - 8, y + 5, words, "small end")]
        bottom = self.top + self.height
        for value, words in xs:
            x = self.at(value, self.y[0])[0]
            parts += [segment(x, bottom, x, bottom + 5, "axis"), text(x, bottom + 22, words, "small mid")]
        parts.append(text((self.left + self.right) / 2, bottom + 44, below, "small mid"))
        return [*parts, segment(self.left, bottom, self.right, bottom, "axis")]

    def curve(self, points: Sequence[tuple[float, float]], kind: int) -> str:
        placed = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        return f'<polyline class="line{kind}" points="{placed}"/>'

    def band(self, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]]) -> str:
        """Return the area between two curves; draw it before a curve that lies in it."""
        placed = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in [*low, *reversed(high)])
        return f'<polygon class="shade0" opacity="0.45" points="{placed}"/>'

    def dots(self, points: Sequence[tuple[float, float]], kind: int) -> list[str]:
        return ['<circle class="fill{}" cx="{:.1f}" cy="{:.1f}" r="4.5"/>'.format(kind, *self.at(x, y)) for x, y in points]


LOGARITHMIC = math.log10
