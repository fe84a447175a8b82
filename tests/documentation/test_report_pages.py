"""Pages of the site that commands write: the leaderboard, and the stored reports of docs/examples."""

import json
from pathlib import Path

import pytest
import report_pages
from report.audited import stored_audit


def test_the_leaderboard_and_every_example_are_pages_and_rows_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an-audit").mkdir()
    (tmp_path / "an-audit" / "audit.json").write_text(json.dumps(stored_audit()))
    (tmp_path / "an-audit" / "about.txt").write_text("holdfast audit tiny-mixtral --what-if smooth\n")
    (tmp_path / "not-a-report").mkdir()
    monkeypatch.setattr(report_pages, "EXAMPLES", tmp_path)
    files = report_pages.files()
    assert list(files) == ["examples/leaderboard.html", "examples/an-audit.html", "examples.md"]
    assert "tiny-mixtral" in files["examples/an-audit.html"] and "symphony+smooth" in files["examples/leaderboard.html"]
    row = "| [an-audit](examples/an-audit.html) | an audit | `holdfast audit tiny-mixtral --what-if smooth` |"
    assert row in files["examples.md"].splitlines()
