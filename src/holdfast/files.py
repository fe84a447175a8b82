"""Files that may be hostile: only regular files of a sane size are read, and JSON only of sane depth.

A folder from the internet may hold a named pipe, which blocks whoever opens it, a link to a device without an end, or JSON
that is nested deeper than Python's stack. Every file of such a folder is read, or checked before a library reads it, here.


Files are written whole or not at all, and never through a symbolic link below the folder that is being written.

A file is written to a fresh name beside its target and then renamed: a rename replaces a link, and does not follow it.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
SMALL = 16 * MIB  # the largest JSON of settings
LARGE = 256 * MIB  # the largest file that lists words or weights
LARGEST = 1024 * MIB  # the largest stored results
DEEPEST = 64  # levels of JSON; what libraries write has about ten
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


def read_bytes(path: Path, *, limit: int = SMALL) -> bytes:
    """Return the content of a regular file; `FileNotFoundError` where there is none, else a ValueError with one sentence."""
    require_regular(path, limit=limit)
    try:
        # The file may be replaced after the check: opening a pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is not a regular file.")
            data = file.read(limit + 1)  # files of /proc claim to be empty
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    if len(data) > limit:
        raise ValueError(_too_large(path, limit))
    return data


def read_text(path: Path, *, limit: int = SMALL) -> str:
    """Return the UTF-8 text of a regular file."""
    try:
        return read_bytes(path, limit=limit).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is not UTF-8 text.") from None


def read_json(path: Path, *, limit: int = SMALL, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the JSON of a regular file."""
    text = read_text(path, limit=limit)
    try:
        found = json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError(_too_deep(path)) from None
    except ValueError as problem:
        raise ValueError(f"{path} cannot be read as JSON: {problem}.") from None
    if depth_exceeds(found, DEEPEST):
        raise ValueError(_too_deep(path))
    return found


def require_regular(path: Path, *, limit: int | None = None, inside: Path | None = None) -> int:
    """Raise unless `path` is a regular file of at most `limit` bytes; return its size.

    inside      the folder that it must lie in, links followed
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as problem:
        reason = "it is a link to itself" if problem.errno == errno.ELOOP else problem.strerror
        raise ValueError(f"{path} cannot be read: {reason}.") from None
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"{path} is {kind}, not a regular file.")
    if limit is not None and found.st_size > limit:
        raise ValueError(_too_large(path, limit))
    if inside is not None and not lies_inside(path, inside):
        raise ValueError(f"{path} is a link to a file outside of its folder; put a copy of that file in its place.")
    return found.st_size


def lies_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, with all links followed, lies in `folder` or among the files of the hub's cache that it belongs to."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    roots = [root] if snapshots is None else [root, snapshots.parent / "blobs"]
    return any(real.is_relative_to(one) for one in roots)


def depth_exceeds(value: Any, deepest: int) -> bool:
    """Whether lists and dicts lie more than `deepest` levels inside each other."""
    level = [value]
    for _ in range(deepest + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(entry for entry in one.values() if isinstance(entry, dict | list))
            elif isinstance(one, list):
                inner.extend(entry for entry in one if isinstance(entry, dict | list))
        if not inner:
            return False
        level = inner
    return True


def _too_large(path: Path, limit: int) -> str:
    return f"{path} is larger than {limit // MIB} MiB, which no such file needs: it is not read."


def _too_deep(path: Path) -> str:
    return f"{path} is JSON nested more than {DEEPEST} levels deep: it is not read."


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
