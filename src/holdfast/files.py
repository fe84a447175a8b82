"""Read untrusted files safely, and write files and folders atomically.

Reading: a folder from the internet may contain a named pipe, which blocks a process that opens it, a link to a device that
never ends (/dev/zero), or JSON that is nested too deeply for Python's stack. So only regular files of limited size are read,
and only JSON of limited depth.

Writing: a file is written under a temporary name in the same folder and then renamed, so that other processes never read an
incomplete file. A rename replaces a symbolic link and does not follow it. Functions that take a `root` raise an error for
symbolic links below it, so that nothing outside of it is written or deleted.

Replacing a folder loses neither the old nor the new one if the process is killed. The new folder is written inside a scratch
folder beside the target, `.NAME.saving-...`, which the writing process locks. Then the old folder is moved into the scratch
folder, and the new one to its place. A process that is killed between these two renames leaves no target: `recover_folder`
moves the old folder back. Scratch folders of processes that were killed are removed by the next process that writes there.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import closest_name

if TYPE_CHECKING:
    from filelock import BaseFileLock

MIB = 2**20
SMALL = 16 * MIB  # limit for a JSON file with settings
LARGE = 256 * MIB  # limit for a vocabulary or a training log
LARGEST = 1024 * MIB  # limit for stored results
DEEPEST = 64  # limit for the nesting levels of JSON; files that libraries write have about ten
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}
PARTIAL = re.compile(r"\..+\.[0-9a-f]{12}")  # the temporary names that `write_atomically` uses
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows does not have it
SCRATCH = ".saving-"
NEW, OLD, LOCK = "new", "old", ".lock"
BETWEEN_RENAMES = 5.0  # seconds: a running process has renamed both folders long before


def require_possible_model(name: str) -> None:
    """Raise ValueError if `name` is neither a folder nor, by the way it is written, a model on the hub (`owner/name`)."""
    place, parts = Path(name), Path(name).parts
    if place.is_file():
        raise ValueError(f"{name} is a file; name the folder of a model.")
    is_inside = len(parts) > 1 and Path(parts[0]).is_dir()
    is_path = name.startswith((".", "~", os.sep)) or name.endswith("/") or "\\" in name or len(parts) > 2 or is_inside
    if is_path and not place.is_dir():
        raise ValueError(no_such_path(name))


def no_such_path(path: str | os.PathLike[str]) -> str:
    """Return the sentence for a path that does not exist, with the most similar one that does."""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    names = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    near = closest_name(missing.name, names)
    hint = "." if near is None else f": did you mean {missing.parent / near}?"
    return f"there is no folder or file {path}{hint}"


def read_bytes(path: Path, *, limit: int = SMALL) -> bytes:
    """Return the content of a regular file. Raise FileNotFoundError if there is none, ValueError if it cannot be read."""
    require_regular(path, limit=limit)
    try:
        # The file may have been replaced by a pipe after the check. O_NONBLOCK: do not wait for a writer of the pipe.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is not a regular file.")
            data = file.read(limit + 1)  # not `st_size`, which may be wrong: files in /proc have 0
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
    """Return the value in a JSON file. Raise ValueError if the file is not JSON, too large or nested too deeply."""
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
    """Raise ValueError unless `path` is a regular file of at most `limit` bytes; return its size.

    inside      the folder that must contain the file, after all links are followed (`is_inside`)
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
    if inside is not None and not is_inside(path, inside):
        raise ValueError(f"{path} is a link to a file outside of its folder; put a copy of that file in its place.")
    return found.st_size


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, with all links followed, is in `folder`.

    If `folder` is a snapshot in the Hugging Face cache, `path` may also be in the folder `blobs` of that cache.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    roots = [root] if snapshots is None else [root, snapshots.parent / "blobs"]
    return any(real.is_relative_to(one) for one in roots)


def depth_exceeds(value: Any, deepest: int) -> bool:
    """Whether lists and dicts are nested more than `deepest` levels deep."""
    level = [value]
    for _ in range(deepest + 1):
        inner: list[Any] = []
        for one in level:
            entries = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            inner.extend(entry for entry in entries if isinstance(entry, dict | list))
        if not inner:
            return False
        level = inner
    return True


def _too_large(path: Path, limit: int) -> str:
    return f"{path} is larger than {limit // MIB} MiB, the limit for a file of this kind; it was not read."


def _too_deep(path: Path) -> str:
    return f"{path} is JSON nested more than {DEEPEST} levels deep; it was not used."


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a text (as UTF-8) or bytes to `path` atomically, and create its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        _write(partial, os.O_EXCL, content, path)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Append `text` to a file. Raise OSError if the file is a symbolic link."""
    _write(path, os.O_APPEND, text, path)


def remove_partial(folder: Path) -> None:
    """Remove incomplete files that killed processes left. Only the process that holds the folder's lock may call this."""
    for path in folder.glob(".*.*") if folder.is_dir() else ():
        if PARTIAL.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def _write(path: Path, flags: int, content: str | bytes, name: Path) -> None:
    """Write to a file; `name` is the file in errors."""
    flags |= os.O_WRONLY | os.O_CREAT | NO_FOLLOW | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)  # an error of this call names the file
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
    except OSError as problem:  # a full disk, or a limit for the size of files
        raise OSError(f"{name} cannot be written: {problem.strerror or problem}.") from problem


def require_no_links(path: Path, root: Path) -> None:
    """Raise ValueError if `path`, or a folder between it and `root`, is a symbolic link; `root` itself may be one."""
    parts = path.relative_to(root).parts
    for length in range(1, len(parts) + 1):
        _require_no_link(root.joinpath(*parts[:length]), root)


def require_no_links_inside(folder: Path, root: Path) -> None:
    """Raise ValueError if a folder from `root` to `folder`, or anything in `folder`, is a symbolic link."""
    require_no_links(folder, root)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _require_no_link(Path(place) / name, root)


def remove_folder(folder: Path, root: Path) -> None:
    """Delete a folder below `root`, if it exists. If it, or a folder above it up to `root`, is a link, raise ValueError."""
    require_no_links(folder, root)
    if folder.exists():
        shutil.rmtree(folder)  # deletes the links in it and does not follow them


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


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Replace `target` by the folder that `fill` writes. If `fill` raises, `target` is unchanged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(target)
    _remove_stale_scratch(target)
    scratch = target.parent / f".{target.name}{SCRATCH}{secrets.token_hex(6)}"
    while (lock := _locked(scratch)) is None:  # makes the folder, which another process may remove before it is locked
        pass
    try:
        fill(scratch / NEW)
        if target.exists():
            target.rename(scratch / OLD)
        (scratch / NEW).rename(target)
    finally:
        if (scratch / OLD).exists() and not target.exists():
            (scratch / OLD).rename(target)
        lock.release()
        shutil.rmtree(scratch, ignore_errors=True)


def recover_folder(target: Path) -> bool:
    """Move the old folder back if a process was killed while it replaced `target`; return whether `target` exists."""
    for scratch in _scratch_folders(target):
        if target.exists() or not (scratch / OLD).is_dir():
            continue
        lock = _locked(scratch, BETWEEN_RENAMES)
        try:
            if lock is not None and not target.exists():
                (scratch / OLD).rename(target)
        except FileNotFoundError:  # another process has done it
            pass
        except OSError as problem:
            raise ValueError(
                f"a process was killed while it replaced {target}; the former folder is {scratch / OLD}, and cannot be "
                f"moved back ({problem.strerror})."
            ) from None
        finally:
            if lock is not None:
                lock.release()
    return target.is_dir()


def _remove_stale_scratch(target: Path) -> None:
    """Remove the scratch folders of processes that were killed."""
    for scratch in _scratch_folders(target):
        if (target.exists() or not (scratch / OLD).exists()) and (lock := _locked(scratch)) is not None:
            lock.release()
            shutil.rmtree(scratch, ignore_errors=True)


def _locked(scratch: Path, timeout: float = 0) -> "BaseFileLock | None":
    """Return the lock of a scratch folder; None if a running process has it, or the folder is gone."""
    import filelock  # here: `import holdfast` imports no other package

    lock = filelock.FileLock(scratch / LOCK)
    with suppress(filelock.Timeout, FileNotFoundError):
        lock.acquire(timeout=timeout)
    return lock if lock.is_locked else None


def _scratch_folders(target: Path) -> Iterator[Path]:
    for path in sorted(target.parent.glob(f".{escape(target.name)}{SCRATCH}*")):
        if path.is_dir() and not path.is_symlink():
            yield path
