r"""Formulas as MathML, made when the site is built: browsers show it without scripts, fonts or a network.

Our Markdown has formulas as GitHub reads them: `$l = W x$` in a line, and blocks of code in the language `math`. They are
LaTeX as far as latex2mathml knows it; a command that it does not know is an error. In a line, avoid a backslash before
punctuation (`\,`, `\{`), which GitHub removes.
"""

import re
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

INDEXED = ("msub", "msup", "msubsup", "munder")
INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*[^\s$\\])\$(?![\w$])"


def mathml(latex: str, display: str = "inline") -> str:
    """Return a formula as MathML. Raise ValueError for LaTeX that would be shown as text."""
    from latex2mathml.converter import convert

    found = convert(latex.replace("{aligned}", "{split}"), display=display)
    if "\\" in found:
        raise ValueError(f"latex2mathml does not know a command of this formula: {latex}")
    formula = ElementTree.fromstring(re.sub(' xmlns="[^"]*"', "", found))  # HTML needs no namespace
    for row in list(formula.iter()):
        _space_functions(row)
    return ElementTree.tostring(formula, encoding="unicode")


def _space_functions(row: Element) -> None:
    """Give names of functions the thin spaces of TeX; as operators, which some are, they would have wide ones everywhere."""
    if row.tag not in ("mrow", "mtd"):
        return
    for part in list(row):
        name = part[0] if part.tag in INDEXED else part
        if not _is_function(name):
            continue
        name.tag, name.attrib = "mi", {}
        for shift in (0, 1):  # before the name, and after it
            place = list(row).index(part) + shift
            if 0 < place < len(row) and not _is_symbol(row[place - 1 + shift]):
                row.insert(place, Element("mspace", {"width": "0.167em"}))


def _is_function(part: Element) -> bool:
    return part.tag in ("mi", "mo") and bool(re.fullmatch("[A-Za-z]{2,}", part.text or ""))


def _is_symbol(part: Element) -> bool:
    """Return whether a part is an operator or a space, or begins with a bracket."""
    first = part[0] if part.tag == "mrow" and len(part) else part
    return first.tag in ("mo", "mspace") and not _is_function(first)


def block(source: str, language: str, name: str, options: dict[str, Any], md: Markdown, **kwargs: Any) -> str:
    """Return a block of code in the language `math` as a formula of its own, for pymdownx.superfences."""
    return f'<div class="{name}" tabindex="0">{mathml(source, "block")}</div>'


FENCE = {"name": "math", "class": "formula", "format": block}


class Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # type: ignore[override]  # noqa: N802
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class Formulas(Extension):
    """Formulas in a line, after code in a line is set aside."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(Inline(INLINE, md), "math", 185)
