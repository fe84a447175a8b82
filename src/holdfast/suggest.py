"""One sentence for an unknown name: what it was, the nearest one that exists, where to look."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown router 'smo': did you mean 'smoe'?`, or the whole list when nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}."
    return f"unknown {kind} {name!r}: {hint}"
