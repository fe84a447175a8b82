"""Files that commands write: asked for before any work, and over nothing that is there already unless forced.

A command locks each file before its work and until it ends: a second one that is to write the same file is refused at once.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.locking import Lock, locked

_stack, _locks = ExitStack(), list[Lock]()  # of the command that runs; `main` calls `release_files`


def require_free(path: Path | None, force: bool) -> None:
    """Lock the file for this command. A file that is there already is overwritten only on request."""
    if path is None:
        return
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; name the file itself.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a .json file to write to.")
    if path.parent.is_file():
        raise ValueError(f"{path.parent} is a file, not a folder to write into.")
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


def write_out(path: Path | None, stored: dict[str, Any]) -> None:
    from holdfast.train.ownership import write_json

    if path is not None:
        check_files()
        write_json(path, stored)
        print(f"All figures: {path}")
