"""A Griffe extension: our docstrings as Markdown.

Docstrings describe arguments in aligned columns, which Markdown would join to one paragraph:

    stage       what the part fills
    about       one line of help,
                which may go on

They become a list. Indented lines after a line that ends with a colon become a block of code.
"""

import re
import textwrap
from typing import Any

import griffe

ENTRY = re.compile(r"^(?P<name>\S(?:.*?\S)?)(?: {2,})(?P<text>\S.*)$")


def as_markdown(docstring: str) -> str:
    """Return a docstring with lists for aligned columns, and fences around code."""
    return "\n\n".join(_as_markdown(part) for part in paragraphs(docstring))


def texts(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that describe no arguments, as Markdown."""
    return [_as_markdown(part) for part in paragraphs(docstring) if not entries(part)]


def option_texts(docstring: str) -> dict[str, str]:
    """Return what a docstring says about each argument; a line such as `a, b   two exponents` is for both."""
    found = [entry for part in paragraphs(docstring) for entry in entries(part)]
    return {name.strip(" `"): text for names, text in found for name in names.split(",")}


def paragraphs(docstring: str) -> list[str]:
    return re.split(r"\n[ \t]*\n", docstring)


def entries(paragraph: str) -> list[tuple[str, str]]:
    """Return the names and texts of a paragraph in aligned columns; nothing if it is another paragraph."""
    found: list[tuple[str, str]] = []
    for line in paragraph.split("\n"):
        entry = ENTRY.match(line)
        if line.startswith(" ") and found:
            joint = "; " if re.match(r'"\w+" {2,}', line.strip()) else " "  # the next value of the option
            found[-1] = (found[-1][0], f"{found[-1][1]}{joint}{re.sub(' {2,}', ': ', line.strip())}")
        elif entry and not line.startswith(" "):
            found.append((entry["name"], re.sub(" {2,}", ": ", entry["text"])))
        else:
            return []  # text, perhaps with two spaces in it, or a formula
    return found


def _as_markdown(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if len(lines) > 1 and lines[0].endswith(":") and all(line.startswith("    ") for line in lines[1:]):
        language = "python" if lines[0] == "Example:" else "text"
        return "\n".join([lines[0], "", f"```{language}", textwrap.dedent("\n".join(lines[1:])), "```"])
    listed = [f"- `{name.strip('`')}`: {text}" for name, text in entries(paragraph)]
    return "\n".join(listed) or paragraph


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
