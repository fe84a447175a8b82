"""`holdfast run`: run another program with Holdfast imported, so that it can load folders that Holdfast saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from holdfast.cli.common import PluginFiles

STARTED = Path(__file__).parent / "started"  # has the sitecustomize.py that Python runs at its start
PLUGIN_FILES = "HOLDFAST_RUN_PLUGINS"  # environment variable with the plugin files for it, as in PATH


@dataclass(frozen=True)
class Run:
    """Run another program with Holdfast imported, so that transformers can load the folders that Holdfast saved.

    The program is a command, a Python file, or `python` with its arguments; processes that it starts import Holdfast too.

    Examples: `holdfast run -- lm_eval --model hf --model_args pretrained=out --tasks arc_easy`,
    `holdfast run -- trl sft --model_name_or_path out ...`, `holdfast run --plugin mine.py -- lm_eval ...`,
    `holdfast run -- python -m my.training`, `holdfast run train.py`
    """

    program: Positional[str]
    """A command, or a Python file."""
    arguments: Positional[tuple[str, ...]] = ()
    """The arguments of the program."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        if self.program.endswith(".py"):
            if not Path(self.program).is_file():
                raise ValueError(f"there is no file {self.program}.")
            line = [sys.executable, self.program, *self.arguments]
        else:  # commands of this Python's environment come first, even if it is not active
            beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
            if (program := shutil.which(self.program, path=beside)) is None:
                raise ValueError(f"command {self.program!r} not found; for a Python module: holdfast run -- python -m NAME.")
            line = [program, *self.arguments]
        path = os.pathsep.join([str(STARTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        files = os.pathsep.join(str(file.absolute()) for file in self.plugins.plugin)
        environment = {**os.environ, "PYTHONPATH": path, **({PLUGIN_FILES: files} if files else {})}
        sys.stdout.flush()
        sys.stderr.flush()
        if os.name == "nt":  # Windows cannot replace the running process
            sys.exit(subprocess.call(line, env=environment))
        os.execve(line[0], line, environment)


def program_of(arguments: list[str]) -> Run | None:
    """Return the program that follows `holdfast run`, its arguments unparsed; None if the line asks for help.

    `--plugin FILE` may stand before the program.
    """
    rest, files = list(arguments), list[Path]()
    while rest and rest[0].partition("=")[0] == "--plugin":
        _, sign, value = rest.pop(0).partition("=")
        if not sign and rest:
            value = rest.pop(0)
        files.append(Path(value))
    is_marked = rest[:1] == ["--"]
    rest = rest[1:] if is_marked else rest
    if not rest or (not is_marked and rest[0].startswith("-")):
        return None
    return Run(rest[0], tuple(rest[1:]), PluginFiles(tuple(files)))
