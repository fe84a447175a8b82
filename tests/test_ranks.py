"""The runner of several processes itself: a test that hangs must say so, and say where."""

from pathlib import Path

import pytest
from ranks import on_ranks


def test_processes_that_wait_for_each_other_are_ended_with_what_they_printed(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nprint('so far', os.environ['RANK'], flush=True)\ntime.sleep(600)\n")
    with pytest.raises(AssertionError, match="waits.py was not done after 8 s") as error:
        on_ranks(script, patience=8)
    assert "so far 0" in str(error.value) and "so far 1" in str(error.value)


def test_a_process_that_fails_shows_its_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('this is why')\n")
    with pytest.raises(AssertionError, match="this is why"):
        on_ranks(script, processes=1)
