"""Where commands write: what is wrong with the place is said before the work begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from report.stored import stored
from wording import mentions

from holdfast.cli.common import locked_files, require_folder, require_free

FILES = [["evaluate", "MODEL"], ["attack", "MODEL", "words", "--rate", "0.1"], ["certify", "MODEL"]]
FOLDERS = [["audit", "MODEL"], ["train", "tiny"], ["compare"]]
COMMANDS = [*FILES, *FOLDERS, ["report", "COMPARED"]]


@pytest.fixture
def run(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with this --out. Its model does not exist, and no task may be made: the place is looked at first."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in ("training", "comparison"):
        monkeypatch.setattr(f"holdfast.train.{module}.make_task", lambda *_: pytest.fail("the work has begun"))

    def call(arguments: list[str], out: Path) -> str:
        words = [{"MODEL": "not/loaded", "COMPARED": tmp_path / "compared"}.get(word, word) for word in arguments]
        return command.refused(*words, "--out", out)

    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "results.json").write_text(json.dumps(stored()))
    return call


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_a_place_that_cannot_be_written_is_noticed_before_the_work(arguments: list[str], run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "x", tmp_path / "file" / "deeper" / "x"):
        assert f"{tmp_path / 'file'} " in run(arguments, out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "dangling " in run(arguments, tmp_path / "dangling" / "x")
    assert "/proc " in run(arguments, Path("/proc/holdfast/x"))  # read-only, to root too
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("arguments", FILES, ids=lambda words: words[0])
def test_a_file_is_neither_a_folder_nor_there_already(arguments: list[str], run: Any, tmp_path: Path) -> None:
    assert mentions(run(arguments, tmp_path), f"{tmp_path} ", "folder")
    (tmp_path / "there.json").write_text("mine")
    assert mentions(run(arguments, tmp_path / "there.json"), "there.json ", "--out", "--force")


def test_an_audit_looks_at_both_of_its_files(run: Any, tmp_path: Path) -> None:
    for name in ("audit.json", "audit.html"):
        (tmp_path / name).mkdir()
        assert mentions(run(["audit", "MODEL", "--force"], tmp_path), f"{tmp_path / name} ", "folder")
        (tmp_path / name).rmdir()
        (tmp_path / name).write_text("mine")
        assert mentions(run(["audit", "MODEL"], tmp_path), f"{tmp_path / name} ", "--force")
        (tmp_path / name).unlink()


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    require_folder(tmp_path / "new" / "folder")
    require_free(tmp_path / "new" / "file.json", force=False)
    require_free(None, force=False)
    locked_files.close()
    assert not list(tmp_path.iterdir())
