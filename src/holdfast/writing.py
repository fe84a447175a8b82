"""Files are written whole or not at all, and never through a symbolic link below the folder that is being written.

A file is written to a fresh name beside its target and then renamed: a rename replaces a link, and does not follow it.
"""

import os
import re
import secrets
import shutil
import stat
from pathlib import Path

PARTIAL = re.compile(r"\..+\.[0-9a-f]{12}")  # names that `write_whole` writes to first
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        _write(partial, os.O_EXCL, text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Add `text` to the end of a file; a link in its place raises an OSError."""
    _write(path, os.O_APPEND, text)


def remove_partial(folder: Path) -> None:
    """Remove files that processes which were killed did not write to their end; only the holder of its lock may call it."""
    for path in folder.glob(".*.*") if folder.is_dir() else ():
        if PARTIAL.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def _write(path: Path, how: int, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | NO_FOLLOW | how, 0o666)
    with open(file, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)


def require_no_links(path: Path, root: Path) -> None:
    """Raise a ValueError where `path`, or a folder between it and `root`, is a symbolic link; `root` itself may be one."""
    parts = path.relative_to(root).parts
    for length in range(1, len(parts) + 1):
        _require_no_link(root.joinpath(*parts[:length]), root)


def require_no_links_inside(folder: Path, root: Path) -> None:
    """Raise a ValueError where the way from `root` to `folder`, or anything in `folder`, is a symbolic link."""
    require_no_links(folder, root)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _require_no_link(Path(place) / name, root)


def remove_folder(folder: Path, root: Path) -> None:
    """Delete a folder below `root` with all that is in it; a link raises a ValueError, and nothing is deleted."""
    require_no_links(folder, root)
    if folder.exists():
        shutil.rmtree(folder)  # deletes links inside and does not follow them


def _require_no_link(path: Path, root: Path) -> None:
    try:
        found = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(found):
        raise ValueError(
            f"{path} is a symbolic link (to {os.readlink(path)}); nothing is written through links inside {root}: "
            "remove the link, or choose another folder."
        )
