"""The runner of several processes itself: a test that hangs must say so, and say where."""

from pathlib import Path

import pytest
from ranks import on_ranks


@pytest.mark.slow
def test_a_script_that_waits_for_ever_is_ended_with_what_it_printed(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('so far', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(AssertionError, match=r"waits\.py was not done after 3 s\.\nso far"):
        on_ranks(script, processes=1, patience=3)


def test_a_process_that_fails_shows_its_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('this is why')\n")
    with pytest.raises(AssertionError, match="this is why"):
        on_ranks(script, processes=1)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    first = "    if os.environ['RANK'] == '1':\n        raise ValueError('this is why')\n"
    script.write_text(f"import os, time\nif __name__ == '__main__':\n{first}    time.sleep(600)\n")
    with pytest.raises(AssertionError, match="this is why"):
        on_ranks(script, patience=60)


@pytest.mark.slow
def test_lines_of_two_processes_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    script = tmp_path / "prints.py"
    script.write_text("for _ in range(1000):\n    print('equal', flush=True)\n")
    assert on_ranks(script).splitlines() == ["equal"] * 2000
