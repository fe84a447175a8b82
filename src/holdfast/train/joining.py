"""All that is finished in the folder of a comparison is one comparison, whoever named its routers and when."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.reading import LARGEST, read_json
from holdfast.train.stored import read_sealed

Result = dict[str, Any]


def joined(folder: Path, results: Sequence[Result]) -> list[Result]:
    """These and the other finished cells, router by router: as in the last results, so that their baseline stays."""
    found = {_key(result): result for result in results}
    for path in sorted((folder / "cells").glob("*/result.json")):
        key, result = _read(path)
        found.setdefault(key, result)
    order = list(dict.fromkeys([*_routers_before(folder), *(router for router, _ in found)]))
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def _key(result: Result) -> tuple[str, int]:
    return str(result["router"]), int(result["seed"])


def _read(path: Path) -> tuple[tuple[str, int], Result]:
    try:
        result = read_sealed(path)
        return _key(result), result
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; remove {path.parent}, and its cell is trained again.") from None


def _routers_before(folder: Path) -> list[str]:
    try:
        stored = read_json(folder / "results.json", limit=LARGEST)
        return [str(row["router"]) for row in stored["rows"]]
    except (OSError, ValueError, KeyError, TypeError):  # there are none, or they are damaged: they are written anew
        return []
