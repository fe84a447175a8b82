"""JSON files of a run, written whole; those that a later run takes for its own results hold a checksum."""

import hashlib
import json
from pathlib import Path
from typing import Any

from holdfast.reading import LARGEST, read_json
from holdfast.writing import write_whole

CHECKSUM = "checksum"


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, plain JSON, with its checksum."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what `write_sealed` wrote; raise a ValueError where it was changed, and FileNotFoundError without a file."""
    found = read_json(path, limit=LARGEST)
    if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _checksum(found):
        raise ValueError(f"{path} is not the file that was saved.")
    return found


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
