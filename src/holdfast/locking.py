"""Locks on output: a folder, or a file, is written by one process at a time, and results of two cannot mix.

A lock is a file in the folder (`.lock-1`; for a file `x.json`: `.x.json.lock-1`) with a record of the process that holds it.

What carries the guarantee:
- Taking it. The file is created with O_EXCL. A lock of a dead process is taken over by creating the file with the next
  number, then removing the old one: of several processes that try, one succeeds.
- Noticing its loss. A process that was only paused, and whose lock was taken meanwhile, finds that out in `Lock.check`,
  which comes before every write, and stops.
- Knowing that its process is dead, so that the lock may be taken over. On this machine the kernel knows: it drops the
  `flock` on the file when the process ends, however it ends, and not while the process is stopped. Besides, no process of
  the recorded number and start time may run (a number that was used again has another start time), which is enough where
  a file system has no flock. On another machine neither is seen over every network file system: there the lock is stale
  when its heartbeat (the file's time, set anew every BEAT seconds) has not changed while this process watched it for
  STALE seconds. Clocks of machines are not compared.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from holdfast.files import NO_FOLLOW, require_no_links

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BEAT = 10.0  # seconds between two heartbeats
STALE = 120.0  # seconds without a heartbeat after which a process of another machine counts as dead
POLL = 0.5  # seconds between two looks at a lock that is waited for
SILENT = 1.0  # seconds of waiting before a message says so
MARK = ".lock-"

log = logging.getLogger("holdfast")
State = Literal["alive", "unknown", "dead"]


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    process: int
    host: str
    machine: str = ""  # of this boot and this namespace of process numbers
    started: str = ""  # in the clock ticks of the machine
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}" if self.process else "another process"

    @property
    def is_here(self) -> bool:
        return bool(self.machine) and self.machine == _machine()

    @property
    def runs(self) -> bool:
        """Whether such a process is on this machine; False too where the machine does not tell."""
        return bool(self.started) and _started(self.process) == self.started


UNNAMED = Owner(0, "")  # of a lock that is just being made


class LockLostError(ValueError):
    """Another process has taken over what this one was writing."""


class Lock:
    """The right to write `folder`, or the file `name` in it."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.prefix = folder, f".{name}{MARK}" if name else MARK
        self.target = folder / name if name else folder
        self._file: int | None = None
        self._path, self._process = folder, 0
        self._made: list[Path] = []  # folders that were not there, the innermost first
        self._stop, self._beating = threading.Event(), threading.Lock()
        self._heartbeats: dict[Path, tuple[tuple[int, int], float]] = {}  # the last one seen, and since when

    def attempt(self) -> Owner | None:
        """Take the lock if it is free or stale; return None when it is held now, and who holds it otherwise."""
        with contextlib.ExitStack() as stack:
            judged: dict[int, int] = {}  # number: the open file, so that no other file gets its place on the disk
            for number, path in self._files():
                try:
                    judged[number] = _opened(path)
                except FileNotFoundError:
                    return UNNAMED
                stack.callback(os.close, judged[number])
                state, owner = self._judge(path, judged[number])
                if state != "dead":
                    return owner
            return None if self._take(judged) else UNNAMED

    def holder(self) -> tuple[State, Owner]:
        """Return who holds the lock and whether that process runs, without taking it; "dead" where no process does."""
        for _, path in reversed(self._files()):
            try:
                file = _opened(path)
            except FileNotFoundError:
                continue
            try:
                state, owner = self._judge(path, file)
            finally:
                os.close(file)
            if state != "dead":
                return state, owner
        return "dead", UNNAMED

    def check(self) -> None:
        """Raise LockLostError unless this process still holds the lock."""
        if not self._is_own():
            raise LockLostError(
                f"{self.target} is written by another process by now (this one was stopped too long, or its lock was "
                "removed); this one writes no more."
            )

    def require(self, *paths: Path) -> None:
        """Check the lock, and raise a ValueError where one of these paths in the folder leads through a symbolic link."""
        self.check()
        for path in paths:
            require_no_links(path, self.folder)

    def release(self) -> None:
        """Give the lock up. Do nothing where it is not held, or was inherited in a fork."""
        if self._file is None or self._process != os.getpid():
            return
        self._stop.set()
        if self._is_own():
            self._path.unlink(missing_ok=True)
        with self._beating:  # a heartbeat after the close could reach another file of the same number
            os.close(self._file)
            self._file = None
        _held.discard(self)
        for folder in self._made:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    def _files(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise ValueError(f"{self.folder} is a file; give a folder.") from None
        except OSError as problem:
            raise _unwritable(self.folder, problem) from None
        numbers = (name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix))
        return sorted((int(number), self.folder / f"{self.prefix}{number}") for number in numbers if number.isdecimal())

    def _judge(self, path: Path, file: int) -> tuple[State, Owner]:
        """Whether the process that made a lock file still runs."""
        flock = _flock(file, exclusive=False)
        owner = _owner(file)
        if flock == "taken":
            return "alive", owner
        if owner.is_here and (owner.started or flock == "held"):
            return ("alive" if owner.runs else "dead"), owner
        return self._watch(path, os.fstat(file)), owner

    def _watch(self, path: Path, found: os.stat_result) -> State:
        """Judge a lock by its heartbeat; the calls of this function are the watch."""
        heartbeat = found.st_ino, found.st_mtime_ns
        before, since = self._heartbeats.get(path, (None, 0.0))
        if before == heartbeat:
            return "dead" if time.monotonic() - since >= STALE else "unknown"
        self._heartbeats[path] = heartbeat, time.monotonic()
        return "alive" if before is not None and before[0] == heartbeat[0] else "unknown"

    def _take(self, judged: dict[int, int]) -> bool:
        """Create the next lock file; False where another process was faster. `judged` are the files that are stale."""
        number = max(judged, default=0) + 1
        self._path = self.folder / f"{self.prefix}{number}"
        try:
            self._made = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise _unwritable(self.folder, problem) from None
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666)
        except (FileExistsError, FileNotFoundError):  # another process was faster, or has just removed its empty folder
            return False
        except OSError as problem:
            raise _unwritable(self.folder, problem) from None
        try:
            _flock(file, exclusive=True)  # before the record: with a record and without a flock, its process is dead
            os.write(file, json.dumps(asdict(_myself())).encode())
            # Others may have come and gone since the listing: only the stale files and this one may be there.
            now = dict(self._files())
            unchanged = now.keys() == {*judged, number} and all(_is_at(judged[stale], now[stale]) for stale in judged)
            if not unchanged:
                os.unlink(self._path)
                os.close(file)
                return False
            for stale in judged:
                now[stale].unlink(missing_ok=True)
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(file)
            raise _unwritable(self.folder, problem) from None
        self._file, self._process = file, os.getpid()
        _held.add(self)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(self._stop,), daemon=True, name="holdfast heartbeat").start()
        return True

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT):
            with self._beating, contextlib.suppress(OSError):  # a failed heartbeat is followed by the next
                if self._file is not None and not stop.is_set():
                    os.utime(self._file)

    def _is_own(self) -> bool:
        return self._file is not None and self._process == os.getpid() and _is_at(self._file, self._path)


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _opened(path: Path) -> int:
    """Open a lock file; only a regular file is one."""
    try:
        file = os.open(path, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise ValueError(f"{path} is no lock file ({problem.strerror}); remove it, or choose another folder.") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is no lock file; remove it, or choose another folder.")
    return file


@contextmanager
def locked(folder: Path, name: str = "", *, wait: bool, what: str = "") -> Iterator[Lock]:
    """Hold the lock of a folder, or of a file in it, inside the `with`.

    wait   True: wait for a process that writes there, and say so. False: raise a ValueError that names it
    what   how messages call the folder or file
    """
    lock = Lock(folder, name)
    what = what or str(lock.target)
    told: Owner | None = None
    begun = time.monotonic()
    while (owner := lock.attempt()) is not None:
        if not wait:
            _require_free(lock, what)
        if owner != told and time.monotonic() - begun > SILENT:
            log.warning("waiting for %s: %s", what, being_written(owner))
            told = owner
        time.sleep(POLL if owner.process else POLL / 10)
    try:
        yield lock
    finally:
        lock.release()


def require_unlocked(folder: Path) -> None:
    """Raise a ValueError where a process that is known to run writes the folder: asked before work that takes long."""
    _require_free(Lock(folder), str(folder))


def _require_free(lock: Lock, what: str) -> None:
    state, owner = lock.holder()
    if state == "alive":
        raise ValueError(f"{what} is being written by {owner}; wait until that one ends, or choose another place.")


def being_written(owner: Owner) -> str:
    """Say who writes, and for how long to wait for a process of another machine that may be dead."""
    if owner.is_here:
        return f"{owner} writes it."
    return f"{owner} writes it, or did: without a sign of life for {STALE:g} s it is taken over."


def is_lock(name: str) -> bool:
    """Whether a file of this name is a lock."""
    return name.startswith(".") and MARK in name and name.rpartition("-")[2].isdecimal()


def _flock(file: int, *, exclusive: bool) -> Literal["held", "taken", "unknown"]:
    if fcntl is None:
        return "unknown"
    try:
        # One that looks whether a lock is held holds it for a moment: the maker of the file waits for that.
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as problem:
        return "taken" if problem.errno in (errno.EWOULDBLOCK, errno.EACCES) else "unknown"
    return "held"


def _owner(file: int) -> Owner:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        values = {field.name: found[field.name] for field in fields(Owner)}
        if all(
            isinstance(values[field.name], field.type if isinstance(field.type, type) else str) for field in fields(Owner)
        ):
            return Owner(**values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return UNNAMED


def _myself() -> Owner:
    process = os.getpid()
    return Owner(process, socket.gethostname(), _machine(), _started(process), secrets.token_hex(8))


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _started(process: int) -> str:
    """When a process was started; empty where there is none of this number, or it has ended and is not waited for."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _unwritable(folder: Path, problem: OSError) -> OSError:
    return OSError(f"{folder} cannot be written ({problem.strerror or problem}); choose another folder.")


_held: set[Lock] = set()


def _forget() -> None:
    """In a forked process: locks stay the parent's, and end with it."""
    for lock in _held:
        if lock._file is not None:
            os.close(lock._file)
            lock._file = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
