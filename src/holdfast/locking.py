"""Locks on run folders: a folder is written by one process at a time, so that the results of two cannot mix.

    .lock    locked by the process that writes the folder, with `filelock`: the system releases it when the process ends,
             however it ends, and not while it is only paused. The file is never removed: another process may have opened
             it to wait for it, and would then lock a file that no third process can see
    .owner   a note of this process, its host and the time, as JSON. It is removed before the lock is released

So a note without a lock was left by a process that was killed. On the same host the next process replaces it. A note of
another host is never replaced by itself, because a lock may not be visible there: the folder is refused until a user calls
`take_over`. A process that was only paused meanwhile notices before its next write that its note is gone.
"""

import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock

from holdfast.checked import from_mapping
from holdfast.files import read_json, require_no_links, write_atomically

LOCK_FILES = LOCK, NOTE = ".lock", ".owner"
POLL = 0.5  # seconds between two attempts while waiting for a lock
SILENT = 1.0  # seconds of waiting before a message is printed
MOMENT = 1.0  # seconds: a process that only looks whether a folder is locked, or has not written its note yet, needs less

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Owner:
    """The process that writes a folder: the content of its note."""

    process: int
    host: str
    since: str  # a date with microseconds, UTC: two notes are never equal

    def __str__(self) -> str:
        if not self.process:
            return "another process"
        return f"process {self.process} on host {self.host} since {self.since[:19]} UTC"

    @property
    def is_this_process(self) -> bool:
        return (self.process, self.host) == (os.getpid(), socket.gethostname())


UNKNOWN = Owner(0, "", "")  # of a lock without a note


class LockLostError(ValueError):
    """Another process has taken over the folder that this one was writing."""


class OtherHostError(ValueError):
    """A process of another host has left its note in the folder; it may still write there."""


class Lock:
    """The right to write `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Any = None
        self._owner = UNKNOWN

    def attempt(self) -> Owner | None:
        """Take the lock and return None; if another process holds it, return that process.

        Raise OtherHostError if the folder has a note of another host, and OSError if it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = self._acquire()
            if holder is None:
                self._owner = Owner(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(" "))
                write_atomically(self.folder / NOTE, json.dumps(asdict(self._owner)) + "\n")
        except OSError as problem:
            self._release()
            if self.folder.is_file():
                raise ValueError(f"{self.folder} is a file; give a folder.") from None
            why = problem.strerror or problem
            raise OSError(f"{self.folder} cannot be written ({why}); choose another folder.") from None
        return holder

    def holder(self) -> Owner | None:
        """Return the process that holds the lock, without taking the lock; None if it is free. Raise as `attempt`."""
        if not any((self.folder / name).exists() for name in LOCK_FILES):
            return None
        holder = self._acquire()
        self._release()
        return holder

    def _acquire(self) -> Owner | None:
        for name in LOCK_FILES:
            require_no_links(self.folder / name, self.folder)
        lock = filelock.FileLock(self.folder / LOCK, thread_local=False)
        note = _read_note(self.folder)
        try:
            with warnings.catch_warnings(action="ignore"):  # of a soft lock
                lock.acquire(timeout=MOMENT if note is None else 0)
        except filelock.Timeout:
            return _read_note(self.folder) or UNKNOWN
        except NotImplementedError as problem:
            raise _no_locks(self.folder) from problem
        if isinstance(lock, filelock.SoftFileLock):  # a file that a killed process would leave
            lock.release()
            raise _no_locks(self.folder)
        note = _read_note(self.folder)
        if note is not None and note.host != socket.gethostname():
            lock.release()
            raise OtherHostError(
                f"{self.folder} is or was written by {note}, another host: if that process has ended, add --take-over; "
                "otherwise wait for it, or choose another folder."
            )
        self._lock = lock
        return None

    def check(self) -> None:
        """Raise LockLostError unless this process still holds the lock."""
        if self._lock is None or not self._owner.is_this_process or _read_note(self.folder) != self._owner:
            raise LockLostError(f"another process has taken over {self.folder}; this one stops writing.")

    def require(self, *paths: Path) -> None:
        """Check the lock, and raise ValueError if one of these paths in the folder goes through a symbolic link."""
        self.check()
        for path in paths:
            require_no_links(path, self.folder)

    def release(self) -> None:
        """Release the lock. Do nothing if it is not held, or was inherited in a fork."""
        if self._lock is not None and self._owner.is_this_process:
            if _read_note(self.folder) == self._owner:
                (self.folder / NOTE).unlink(missing_ok=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[Lock]:
    """Hold the lock of a folder inside the `with`.

    wait   True: wait for a process that writes there, with a message. False: raise a ValueError that names it
    """
    lock = Lock(folder)
    reported: Owner | None = None
    started_waiting = time.monotonic()
    while (owner := lock.attempt()) is not None:
        if not wait:
            raise _in_use(folder, owner)
        if owner != reported and time.monotonic() - started_waiting > SILENT:
            log.warning("waiting for %s: %s writes it.", folder, owner)
            reported = owner
        time.sleep(POLL)
    try:
        yield lock
    finally:
        lock.release()


def require_unlocked(folder: Path) -> None:
    """Raise ValueError if another process writes the folder. Call it before work that takes long."""
    owner = Lock(folder).holder()
    if owner is not None:
        raise _in_use(folder, owner)


def take_over(folder: Path) -> None:
    """Remove the notes of other hosts in the folder and below it, except where a lock shows that their process runs."""
    for note in sorted(folder.rglob(NOTE)):
        try:
            Lock(note.parent).holder()
        except OtherHostError:
            log.warning("%s is taken over from %s.", note.parent, _read_note(note.parent))
            note.unlink(missing_ok=True)


def _read_note(folder: Path) -> Owner | None:
    try:
        return from_mapping(Owner, read_json(folder / NOTE))
    except FileNotFoundError:
        return None
    except ValueError as problem:
        raise ValueError(f"{folder / NOTE} is damaged ({problem}); remove it, or choose another folder.") from None


def _in_use(folder: Path, owner: Owner) -> ValueError:
    return ValueError(f"{folder} is being written by {owner}; wait until that process ends, or choose another place.")


def _no_locks(folder: Path) -> OSError:
    return OSError(f"the file system of {folder} has no locks; choose a folder on another one.")
