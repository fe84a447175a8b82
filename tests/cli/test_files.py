"""Output files and folders: locked before the work, refused in one sentence, nothing left behind."""

import os
from pathlib import Path

import pytest
from commands import Command
from wording import mentions

from holdfast.cli.common import locked_files, require_free
from holdfast.files import append, write_atomically
from holdfast.locking import Lock

NOWHERE = "no-such-model"
WRITERS = {
    "evaluate": ("evaluate", NOWHERE),
    "attack": ("attack", NOWHERE, "words", "--rate", "0.1"),
    "certify": ("certify", NOWHERE),
    "audit": ("audit", NOWHERE),
}


def out(name: str, folder: Path) -> str:
    return str(folder if name == "audit" else folder / "out.json")


def refused(ended: object, sentence: str) -> None:
    code, said = ended.returncode, ended.stderr  # type: ignore[attr-defined]
    assert code == 2 and said.startswith("holdfast: ") and said.count("\n") == 1 and sentence in said, said


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_file_that_another_process_writes_is_refused_before_the_work(
    name: str, force: tuple[str, ...], tmp_path: Path, command: Command
) -> None:
    require_free(tmp_path / ("audit.json" if name == "audit" else "out.json"), force=False)
    with locked_files:
        ended = command(*WRITERS[name], "--out", out(name, tmp_path), *force)
    refused(ended, "out.json is being written by another process" if name != "audit" else "audit.json is being written")
    ended = command(*WRITERS[name], "--out", out(name, tmp_path / "new" / "folder"))
    refused(ended, NOWHERE)  # and the lock is gone with the command
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_place_of_a_file_is_refused(name: str, tmp_path: Path, command: Command) -> None:
    place = tmp_path / ("audit.json" if name == "audit" else "out.json")
    place.symlink_to(tmp_path / "victim")
    refused(command(*WRITERS[name], "--out", out(name, tmp_path), "--force"), "is a symbolic link")
    assert not (tmp_path / "victim").exists()


@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused(tmp_path: Path, command: Command) -> None:
    lock = Lock(tmp_path / "run")
    assert lock.attempt() is None
    few = ("--set", "training.steps=1", "data.length=16", "training.batch=2")
    ended = command("train", "tiny", "--out", str(tmp_path / "run"), *few)
    assert ended.returncode == 2 and mentions(ended.stderr, "run ", f"process {os.getpid()} ")
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_file_that_cannot_be_written_whole_is_named(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (write_atomically, append):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OSError, match=r"numbers\.json cannot be written: ") as caught:
                write(tmp_path / "numbers.json", "0" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "Errno" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]  # what was appended, and no partial file
