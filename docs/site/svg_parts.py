"""What the pictures of docs/pictures share: a page that is readable on a telephone, in a light and in a dark theme.

A picture is WIDTH units wide. A telephone of 390 pixels shows it 358 pixels wide: a text of 14 units is 10.9 pixels there.
The pictures of docs/routers/pictures have other sizes and rules, and use `head`, `theme` and `text`.
"""

from collections.abc import Sequence
from html import escape

WIDTH, EDGE = 460, 20  # of the page and of its margin
INSIDE = WIDTH - 2 * EDGE

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
STYLE = f"""\
  text {{ font: 14px {FONT}; fill: #1f2328 }}
  .title {{ font-size: 18px; font-weight: 600 }} .small {{ font-size: 14px; fill: #59636e }}
  .end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
  .page {{ fill: #ffffff }} .frame {{ fill: none; stroke: #d1d9e0 }} .grey {{ fill: #d1d9e0 }} .blue {{ fill: #54aeff }}"""
DARK = """\
    text { fill: #f0f6fc } .small { fill: #9198a1 }
    .page { fill: #0d1117 } .frame { stroke: #3d444d } .grey { fill: #3d444d } .blue { fill: #1f6feb }"""


def page(height: float, label: str, parts: Sequence[str], style: str = "", dark: str = "", width: int = WIDTH) -> str:
    """Return the SVG of a page with `parts` on it; `style` and `dark` add rules to those of all pictures."""
    rules = "\n".join(part for part in (STYLE, style) if part)
    dark_rules = "\n".join(part for part in (DARK, dark) if part)
    background = f'<rect class="page" width="{width}" height="{height:g}" rx="8"/>'
    frame = f'<rect class="frame" x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="8"/>'
    return "\n".join([head(width, height, label), theme(rules, dark_rules), background, frame, *parts, "</svg>"]) + "\n"


def head(width: float, height: float, label: str, scale: float = 1) -> str:
    """Return the tag that opens an SVG of width x height units, each of which is shown as `scale` pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{scale * width:g}" '
        f'height="{scale * height:g}" role="img" aria-label="{escape(label)}">'
    )


def theme(rules: str, dark: str) -> str:
    """Return the style of an SVG; the rules of `dark` are for dark themes."""
    return f"<style>\n{rules}\n  @media (prefers-color-scheme: dark) {{\n{dark}\n  }}\n</style>"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text; `kind` names classes: title, small, end (ends at x), mid (centred on x)."""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}" rx="2"/>'


def origin(stored: dict[str, object]) -> str:
    """Return where the numbers of the demo's model come from, for the last line of a picture."""
    data = stored["data"]
    assert isinstance(data, dict)
    return f"The smoe of make demo, {data['tokens']:,} tokens, commit {stored['commit']}"
