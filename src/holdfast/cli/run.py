"""`holdfast run`: run another program with Holdfast imported, so that it can load folders that Holdfast saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

STARTED = Path(__file__).parent / "started"  # has the sitecustomize.py that Python runs at its start


@dataclass(frozen=True)
class Run:
    """Run another program with Holdfast imported, so that transformers can load the folders that Holdfast saved.

    The program is a command, a Python file, or `python` with its arguments; processes that it starts import Holdfast too.

    Examples: `holdfast run -- lm_eval --model hf --model_args pretrained=out --tasks arc_easy`,
    `holdfast run -- trl sft --model_name_or_path out ...`, `holdfast run -- python -m my.training`, `holdfast run train.py`
    """

    program: Positional[str]
    """A command, or a Python file."""
    arguments: Positional[tuple[str, ...]] = ()
    """The arguments of the program."""

    def run(self) -> None:
        line = [*self._executable(), *self.arguments]
        path = os.pathsep.join([str(STARTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        sys.stdout.flush()
        sys.stderr.flush()
        if os.name == "nt":  # Windows cannot replace the running process
            sys.exit(subprocess.call(line, env=environment))
        os.execve(line[0], line, environment)

    def _executable(self) -> list[str]:
        """Return the program with its full path; commands of this Python's environment come first, even if not active."""
        if self.program.endswith(".py"):
            if not Path(self.program).is_file():
                raise ValueError(f"there is no file {self.program}.")
            return [sys.executable, self.program]
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        found = shutil.which(self.program, path=beside)
        if found is None:
            raise ValueError(f"command {self.program!r} not found; for a Python module: holdfast run -- python -m NAME.")
        return [found]


def program_of(arguments: list[str]) -> Run | None:
    """Return the program of a command line `run ...`, its arguments unparsed; None if the line asks for help."""
    rest = arguments[2:] if arguments[1:2] == ["--"] else arguments[1:]
    if not rest or (rest == arguments[1:] and rest[0].startswith("-")):
        return None
    return Run(rest[0], tuple(rest[1:]))
