"""Files that commands write: checked before any work, and never over a file that is there already unless forced.

A command locks each file before its work and until it ends: a second one that is to write the same file is refused at once.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.locking import Lock, locked

_stack, _locks = ExitStack(), list[Lock]()  # of the command that runs; `main` calls `release_files`


def require_free(path: Path | None, force: bool) -> None:
    """Lock the file for this command. A file that is there already is overwritten only on request."""
    if path is None:
        return
    require_place(path)
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another place with --out, or overwrite it with --force.")
    _locks.append(_stack.enter_context(locked(path.parent, path.name, wait=False)))


def check_files() -> None:
    """Raise an error where another process has taken a file over; called before files are written."""
    for lock in _locks:
        lock.check()


def release_files() -> None:
    _locks.clear()
    _stack.close()


def require_place(path: Path) -> None:
    """Raise unless `path` is a place for a file that can be written; do not lock it."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; name the file itself.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write to.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file; name another one to write to.")
    require_folder(path.parent)


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
    from holdfast.train.stored import write_json

    if path is not None:
        check_files()
        write_json(path, stored)
        print(f"All figures: {path}")
