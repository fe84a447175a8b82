"""`holdfast report` as a user runs it."""

import json
from pathlib import Path

import pytest
from report.stored import stored

from holdfast_command import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results.json").write_text(json.dumps(stored()))
    return tmp_path


def test_the_report_is_written_beside_the_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert "made no difference" in (folder / "report.html").read_text(encoding="utf-8")


def test_it_is_not_overwritten_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "mine.html"
    out.write_text("mine")
    assert main(["report", str(folder), "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    error = capsys.readouterr().err
    assert "--force" in error and error.count("\n") == 1
    assert main(["report", str(folder), "--out", str(out), "--force"]) == 0


@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        (None, ".", "results.json"),
        (None, "nowhere", "results.json"),
        ("{}", "results.json", "schema"),
        ("not json", ".", "is damaged"),
        ("{}", ".", "schema"),
    ],
)
def test_a_mistake_gets_one_sentence(
    content: str | None, place: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert main(["report", str(tmp_path / place)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("holdfast: ") and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
