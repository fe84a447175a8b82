"""Replace a folder so that neither the old nor the new one is lost if the process is killed.

The new folder is written inside a scratch folder beside the target, `.NAME.saving-...`, which the writing process locks.
Then the old folder is moved into the scratch folder, and the new one to its place. A process that is killed between these
two renames leaves no target: `recover_folder` moves the old folder back. Scratch folders of processes that were killed are
removed by the next process that writes there.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import filelock

SCRATCH = ".saving-"
NEW, OLD, LOCK = "new", "old", ".lock"
BETWEEN_RENAMES = 5.0  # seconds: a running process has renamed both folders long before


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


def _locked(scratch: Path, timeout: float = 0) -> filelock.BaseFileLock | None:
    """Return the lock of a scratch folder; None if a running process has it, or the folder is gone."""
    lock = filelock.FileLock(scratch / LOCK)
    with suppress(filelock.Timeout, FileNotFoundError):
        lock.acquire(timeout=timeout)
    return lock if lock.is_locked else None


def _scratch_folders(target: Path) -> Iterator[Path]:
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    for name in sorted(names):
        path = target.parent / name
        if name.startswith(f".{target.name}{SCRATCH}") and path.is_dir() and not path.is_symlink():
            yield path
