"""One process writes a folder at a time; the lock of a dead process is free, that of another host is not."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pytest
from wording import assert_refused

from holdfast import locking
from holdfast.locking import Lock, LockLostError, OtherHostError, locked, require_unlocked, take_over


@contextmanager
def process(work: Callable[[], Any]) -> Iterator[int]:
    """A process that has done `work`, and then sleeps until it is killed."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            kept = work()  # a lock that nothing refers to would be released
            os.write(writing, b"done" if kept is not None else b"none")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 4) == b"done"
    os.close(reading)
    try:
        yield number
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def taken(folder: Path) -> Lock:
    lock = Lock(folder)
    assert lock.attempt() is None
    return lock


def held_by_a_dead_process(folder: Path, **values: Any) -> None:
    with process(lambda: taken(folder)):
        pass
    note = folder / ".owner"
    note.write_text(json.dumps({**json.loads(note.read_text()), **values}))


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    with process(lambda: taken(tmp_path / "run")) as number:
        owner = Lock(tmp_path / "run").attempt()
        assert owner is not None and owner.process == number
        sentence = rf"run .*process {number} on host \S+ since 20\d\d-"
        with pytest.raises(ValueError, match=sentence) as caught, locked(tmp_path / "run", wait=False):
            pass
        assert "\n" not in str(caught.value)
        assert_refused(sentence, require_unlocked, tmp_path / "run")


def test_two_in_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "new" / "run"), Lock(tmp_path / "new" / "run")
    assert first.holder() is None and not (tmp_path / "new").exists()  # looking leaves nothing
    assert first.attempt() is None and second.attempt() is not None
    first.release()
    assert second.attempt() is None
    second.release()
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [".lock"]


def test_a_lock_of_a_dead_process_is_free_and_of_a_stopped_one_is_not(tmp_path: Path) -> None:
    with process(lambda: taken(tmp_path)) as number:
        os.kill(number, signal.SIGSTOP)
        mine = Lock(tmp_path)
        assert all(mine.attempt() is not None for _ in range(3))
        os.kill(number, signal.SIGKILL)
        os.kill(number, signal.SIGCONT)
        while mine.attempt() is not None:  # until it has ended; it is not waited for and stays as a zombie
            time.sleep(0.01)
    mine.check()
    mine.release()


def test_a_folder_of_another_host_is_refused_until_it_is_taken_over(tmp_path: Path) -> None:
    held_by_a_dead_process(tmp_path / "cell", host="elsewhere", since="2026-01-31 12:00:00.5")
    for refused in (Lock(tmp_path / "cell").attempt, Lock(tmp_path / "cell").holder):
        with pytest.raises(OtherHostError, match=r"cell .*elsewhere since 2026-01-31 12:00:00 UTC.*--take-over") as caught:
            refused()
        assert "\n" not in str(caught.value)
    take_over(tmp_path)
    taken(tmp_path / "cell").release()


def test_a_process_that_lost_its_lock_notices_and_leaves_the_new_one(tmp_path: Path) -> None:
    """As one of another host whose lock is not seen here."""
    paused = taken(tmp_path)
    paused.check()
    (tmp_path / ".lock").rename(tmp_path / "not-seen-here")
    edited = json.loads((tmp_path / ".owner").read_text())
    (tmp_path / ".owner").write_text(json.dumps({**edited, "host": "elsewhere"}))
    take_over(tmp_path)
    other = taken(tmp_path)
    with pytest.raises(LockLostError, match="another process"):
        paused.check()
    paused.release()
    other.check()
    other.release()


def test_a_process_that_runs_elsewhere_is_not_taken_over_where_its_lock_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(lambda: taken(tmp_path)):
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        take_over(tmp_path)
        assert (tmp_path / ".owner").exists() and Lock(tmp_path).attempt() is not None


def test_a_fork_neither_has_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    """A worker that outlives its parent must not keep others away."""
    mine = taken(tmp_path)

    def in_the_fork() -> Lock:
        with pytest.raises(LockLostError):
            mine.check()
        mine.release()
        return mine

    with process(in_the_fork):
        mine.check()
        mine.release()
        taken(tmp_path).release()


def test_of_many_that_wait_for_a_lock_one_at_a_time_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds to a number in a file, and some die while they have the lock."""
    folder, number, count = tmp_path / "run", tmp_path / "number", 6
    number.write_text("0")
    held_by_a_dead_process(folder)
    monkeypatch.setattr(locking, "POLL", 0.01)

    def add(which: int) -> None:
        for turn in range(5):
            with locked(folder, wait=True):
                before = int(number.read_text())
                time.sleep(0.002)
                number.write_text(str(before + 1))
                if turn == 4 and which % 2:
                    os._exit(0)  # without releasing it

    children = []
    for which in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                add(which)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    assert number.read_text() == str(5 * count)


@pytest.mark.parametrize("name", [".lock", ".owner"])
@pytest.mark.parametrize("kind", ["link to a file", "dangling link", "folder"])
def test_something_that_is_not_a_lock_file_is_refused_and_not_changed(kind: str, name: str, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "run" / name
    place.parent.mkdir()
    if kind == "link to a file":
        victim.write_text("precious")
    if "link" in kind:
        place.symlink_to(victim)
    else:
        place.mkdir()
    with pytest.raises((ValueError, OSError), match=r"run.*(remove|choose)"):
        Lock(place.parent).attempt()
    assert victim.exists() == (kind == "link to a file") and (not victim.exists() or victim.read_text() == "precious")
    assert os.path.lexists(place)


def test_a_folder_that_cannot_be_written_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/none")):
        with pytest.raises((ValueError, OSError), match=r"is a file; give a folder|cannot be written \(") as caught:
            Lock(place).attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [filelock.SoftFileLock, NotImplementedError])
def test_a_file_system_without_locks_is_one_sentence(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **named: Any) -> None:
        raise kind

    if kind is NotImplementedError:
        monkeypatch.setattr(filelock.FileLock, "acquire", raising)
    else:
        monkeypatch.setattr(filelock, "FileLock", kind)
    with pytest.raises(OSError, match=r"has no locks; choose") as caught:
        Lock(tmp_path).attempt()
    assert "\n" not in str(caught.value)
