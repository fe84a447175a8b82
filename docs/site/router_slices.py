"""Draw docs/routers/pictures/NAME.svg: the weights of a router's experts on the straight line from one token to another.

    t           place on the line, 0 at token A and 1 at token B
    A, B, W     the two tokens and, where a router has a linear score, the vectors of the experts: the same for every router
    sequence    the moving token is the last of a sequence, after tokens that stay the same; ids, attention and the previous
                layer's routing are made up (`synthetic_context`)

`router_pages.py` writes the pictures, and takes the captions of its pages from them (`<desc>`). Coordinates are rounded, so
that every machine draws the same bytes.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from svg_parts import head, text, theme

from holdfast.cli.routers import HEADS, synthetic_context
from holdfast.routing import Router
from holdfast.routing.presets import REGISTRY

DIM, EXPERTS, LENGTH, VOCABULARY, SEED = 8, 6, 16, 64, 4
WARM_UP = 32  # batches from which a router learns its state before it is drawn
SAMPLES = 100  # places on the line, besides those where the set changes
FINEST = 1e-7  # a place where the set changes is known this well: tokens are float32
VISIBLE = 0.005  # a jump below this is drawn as none

# Sizes of the picture: at 390 pixels a page leaves about 358 for it, so texts stay readable there.
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 360, 140, 34, 8, 24, 58
LIGHT = ("#a9d4f0", "#f9cf9c", "#a5dfc8", "#f0c1dc", "#f6ea9a", "#c9c0f0")
DARK = ("#1d4b6b", "#6b4218", "#14503f", "#5e2a4a", "#5c5312", "#3d3470")
STYLE = """\
  text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #59636e } .mid { text-anchor: middle } .end { text-anchor: end }
  .page { fill: #ffffff; stroke: #d1d9e0 } .area { stroke: #ffffff; stroke-width: 0.6 }
  .axis { stroke: #59636e } .change { stroke: #1f2328; stroke-dasharray: 2 3 }
"""
STYLE_IN_DARK = """\
    text { fill: #f0f6fc } .small { fill: #b7bdc6 } .page { fill: #0d1117; stroke: #3d444d } .area { stroke: #0d1117 }
    .axis { stroke: #b7bdc6 } .change { stroke: #f0f6fc }
"""


@dataclass(frozen=True)
class Point:
    """What a router does with the token at one place of the line."""

    at: float
    chosen: tuple[int, ...]
    weights: tuple[float, ...]  # of all experts, 0 where it was not selected


@dataclass(frozen=True)
class Slice:
    """The points of a line, in order. Where the set changes there are two, one on either side and `FINEST` apart."""

    mode: str  # "evaluation" or "training"
    points: tuple[Point, ...]
    changes: tuple[tuple[Point, Point], ...]

    @property
    def largest_jump(self) -> float:
        """Return the largest change of a weight between the two sides of a place where the set changes."""
        return max((_difference(*change) for change in self.changes), default=0.0)


def slices(name: str) -> list[Slice]:
    """Return the router's slice in evaluation, and that in training if other tokens matter only there."""
    router = _router(name)
    found = [_slice(_route(router.eval()), "evaluation")]
    if router.training_traits != router.traits:
        found.append(_slice(_route(router.train()), "training"))
    return found


def picture(name: str, found: Sequence[Slice]) -> str:
    """Return the slices of a router as an SVG."""
    height = TOP + len(found) * (PANEL + GAP) - 30
    lines = [line for place, each in enumerate(found) for line in _panel(each, TOP + place * (PANEL + GAP))]
    light = " ".join(f".e{expert} {{ fill: {colour} }}" for expert, colour in enumerate(LIGHT))
    dark = " ".join(f".e{expert} {{ fill: {colour} }}" for expert, colour in enumerate(DARK))
    opening = head(WIDTH, height, f"Weights of experts of {name} between two tokens", scale=1.5)
    style = theme(f"{STYLE}  {light}", f"{STYLE_IN_DARK}    {dark}")
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([opening, f"<desc>{caption(found)}</desc>", style, page, *lines, "</svg>"]) + "\n"


def caption(found: Sequence[Slice]) -> str:
    """Return in sentences what is seen."""
    return " ".join(_sentence(each, len(found) > 1) for each in found)


def _sentence(found: Slice, several: bool) -> str:
    where = f"In {found.mode}, the" if several else "The"
    number = len(found.changes)
    used = {len(point.chosen) for point in found.points}
    experts = f"{min(used)} to {max(used)} experts" if len(used) > 1 else f"{min(used)} expert{'s' if min(used) > 1 else ''}"
    if not number:
        return f"{where} token uses the same {experts} everywhere: the set does not change, and no weight jumps."
    times = "once" if number == 1 else f"{number} times"
    jump = found.largest_jump
    what = f"and weights jump there, by up to {jump:.2f}" if jump > VISIBLE else "and no weight jumps there"
    return f"{where} token uses {experts}; the set changes {times} between A and B, {what}."


@functools.cache
def _numbers() -> dict[str, Any]:
    """Return the tokens, the experts' vectors and the batches of all pictures."""
    draw = np.random.default_rng(SEED)
    vectors = draw.normal(size=(EXPERTS, DIM)).round(2)
    ends = draw.normal(size=(2, DIM)).round(2)
    before = draw.normal(size=(LENGTH - 1, DIM)).round(2)
    batches = draw.normal(size=(WARM_UP, 2, LENGTH, DIM)).round(2)
    ids = draw.integers(VOCABULARY, size=(WARM_UP + 1, 2, LENGTH))
    return {"vectors": vectors, "ends": ends, "before": before, "batches": batches, "ids": ids}


def _router(name: str) -> Router:
    """Return the router after a few batches, with the vectors of all pictures if its score is linear."""
    torch.manual_seed(0)
    given = {"heads": HEADS, "vocabulary": VOCABULARY}
    options: dict[str, Any] = {key: value for key, value in given.items() if key in REGISTRY.options(name)}
    router = REGISTRY.build(name, dim=DIM, experts=EXPERTS, **options)
    numbers = _numbers()
    vectors = torch.tensor(numbers["vectors"], dtype=torch.float32)
    with torch.no_grad():
        for weight in router.score.parameters():
            if weight.shape == vectors.shape:
                weight.copy_(vectors)
        for batch, ids in zip(numbers["batches"], numbers["ids"][:-1], strict=True):
            tokens = torch.tensor(batch, dtype=torch.float32)
            router.train()(tokens, synthetic_context(tokens, torch.tensor(ids), EXPERTS))
    return router


def _route(router: Router) -> Callable[[float], Point]:
    """Return the function that routes the token at `t`, with nothing learnt on the way."""
    numbers = _numbers()
    first, last = (torch.tensor(end) for end in numbers["ends"])  # float64, rounded once per place
    before = torch.tensor(numbers["before"])
    ids = torch.tensor(numbers["ids"][-1][:1])
    state = {name: value.clone() for name, value in router.state_dict().items()}

    @functools.cache
    def at(t: float) -> Point:
        tokens = torch.cat([before, (first + t * (last - first))[None]]).float()[None]
        torch.manual_seed(0)
        with torch.no_grad():
            routing = router(tokens, synthetic_context(tokens, ids, EXPERTS))
            router.load_state_dict(state)
        chosen = tuple(routing.chosen[-1].nonzero().flatten().tolist())
        return Point(t, chosen, tuple(routing.dense_weights[-1].tolist()))

    return at


def _slice(route: Callable[[float], Point], mode: str) -> Slice:
    points, changes = [route(0.0)], []
    for number in range(1, SAMPLES + 1):
        following = route(number / SAMPLES)
        while points[-1].chosen != following.chosen:  # perhaps several changes within one step
            before, after = points[-1], following
            while after.at - before.at > FINEST:
                middle = route((before.at + after.at) / 2)
                before, after = (middle, after) if middle.chosen == points[-1].chosen else (before, middle)
            changes.append((before, after))
            points += [before, after]
        points.append(following)
    return Slice(mode, tuple(points), tuple(changes))


def _difference(one: Point, other: Point) -> float:
    return max(abs(a - b) for a, b in zip(one.weights, other.weights, strict=True))


def _panel(found: Slice, top: float) -> list[str]:
    """Return the areas of one slice, stacked from expert 0 upwards, with axes and names."""
    most = max(sum(point.weights) for point in found.points)
    highest = next(size for size in (1, 2, 3, 4, 6, 8, 10, 20, 50, 100) if most <= size + VISIBLE)
    wide = WIDTH - LEFT - RIGHT

    def across(t: float) -> float:
        return LEFT + t * wide

    def up(weight: float) -> float:
        return top + PANEL * (1 - weight / highest)

    lines, names = [text(LEFT, top - 9, f"weights of experts, in {found.mode}")], []
    for expert in range(EXPERTS):
        lower = [sum(point.weights[:expert]) for point in found.points]
        upper = [sum(point.weights[: expert + 1]) for point in found.points]
        for first, last in _runs([high > low for low, high in zip(lower, upper, strict=True)]):
            span = range(first, last + 1)
            corners = [(found.points[at].at, upper[at]) for at in span] + [
                (found.points[at].at, lower[at]) for at in reversed(span)
            ]
            outline = " ".join(f"{across(t):.1f},{up(weight):.1f}" for t, weight in corners)
            lines.append(f'<polygon class="area e{expert}" points="{outline}"/>')
            names += _name(expert, [(found.points[at], lower[at], upper[at]) for at in span], across, up)
    lines += [
        f'<line class="change" x1="{across(before.at):.1f}" y1="{top}" x2="{across(before.at):.1f}" y2="{top + PANEL + 5}"/>'
        for before, _ in found.changes
    ]
    bottom = top + PANEL
    lines.append(f'<path class="axis" fill="none" d="M{LEFT} {top}V{bottom}H{WIDTH - RIGHT}"/>')
    lines += [text(LEFT - 5, up(value) + 4, f"{value:g}", "small end") for value in (0, highest / 2, highest)]
    lines += [text(LEFT, bottom + 17, "token A", "small"), text(WIDTH - RIGHT, bottom + 17, "token B", "small end")]
    if found.changes:
        lines.append(text(across(0.5), bottom + 17, "dashed: the set changes", "small mid"))
    return [*lines, *names]


def _name(
    expert: int,
    edges: Sequence[tuple[Point, float, float]],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> list[str]:
    """Return the number of an expert in the widest part of its area with one set, or nothing if it does not fit there."""
    parts = [list(part) for _, part in itertools.groupby(edges, key=lambda edge: edge[0].chosen)]
    widest = max(parts, key=lambda part: part[-1][0].at - part[0][0].at)
    middle = (widest[0][0].at + widest[-1][0].at) / 2
    _, low, high = min(widest, key=lambda edge: abs(edge[0].at - middle))
    if up(low) - up(high) < 14 or across(widest[-1][0].at) - across(widest[0][0].at) < 12:
        return []
    return [text(across(middle), (up(low) + up(high)) / 2 + 4, str(expert), "mid")]


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Return the first and the last place of each run of True."""
    edges = [place for place, flag in enumerate(flags) if flag and (place == 0 or not flags[place - 1])]
    ends = [place for place, flag in enumerate(flags) if flag and (place + 1 == len(flags) or not flags[place + 1])]
    return list(zip(edges, ends, strict=True))
