"""`holdfast` with arguments, in this process and in a terminal of some width: in a new process, imports take 2 to 6 s.

test_compare.py (slow), test_plan.py and test_routers.py check that a process prints the same and has the same exit code.
"""

import re
from subprocess import CompletedProcess

import pytest


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, columns: int = 80) -> CompletedProcess[str]:
        from holdfast_command import main

        words = [str(argument) for argument in arguments]
        self.monkeypatch.setenv("COLUMNS", str(columns))
        self.capsys.readouterr()
        try:
            code: object = main(words)
        except SystemExit as end:  # after --help
            code = end.code or 0
        printed = self.capsys.readouterr()
        assert isinstance(code, int)
        return CompletedProcess(words, code, printed.out, printed.err)

    def printed(self, *arguments: object, columns: int = 200) -> str:
        """Return what the command prints; fail unless it succeeds."""
        done = self(*arguments, columns=columns)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: object, columns: int = 200) -> str:
        """Return the sentence with which the command ends; fail unless it is one and the exit code is 2."""
        done = self(*arguments, columns=columns)
        said = [line for line in done.stderr.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]  # no phases
        assert done.returncode == 2 and len(said) == 1 and said[0].startswith("holdfast: "), done.stderr
        return said[0]
