"""Files that commands write: asked for before any work, and over nothing that is there already unless forced."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def require_free(path: Path | None, force: bool) -> None:
    """Raise unless `path` can be written; a file that is there already is overwritten only on request."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write to.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file; name another one to write to.")
    require_folder(path.parent)
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another place with --out, or overwrite it with --force.")


def require_folder(folder: Path) -> None:
    """Raise unless files can be written into `folder`, which is made later if it is not there."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            try:  # permissions do not tell: root may ignore them, and a file system may be read-only or full
                with tempfile.TemporaryFile(dir=place):
                    return
            except OSError as problem:
                why = problem.strerror or problem
                raise ValueError(f"{place} cannot be written to ({why}); choose another place with --out.") from None
        if place.is_symlink() or place.exists():
            raise ValueError(f"{place} is not a folder to write into.")


def write_out(path: Path | None, stored: dict[str, Any]) -> None:
    from holdfast.train.ownership import write_json

    if path is not None:
        write_json(path, stored)
        print(f"All figures: {path}")
