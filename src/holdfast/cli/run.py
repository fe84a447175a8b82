"""`holdfast run`: another program, with Holdfast imported, so that it opens folders that Holdfast saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

STARTED = Path(__file__).parent / "started"  # holds what Python runs at its start


@dataclass(frozen=True)
class Run:
    """Run another program with Holdfast imported, so that transformers in it opens the folders that Holdfast saved.

    The program is a command, a Python file, or `python` with its arguments; processes that it starts have Holdfast too.

    Examples: `holdfast run -- lm_eval --model hf --model_args pretrained=out --tasks arc_easy`,
    `holdfast run -- trl sft --model_name_or_path out ...`, `holdfast run -- python -m my.training`, `holdfast run train.py`
    """

    program: Positional[str]
    """A command as one would type it, or a Python file."""
    arguments: Positional[tuple[str, ...]] = ()
    """All that follows is the program's."""

    def run(self) -> None:
        line = [*self._found(), *self.arguments]
        path = os.pathsep.join([str(STARTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {**os.environ, "PYTHONPATH": path}
        sys.stdout.flush()
        sys.stderr.flush()
        if os.name == "nt":  # no process takes another's place there
            sys.exit(subprocess.call(line, env=surroundings))
        os.execve(line[0], line, surroundings)

    def _found(self) -> list[str]:
        """What to start, as a whole path; commands of this Python's environment come first, active or not."""
        if self.program.endswith(".py"):
            if not Path(self.program).is_file():
                raise ValueError(f"there is no file {self.program}.")
            return [sys.executable, self.program]
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        found = shutil.which(self.program, path=beside)
        if found is None:
            raise ValueError(
                f"there is no command {self.program!r} here; for a Python module: holdfast run -- python -m NAME."
            )
        return [found]


def given(arguments: list[str]) -> Run | None:
    """The program of a command line `run ...`; None where its help is wanted. What follows the program is left alone."""
    rest = arguments[2:] if arguments[1:2] == ["--"] else arguments[1:]
    if not rest or (rest == arguments[1:] and rest[0].startswith("-")):
        return None
    return Run(rest[0], tuple(rest[1:]))
