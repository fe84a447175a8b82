"""Check what a sentence is about, so that tests do not depend on its exact words."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def mentions(text: str, *parts: str) -> bool:
    """Return whether `text` holds all `parts` (names, numbers, options), in this order and without overlap."""
    return re.search(".*?".join(map(re.escape, parts)), text, flags=re.DOTALL) is not None


def assert_refused(says: str, function: Callable[..., Any], /, *given: Any, **options: Any) -> str:
    """Fail unless `function(*given, **options)` raises a ValueError in one line that matches `says`; return that line."""
    with pytest.raises(ValueError, match=says) as caught:
        function(*given, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
