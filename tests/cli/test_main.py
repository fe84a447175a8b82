"""The command itself: names it does not know, and readers who have had enough."""

import subprocess
import sys

import pytest
from commands import Command
from tiers import quick_or_slow
from wording import mentions

import holdfast


@pytest.mark.parametrize("more", [[], ["--help"]], ids=["alone", "with help"])
def test_an_unknown_command_is_told_the_nearest(more: list[str], command: Command) -> None:
    done = command("rooters", *more)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and mentions(done.stderr, "holdfast: ", "'rooters'", "'routers'")


def test_a_command_that_nothing_is_near_gets_them_all(command: Command) -> None:
    told = command("bogus").stderr
    assert "did you mean" not in told and "attack, audit" in told


def test_the_version_is_said(command: Command) -> None:
    assert command("--version").stdout == f"holdfast {holdfast.__version__}\n"


def test_no_command_at_all_shows_them(command: Command) -> None:
    assert "compare" in command("--help").stdout


@pytest.mark.parametrize(  # tables are rich's, which has its own code
    ("argument", "code"), quick_or_slow([("--help", 141), ("routers", 1)], [("--help", 141)])
)
def test_a_closed_pipe_is_no_traceback(argument: str, code: int) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "holdfast", argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()  # as `head` does
    said = run.stderr.read()
    run.stderr.close()
    assert run.wait() == code and said == ""
