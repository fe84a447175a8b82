"""One process writes a folder at a time; a lock of a dead process is taken over, that of a living one never."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import locking
from holdfast.locking import Lock, LockLostError, locked


@contextmanager
def process(work: Callable[[], Any]) -> Iterator[int]:
    """A process that has done `work`, and then sleeps until it is killed."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            work()
            os.write(writing, b"done")
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


def held_by_a_dead_process(folder: Path) -> None:
    with process(lambda: Lock(folder).attempt()):
        pass


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    with process(lambda: Lock(tmp_path / "run").attempt()) as number:
        owner = Lock(tmp_path / "run").attempt()
        assert owner is not None and owner.process == number
        sentence = rf"run .*process {number} on host \S+"
        with pytest.raises(ValueError, match=sentence) as caught, locked(tmp_path / "run", wait=False):
            pass
        assert "\n" not in str(caught.value)


def test_two_in_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "new" / "run"), Lock(tmp_path / "new" / "run")
    assert first.attempt() is None and second.attempt() is not None
    first.release()
    assert second.attempt() is None
    second.release()
    assert not (tmp_path / "new").exists()  # what the lock made is gone with it


def test_a_file_and_its_folder_have_locks_of_their_own(tmp_path: Path) -> None:
    for name in ("", "a.json", "b.json"):
        assert Lock(tmp_path, name).attempt() is None
    with pytest.raises(ValueError, match=r"a\.json.*process"), locked(tmp_path, "a.json", wait=False):
        pass


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_lock_of_a_dead_process_is_taken_over_and_of_a_stopped_one_is_not(
    has_flock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "STALE", 0.0)
    if not has_flock:
        monkeypatch.setattr(locking, "fcntl", None)
    with process(lambda: Lock(tmp_path).attempt()) as number:
        os.kill(number, signal.SIGSTOP)
        mine = Lock(tmp_path)
        assert all(mine.attempt() is not None for _ in range(3))
        os.kill(number, signal.SIGKILL)
        os.kill(number, signal.SIGCONT)
        ended = time.monotonic() + 60
        while mine.attempt() is not None:  # once it has ended; it is not waited for and stays as a zombie
            assert time.monotonic() < ended
            time.sleep(0.01)
    mine.check()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_process_number_that_was_used_again_holds_nothing(tmp_path: Path) -> None:
    held_by_a_dead_process(tmp_path)
    edit(tmp_path / ".lock-1", process=os.getpid())
    assert Lock(tmp_path).attempt() is None


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_lock_of_another_machine_is_judged_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by_a_dead_process(tmp_path)
    edit(tmp_path / ".lock-1", machine="another", host="elsewhere")
    mine = Lock(tmp_path)
    assert mine.holder()[0] == "unknown" and str(mine.attempt()).endswith("elsewhere")
    os.utime(tmp_path / ".lock-1", ns=(1, 1))  # a heartbeat, whatever the clocks say
    assert mine.holder()[0] == "alive" and mine.attempt() is not None
    assert mine.attempt() is not None
    monkeypatch.setattr(locking, "STALE", 0.0)
    assert mine.attempt() is None


def test_a_process_that_lost_its_lock_notices_and_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another machine that was stopped for longer than a heartbeat."""
    monkeypatch.setattr(locking, "fcntl", None)
    monkeypatch.setattr(locking, "STALE", 0.0)
    paused, other = Lock(tmp_path), Lock(tmp_path)
    assert paused.attempt() is None
    paused.check()
    edit(tmp_path / ".lock-1", machine="another")
    assert other.attempt() is not None and other.attempt() is None
    with pytest.raises(LockLostError, match="another process"):
        paused.check()
    paused.release()
    other.check()
    other.release()


def test_heartbeats_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "BEAT", 0.01)
    with locked(tmp_path, wait=False):
        os.utime(tmp_path / ".lock-1", ns=(1, 1))
        for _ in range(500):
            if (tmp_path / ".lock-1").stat().st_mtime_ns > 1:
                break
            time.sleep(0.01)
        assert (tmp_path / ".lock-1").stat().st_mtime_ns > 1


def test_a_fork_neither_has_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    """A worker that outlives its parent must not keep others away."""
    mine = Lock(tmp_path)
    assert mine.attempt() is None

    def in_the_fork() -> None:
        with pytest.raises(LockLostError):
            mine.check()
        mine.release()

    with process(in_the_fork):
        mine.check()
        mine.release()
        assert Lock(tmp_path).attempt() is None


@pytest.mark.parametrize("count", [6])
def test_of_many_that_take_over_a_stale_lock_one_at_a_time_gets_it(count: int, tmp_path: Path) -> None:
    """Each adds to a number in a file, and some die while they have the lock."""
    folder, number = tmp_path / "run", tmp_path / "number"
    number.write_text("0")
    held_by_a_dead_process(folder)

    def add(which: int) -> None:
        for turn in range(5):
            with locked(folder, wait=True):
                before = int(number.read_text())
                time.sleep(0.002)
                number.write_text(str(before + 1))
                if turn == 4 and which % 2:
                    os._exit(0)  # without releasing it

    locking.POLL, before = 0.01, locking.POLL
    children = []
    try:
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
    finally:
        locking.POLL = before
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    assert number.read_text() == str(5 * count)


@pytest.mark.parametrize("kind", ["link to a file", "dangling link", "folder", "pipe"])
def test_something_that_is_not_a_lock_file_is_refused_and_not_changed(kind: str, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "run" / ".lock-1"
    place.parent.mkdir()
    if kind == "link to a file":
        victim.write_text("precious")
    if "link" in kind:
        place.symlink_to(victim)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(ValueError, match=r"\.lock-1 .*remove"):
        Lock(place.parent).attempt()
    assert victim.exists() == (kind == "link to a file") and (not victim.exists() or victim.read_text() == "precious")
    assert os.path.lexists(place)


def test_a_record_that_cannot_be_read_is_waited_for_and_then_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock-1").write_text('{"process": 1, "ho')
    mine = Lock(tmp_path)
    assert mine.attempt() is locking.UNNAMED
    monkeypatch.setattr(locking, "STALE", 0.0)
    assert mine.attempt() is None


def test_a_folder_that_cannot_be_written_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/none")):
        with pytest.raises((ValueError, OSError), match=r"is a file; give a folder|cannot be written \(") as caught:
            Lock(place).attempt()
        assert "\n" not in str(caught.value)
