"""The record of the GPU tests says whether it is of the source at hand."""

import json
from pathlib import Path

import gpu_record
import pytest


def test_the_hash_follows_names_and_contents(tmp_path: Path) -> None:
    for name in ("a.py", "page/b.css", "__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    first = gpu_record.source_hash(tmp_path)
    (tmp_path / "__pycache__/c.pyc").write_text("y")
    assert gpu_record.source_hash(tmp_path) == first
    (tmp_path / "page/b.css").write_text("y")
    second = gpu_record.source_hash(tmp_path)
    (tmp_path / "page/b.css").rename(tmp_path / "page/d.css")
    assert len({first, second, gpu_record.source_hash(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({}, 0, "The GPU tests were run with this source: 9 passed, 0 failed on one H200 on 2026-11-17."),
        ({"failed": 1}, 1, "The GPU tests were run with this source: 9 passed, 1 failed"),
        ({"source": "another"}, 1, "The GPU tests were not run with this source, run `make test-gpu`"),
        (None, 1, "The GPU tests have no record"),
    ],
)
def test_the_check_prints_one_sentence(
    change: dict[str, object] | None,
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "gpu_record.json")
    record = {"source": gpu_record.source_hash(), "passed": 9, "failed": 0, "gpu": "H200", "date": "2026-11-17"}
    if change is not None:
        (tmp_path / "gpu_record.json").write_text(json.dumps({**record, **change}))
    assert gpu_record.main(["--check"]) == code
    printed = capsys.readouterr().out
    assert printed.startswith(sentence) and printed.count("\n") == 1
