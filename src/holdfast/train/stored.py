"""JSON files with a checksum inside: a later run reads what was stored, or notices that it was changed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from holdfast.reading import LARGEST, read_json
from holdfast.train.ownership import write_json

CHECKSUM = "checksum"


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, plain JSON, with its checksum."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_sealed`; a ValueError where it is another, `FileNotFoundError` without one."""
    found = read_json(path, limit=LARGEST)
    if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _checksum(found):
        raise ValueError(f"{path} is not the file that was saved.")
    return found


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
