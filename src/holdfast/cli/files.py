"""Files that commands write: asked for before any work, and over nothing that is there already unless forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def require_free(path: Path | None, force: bool) -> None:
    """A file that is there already is overwritten only on request."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a .json file to write to.")
    if path.parent.is_file():
        raise ValueError(f"{path.parent} is a file, not a folder to write into.")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another place with --out, or overwrite it with --force.")


def write_out(path: Path | None, stored: dict[str, Any]) -> None:
    from holdfast.train.ownership import write_json

    if path is not None:
        write_json(path, stored)
        print(f"All figures: {path}")
