"""Check what a sentence is about, so that tests do not depend on its exact words."""

import re


def mentions(text: str, *parts: str) -> bool:
    """Return whether `text` holds all `parts` (names, numbers, options), in this order and without overlap."""
    return re.search(".*?".join(map(re.escape, parts)), text, flags=re.DOTALL) is not None
