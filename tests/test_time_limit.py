"""`--stop-after` skips the tests that have not started in time, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def outcome(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_layering.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_tests_that_start_too_late_are_skipped_with_the_reason() -> None:
    printed = outcome("--stop-after=0")
    assert "passed" not in printed and "the time for tests, 0 s, was over" in printed
    printed = outcome("--stop-after=600")
    assert "passed" in printed and "skipped" not in printed
