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


def file_of(name: str) -> str:
    return "audit.json" if name == "audit" else "out.json"


def out(name: str, folder: Path) -> Path:
    return folder if name == "audit" else folder / "out.json"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_file_that_another_process_writes_is_refused_before_the_work(
    name: str, force: tuple[str, ...], tmp_path: Path, command: Command
) -> None:
    require_free(tmp_path / file_of(name), force=False)
    with locked_files:
        told = command.refused(*WRITERS[name], "--out", out(name, tmp_path), *force)
    assert f"{file_of(name)} is being written by another process" in told
    assert NOWHERE in command.refused(*WRITERS[name], "--out", out(name, tmp_path / "new"))  # the lock went with the command
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_place_of_a_file_is_refused(name: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / file_of(name)).symlink_to(tmp_path / "victim")
    assert "is a symbolic link" in command.refused(*WRITERS[name], "--out", out(name, tmp_path), "--force")
    assert not (tmp_path / "victim").exists()


@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused(tmp_path: Path, command: Command) -> None:
    lock = Lock(tmp_path / "run")
    assert lock.attempt() is None
    few = ("--set", "training.steps=1", "data.length=16", "training.batch=2")
    told = command.refused("train", "tiny", "--out", tmp_path / "run", *few)
    assert mentions(told, "run ", f"process {os.getpid()} ")
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
