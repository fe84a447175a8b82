"""Locks on output: a folder, or a file, is written by one process at a time, so that results of two cannot mix.

A lock is a file in the folder (`.lock-1`; for a file `x.json`: `.x.json.lock-1`) with a record of the process that holds it.

Three things make it safe:
- Only one process takes it. The file is created with O_EXCL. A stale lock is taken over by creating the file with the next
  number and then removing the old one: if several processes try, one succeeds.
- A process notices that it lost its lock. One that was only paused, and whose lock was taken over meanwhile, gets an error
  from `Lock.check`, which is called before every write.
- A lock is stale only if its process is dead. On this machine the kernel releases the `flock` on the file when the process
  ends, for whatever reason, and not while it is paused. Also, no process with the recorded number and start time may run (a
  number that is used again has another start time), which is enough if the file system has no flock. Processes of another
  machine are not visible through every network file system: there a lock is stale when its heartbeat (the file's time, set
  every BEAT seconds) has not changed while this process watched it for STALE seconds. Clocks of machines are not compared.
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
STALE = 120.0  # seconds without a heartbeat after which a process of another machine is considered dead
POLL = 0.5  # seconds between two attempts while waiting for a lock
SILENT = 1.0  # seconds of waiting before a message is printed
MARK = ".lock-"

log = logging.getLogger("holdfast")
State = Literal["alive", "unknown", "dead"]


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    process: int
    host: str
    machine: str = ""  # identifies the boot and the namespace of process numbers
    started: str = ""  # start time, in the machine's clock ticks
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}" if self.process else "another process"

    @property
    def is_here(self) -> bool:
        """Whether the process is of this machine."""
        return bool(self.machine) and self.machine == _machine_id()

    @property
    def is_this_process(self) -> bool:
        return self.is_here and self.process == os.getpid()

    @property
    def runs(self) -> bool:
        """Whether this process runs on this machine; also False if start times cannot be read here."""
        return bool(self.started) and _start_time(self.process) == self.started


UNNAMED = Owner(0, "")  # of a lock file that has no record yet


class LockLostError(ValueError):
    """Another process has taken over the folder or file that this one was writing."""


class Lock:
    """The right to write `folder`, or the file `name` in it."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.prefix = folder, f".{name}{MARK}" if name else MARK
        self.target = folder / name if name else folder
        self._file: int | None = None
        self._path, self._process = folder, 0
        self._made: list[Path] = []  # folders that this lock created, the innermost first
        self._stop, self._beating = threading.Event(), threading.Lock()
        self._heartbeats: dict[Path, tuple[tuple[int, int], float]] = {}  # the last one seen, and since when

    def attempt(self) -> Owner | None:
        """Take the lock if it is free or stale and return None; otherwise return the process that holds it."""
        with contextlib.ExitStack() as stack:
            stale_files: dict[int, int] = {}  # number: open file; while it is open, its inode is not used again
            for number, path in self._files():
                try:
                    stale_files[number] = _open_lock_file(path)
                except FileNotFoundError:
                    return UNNAMED
                stack.callback(os.close, stale_files[number])
                state, owner = self._state_of(path, stale_files[number])
                if state != "dead":
                    return owner
            return None if self._take(stale_files) else UNNAMED

    def holder(self) -> tuple[State, Owner]:
        """Return the process that holds the lock and whether it runs, without taking the lock; "dead" if none does."""
        for _, path in reversed(self._files()):
            try:
                file = _open_lock_file(path)
            except FileNotFoundError:
                continue
            try:
                state, owner = self._state_of(path, file)
            finally:
                os.close(file)
            if state != "dead":
                return state, owner
        return "dead", UNNAMED

    def check(self) -> None:
        """Raise LockLostError unless this process still holds the lock."""
        if not self._is_held():
            raise LockLostError(
                f"another process writes {self.target} now (this process was paused too long, or its lock was removed); "
                "it stops writing."
            )

    def require(self, *paths: Path) -> None:
        """Check the lock, and raise ValueError if one of these paths in the folder goes through a symbolic link."""
        self.check()
        for path in paths:
            require_no_links(path, self.folder)

    def release(self) -> None:
        """Release the lock. Do nothing if it is not held, or was inherited in a fork."""
        if self._file is None or self._process != os.getpid():
            return
        self._stop.set()
        if self._is_held():
            self._path.unlink(missing_ok=True)
        with self._beating:  # a heartbeat after the close could reach another file with the same descriptor
            os.close(self._file)
            self._file = None
        _held.discard(self)
        for folder in self._made:
            with contextlib.suppress(OSError):  # the folder is not empty
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

    def _state_of(self, path: Path, file: int) -> tuple[State, Owner]:
        """Return whether the process that made a lock file still runs, and its record."""
        flock = _flock(file, exclusive=False)
        owner = _read_owner(file)
        if flock == "taken":
            return "alive", owner
        if owner.is_here and (owner.started or flock == "held"):
            return ("alive" if owner.runs else "dead"), owner
        return self._state_by_heartbeat(path, os.fstat(file)), owner

    def _state_by_heartbeat(self, path: Path, found: os.stat_result) -> State:
        """Return whether a lock's heartbeat changes; repeated calls of this method are how it is watched."""
        heartbeat = found.st_ino, found.st_mtime_ns
        before, since = self._heartbeats.get(path, (None, 0.0))
        if before == heartbeat:
            return "dead" if time.monotonic() - since >= STALE else "unknown"
        self._heartbeats[path] = heartbeat, time.monotonic()
        return "alive" if before is not None and before[0] == heartbeat[0] else "unknown"

    def _take(self, stale_files: dict[int, int]) -> bool:
        """Create the next lock file and remove the stale ones; return False if another process was faster."""
        number = max(stale_files, default=0) + 1
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
            _flock(file, exclusive=True)  # before the record: a file with a record and without a flock is stale
            os.write(file, json.dumps(asdict(_this_process())).encode())
            # Another process may have taken and released the lock since the listing: only these files may be there.
            now = dict(self._files())
            unchanged = now.keys() == {*stale_files, number} and all(
                _is_same_file(stale_files[stale], now[stale]) for stale in stale_files
            )
            if not unchanged:
                os.unlink(self._path)
                os.close(file)
                return False
            for stale in stale_files:
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
            with self._beating, contextlib.suppress(OSError):  # the next heartbeat tries again
                if self._file is not None and not stop.is_set():
                    os.utime(self._file)

    def _is_held(self) -> bool:
        return self._file is not None and self._process == os.getpid() and _is_same_file(self._file, self._path)


def _is_same_file(file: int, path: Path) -> bool:
    """Whether the open file `file` is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _open_lock_file(path: Path) -> int:
    """Open a lock file. Raise ValueError if it is not a regular file."""
    try:
        file = os.open(path, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise ValueError(f"{path} is not a lock file ({problem.strerror}); remove it, or choose another folder.") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is not a lock file; remove it, or choose another folder.")
    return file


@contextmanager
def locked(folder: Path, name: str = "", *, wait: bool, what: str = "") -> Iterator[Lock]:
    """Hold the lock of a folder, or of a file in it, inside the `with`.

    wait   True: wait for a process that writes there, with a message. False: raise a ValueError that names it
    what   name of the folder or file in messages; by default its path
    """
    lock = Lock(folder, name)
    what = what or str(lock.target)
    reported: Owner | None = None
    started_waiting = time.monotonic()
    while (owner := lock.attempt()) is not None:
        if not wait:
            _require_free(lock, what)
        if owner != reported and time.monotonic() - started_waiting > SILENT:
            log.warning("waiting for %s: %s", what, describe_writer(owner))
            reported = owner
        time.sleep(POLL if owner.process else POLL / 10)
    try:
        yield lock
    finally:
        lock.release()


def require_unlocked(folder: Path) -> None:
    """Raise ValueError if a process that is known to run writes the folder. Call it before work that takes long."""
    _require_free(Lock(folder), str(folder))


def _require_free(lock: Lock, what: str) -> None:
    state, owner = lock.holder()
    if state == "alive":
        raise ValueError(f"{what} is being written by {owner}; wait until that process ends, or choose another place.")


def describe_writer(owner: Owner) -> str:
    """Return which process writes, and when the lock of a process of another machine, perhaps dead, is taken over."""
    if owner.is_here:
        return f"{owner} writes it."
    return f"{owner} writes it, or was killed: after {STALE:g} s without a heartbeat its lock is taken over."


def is_lock_file(name: str) -> bool:
    """Whether a file of this name is a lock."""
    return name.startswith(".") and MARK in name and name.rpartition("-")[2].isdecimal()


def _flock(file: int, *, exclusive: bool) -> Literal["held", "taken", "unknown"]:
    if fcntl is None:
        return "unknown"
    try:
        # A process that checks a lock holds a shared flock for a moment: the one that made the file waits for it.
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as problem:
        return "taken" if problem.errno in (errno.EWOULDBLOCK, errno.EACCES) else "unknown"
    return "held"


def _read_owner(file: int) -> Owner:
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


def _this_process() -> Owner:
    process = os.getpid()
    return Owner(process, socket.gethostname(), _machine_id(), _start_time(process), secrets.token_hex(8))


def _machine_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _start_time(process: int) -> str:
    """Return when a process was started; "" if there is none of this number, or it is a zombie."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _unwritable(folder: Path, problem: OSError) -> OSError:
    return OSError(f"{folder} cannot be written ({problem.strerror or problem}); choose another folder.")


_held: set[Lock] = set()


def _drop_inherited() -> None:
    """Close inherited lock files in a forked process: the locks remain the parent's."""
    for lock in _held:
        if lock._file is not None:
            os.close(lock._file)
            lock._file = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
