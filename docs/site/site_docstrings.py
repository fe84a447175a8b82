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
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n[ \t]*\n", docstring))


def _paragraph(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if lines[0].startswith(" "):
        return paragraph
    if len(lines) > 1 and lines[0].endswith(":") and all(line.startswith("    ") for line in lines[1:]):
        language = "python" if lines[0] == "Example:" else "text"
        return "\n".join([lines[0], "", f"```{language}", textwrap.dedent("\n".join(lines[1:])), "```"])
    if not ENTRY.match(lines[0]):
        return paragraph
    entries: list[str] = []
    for line in lines:
        entry = ENTRY.match(line)
        if line.startswith(" "):
            entries[-1] += f" {line.strip()}"
        elif entry:
            entries.append(f"- `{entry['name'].strip('`')}`: {entry['text']}")
        else:
            return paragraph  # text with two spaces in it
    return "\n".join(entries)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
