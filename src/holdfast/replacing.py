"""Replace a folder atomically, or at least so that neither the old nor the new folder is lost if the process is killed.

The new folder is written inside a scratch folder beside the target, `.NAME.saving-...`, with a lock of the writing process.
If the kernel can exchange two folders (Linux, most local file systems), it does, and the target exists at every moment.
Otherwise the old folder is first moved into the scratch folder: if the process is killed then, `recover_folder` moves it
back. Scratch folders of dead processes are removed by the next process that writes there.
"""

import ctypes
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.locking import Lock

SCRATCH = ".saving-"
NEW, OLD = "new", "old"
EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
HERE = -100  # AT_FDCWD: paths are relative to the working directory


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Replace `target` by the folder that `fill` writes. If `fill` raises, `target` is unchanged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(target)
    _remove_stale_scratch(target)
    scratch = target.parent / f".{target.name}{SCRATCH}{secrets.token_hex(6)}"
    lock = Lock(scratch)
    while lock.attempt() is not None:  # another process may remove the folder before the lock is in it
        pass
    try:
        fill(scratch / NEW)
        lock.check()
        _swap(scratch, target)
    finally:
        if (scratch / OLD).exists() and not target.exists():
            (scratch / OLD).rename(target)
        lock.release()
        shutil.rmtree(scratch, ignore_errors=True)


def recover_folder(target: Path) -> bool:
    """Move the old folder back if a process was killed while it replaced `target`; return whether `target` exists."""
    for scratch in _scratch_folders(target):
        for _ in range(50):  # a running process may be between its two renames for a moment
            if target.exists() or not (scratch / OLD).is_dir():
                break
            if Lock(scratch).holder()[0] == "dead":
                _move_back(scratch / OLD, target)
            else:
                time.sleep(0.1)
    return target.is_dir()


def _move_back(old: Path, target: Path) -> None:
    try:
        old.rename(target)
    except FileNotFoundError:  # another process has done it
        return
    except OSError as problem:
        reason = f"and cannot be moved back ({problem.strerror})"
        raise ValueError(f"a process was killed while it replaced {target}; the former folder is {old}, {reason}.") from None


def _remove_stale_scratch(target: Path) -> None:
    """Remove the scratch folders of dead processes."""
    for scratch in _scratch_folders(target):
        lock = Lock(scratch)
        if (target.exists() or not (scratch / OLD).exists()) and lock.attempt() is None:
            lock.release()
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch_folders(target: Path) -> Iterator[Path]:
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    for name in sorted(names):
        path = target.parent / name
        if name.startswith(f".{target.name}{SCRATCH}") and path.is_dir() and not path.is_symlink():
            yield path


def _swap(scratch: Path, target: Path) -> None:
    if not target.exists():
        (scratch / NEW).rename(target)
    elif not _exchange(scratch / NEW, target):
        target.rename(scratch / OLD)
        (scratch / NEW).rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically; return False if the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0)
